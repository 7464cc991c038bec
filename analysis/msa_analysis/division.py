"""Do proxies divide the labour by distance? Information between the proxy and how far back it looks.

Columns, `pool` and intervals: `msa_analysis.specialization`.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.estimate import NO_HEADS, NO_SLOTS, NO_TEACHER, NUMBERS, Statistic, estimate, table, tallied, zero
from msa_analysis.information import MOMENTS, degrees, eta_squared, information, permuted, proxy_divergence
from msa_analysis.statistics import discoveries

KEYS = ["metric", "step", "layer"]
ALONE = "one proxy: nothing to tell apart"


def _bins(sums: xr.Dataset, source: str) -> xr.DataArray:
    """Counts by bin, of the proxies' choice, their teacher's, or the single heads' ("head")."""
    return _by_label(sums, "bins", source)


def _moments(sums: xr.Dataset, source: str) -> xr.DataArray:
    """The same by moment of log2 distance."""
    return xr.concat([_by_label(sums, name, source) for name in MOMENTS], "moment")


def _by_label(sums: xr.Dataset, name: str, source: str) -> xr.DataArray:
    if source != "head":
        return sums[name].sel(source=source, drop=True)
    # Heads are of the last record, and have no dimension for it.
    return 0 * sums["slots"].sum(("source", "proxy")) + sums[f"head_{name}"]


class Form(NamedTuple):
    """One of the two forms of the strength: the table it is of, and what it is, of which degrees of freedom."""

    metric: str
    measure: str
    table: Callable[[xr.Dataset, str], xr.DataArray]
    plug_in: Callable[[xr.DataArray, str], xr.DataArray]
    degrees: Callable[[xr.DataArray, str], float]

    def of(self, source: str) -> Statistic:
        """The statistic of the proxies' choice, their teacher's, or the single heads' ("head")."""
        return lambda sums: self.plug_in(self.table(sums, source), "head" if source == "head" else "proxy")

    def freedom(self, sums: xr.Dataset, source: str) -> float:
        """Degrees of freedom of a layer's number."""
        return self.degrees(self.table(sums, source), "head" if source == "head" else "proxy")


FORMS = (
    Form("mutual_information", "information", _bins, information, degrees),
    Form("eta_squared", "eta_squared", _moments, eta_squared, lambda of, labels: max(of.sizes[labels] - 1.0, 1.0)),
)


def mutual_information(data: xr.Dataset, *, pool: Sequence[str] = (), permutations: int = 999) -> pd.DataFrame:
    """Specialization strength, in two forms: how well the proxy is told from how far back it looks (learned slots).

    `mutual_information`: I(proxy; log2 bin of distance) in bits; 0 to log2(proxies). `eta_squared`: between-proxy share
    of the variance of log2 distance; 0 to 1. Both are jackknife bias-corrected, with the interval of a sum of squares
    (`jackknife_square`): the value may be a little below 0, the interval is not. Their null: 0; beside it `plug_in`
    (uncorrected), and from labels of the proxies permuted within documents (each document's whole table at a time, so
    that rows of a document stay together) `null_mean`, `null_high` (95 %) and the one-sided `p_value` of the plug-in:
    the test of the null. With p proxies and D documents there are (p!)^(D - 1) distinct labellings: where they cannot
    reach 0.05 the p-value is not defined.

    Each has these beside it, under its name and an ending:
    `..._excess`: minus the same of the untrained proxies (first record), paired by document (null 0); not defined where
    the log does not begin with them. Its interval is its test, and allows for pairs of documents (`pair_shrinkage`).
    Where proxies differ at neither record it still leaves out 0 in 2 % or less, not 5: whatever makes the difference of
    two squares large makes its error look large. Whether they differ at all is tested above.
    `..._teacher`, `..._heads` (each head's own top blocks, last record; null 0, no test but the interval): proxies can
    specialize only as far as their heads differ.
    `..._share`: the proxies' as a share of the heads' own (last record; of the sums over what is pooled; no null); not
    defined where the heads' own interval reaches 0.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, "bins", *MOMENTS, optional=("head_bins", *(f"head_{name}" for name in MOMENTS)))
    over = [name for name in pool if name != "proxy"]
    frame = table(*(part for form in FORMS for part in _strength(sums, form, over, permutations)))
    if sums.sizes["proxy"] < 2:
        frame.loc[~frame["metric"].str.endswith("heads"), NUMBERS] = np.nan
        frame["reason"] = frame["reason"].mask(frame["value"].isna(), ALONE)
    return frame


def _strength(sums: xr.Dataset, form: Form, over: Sequence[str], permutations: int) -> list[pd.DataFrame]:
    """One form with its test, over untrained proxies, and beside the teacher's and the heads' own."""
    first = _square(sums, form, "proxy", form.metric, over, NO_SLOTS)
    tested = permuted(form.table(sums, "proxy"), form.measure, over, permutations)
    return [
        first.merge(tested, how="left"),
        _beyond_untrained(sums, form, over),
        _square(sums, form, "teacher", f"{form.metric}_teacher", over, NO_TEACHER),
        *_beside_heads(sums.isel(step=[-1]), form, over),
    ]


def _square(sums: xr.Dataset, form: Form, source: str, metric: str, over: Sequence[str], absent: str) -> pd.DataFrame:
    """A sum of squares against 0."""
    of, squares = form.of(source), form.freedom(sums, source) * (sums.sizes["layer"] if over else 1)
    return estimate(sums, metric, of, null=zero(of), pool=over, squares=squares, absent=absent)


def _beyond_untrained(sums: xr.Dataset, form: Form, over: Sequence[str]) -> pd.DataFrame:
    own, metric, steps = form.of("proxy"), f"{form.metric}_excess", sums["step"].values

    def excess(s: xr.Dataset) -> xr.DataArray:
        return own(s) - own(s).isel(step=0, drop=True)

    beyond = estimate(sums, metric, excess, null=zero(own), pool=over, correct_bias=True, paired=True)
    untrained = beyond["step"] == steps[0]
    beyond.loc[untrained, [*NUMBERS, "reason"]] = [np.nan, np.nan, np.nan, "the first record is the reference"]
    if steps[0] != sums.attrs.get("first_step", steps[0]):
        beyond[[*NUMBERS, "reason"]] = [np.nan, np.nan, np.nan, "the log does not begin with untrained proxies"]
    return beyond


def _beside_heads(end: xr.Dataset, form: Form, over: Sequence[str]) -> list[pd.DataFrame]:
    """The heads' own strength, and the proxies' as a share of it, at the last record where that holds the heads."""
    if "head_bins" not in end:
        return []
    own, heads = form.of("proxy"), form.of("head")

    def share(s: xr.Dataset) -> xr.DataArray:
        whole = heads(s).mean(list(over))
        return own(s).mean(list(over)) / whole.where(whole > 0)

    alone = _square(end, form, "head", f"{form.metric}_heads", over, NO_HEADS)
    part = estimate(
        end, f"{form.metric}_share", share, null=lambda s: np.nan * share(s), correct_bias=True, absent=NO_HEADS
    )
    # Both have a row a layer, or one in all, in the same order.
    unclear = ~(alone["low"] > 0).to_numpy()
    why = alone["reason"].where(alone["low"].isna(), "the heads' own interval reaches 0")
    part.loc[unclear, NUMBERS], part.loc[unclear, "reason"] = np.nan, why[unclear].to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    return [alone, part]


def proxy_information(data: xr.Dataset, *, permutations: int = 999) -> pd.DataFrame:
    """Bits by which one proxy's distances tell it from all of them, at the last record: a row a layer and proxy.

    `proxy_information`: Kullback-Leibler divergence of the proxy's log2 distance profile from that of all proxies of
    its layer together, jackknife bias-corrected (null 0); the mean over proxies is the mutual information. `p_value`:
    one-sided, labels permuted within documents as in `mutual_information`. `q_value`: the p-values of all layers and
    proxies corrected together (Benjamini and Hochberg).

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    end = tallied(data, "bins").isel(step=[-1])

    def own(s: xr.Dataset) -> xr.DataArray:
        return proxy_divergence(s["bins"].sel(source="proxy", drop=True))

    bins = end["bins"].sel(source="proxy", drop=True)
    frame = estimate(end, "proxy_information", own, null=zero(own), squares=degrees(bins, one=True))
    frame = frame.merge(permuted(bins, "divergence", (), permutations), how="left")
    if end.sizes["proxy"] < 2:
        frame[[*NUMBERS, "p_value"]], frame["reason"] = np.nan, ALONE
    frame["q_value"] = discoveries(frame["p_value"])
    return frame

"""Do proxies divide the labour by distance? Information between the proxy and how far back it looks.

Columns, `pool` and intervals: `msa_analysis.specialization`.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.estimate import NO_HEADS, NO_SLOTS, NO_TEACHER, NUMBERS, Statistic, estimate, table, tallied, zero
from msa_analysis.information import degrees, eta_squared, information, moments, permuted, proxy_divergence
from msa_analysis.statistics import discoveries

KEYS = ["metric", "step", "layer"]
DISTANCES = ("bins", "log_slots", "log_distance", "log_distance2")
ALONE = "one proxy: nothing to tell apart"


def mutual_information(data: xr.Dataset, *, pool: Sequence[str] = (), permutations: int = 999) -> pd.DataFrame:
    """Specialization strength: I(proxy; log2 bin of distance) in bits over learned slots; 0 to log2(proxies).

    `mutual_information`: jackknife bias-corrected, with the interval of a sum of squares (`jackknife_square`): the
    value may be a little below 0, the interval is not. Its null: 0; beside it `plug_in` (uncorrected), and from labels
    of the proxies permuted within documents (each document's whole table at a time, so that rows of a document stay
    together) `null_mean`, `null_high` (95 %) and the one-sided `p_value` of the plug-in: the test of the null. With p
    proxies and D documents there are (p!)^(D - 1) distinct labellings: where they cannot reach 0.05 the p-value is not
    defined.
    `mutual_information_excess`: minus the same of the untrained proxies (first record), paired by document; not
    defined where the log does not begin with them. Its interval is its test, and allows for pairs of documents
    (`pair_shrinkage`). Where proxies differ at neither record it still leaves out 0 in 1 to 2 % only, not 5: whatever
    makes the difference of two squares large makes its error look large. Whether they differ at all is tested above.
    `mutual_information_teacher`, `mutual_information_heads` (each head's own top blocks, last record): proxies can
    specialize only as far as their heads differ. `mutual_information_share`: the proxies' as a share of the heads' own
    (last record; of the sums over what is pooled; no null); not defined where the heads' own interval reaches 0.
    `eta_squared`: between-proxy share of the variance of log2 distance; interval and test as those of the information.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, *DISTANCES, optional=("head_bins",))
    own, over = _of("proxy"), [name for name in pool if name != "proxy"]

    layers = sums.sizes["layer"] if "layer" in over else 1

    def excess(s: xr.Dataset) -> xr.DataArray:
        return own(s) - own(s).isel(step=0, drop=True)

    def squared(metric: str, of: Statistic, freedom: float, absent: str = NO_SLOTS) -> pd.DataFrame:
        return estimate(sums, metric, of, null=zero(of), pool=over, squares=freedom * layers, absent=absent)

    def share(s: xr.Dataset) -> xr.DataArray:
        return eta_squared(moments(s))

    bins = sums["bins"]
    first = squared("mutual_information", own, degrees(bins.sel(source="proxy")))
    variance = squared("eta_squared", share, max(sums.sizes["proxy"] - 1, 1))
    beyond = estimate(
        sums, "mutual_information_excess", excess, null=zero(own), pool=over, correct_bias=True, paired=True
    )
    untrained = beyond["step"] == sums["step"].values[0]
    beyond.loc[untrained, [*NUMBERS, "reason"]] = [np.nan, np.nan, np.nan, "the first record is the reference"]
    if sums["step"].values[0] != sums.attrs.get("first_step", sums["step"].values[0]):
        beyond[[*NUMBERS, "reason"]] = [np.nan, np.nan, np.nan, "the log does not begin with untrained proxies"]
    proxies = bins.sel(source="proxy", drop=True)
    parts = [
        first.merge(permuted(proxies, "information", over, permutations), how="left"),
        beyond,
        squared("mutual_information_teacher", _of("teacher"), degrees(bins.sel(source="teacher")), NO_TEACHER),
        variance.merge(permuted(moments(sums), "eta_squared", over, permutations), how="left"),
    ]
    frame = table(*parts, *_beside_heads(sums.isel(step=[-1]), over))
    if sums.sizes["proxy"] < 2:
        frame.loc[~frame["metric"].str.endswith("heads"), NUMBERS] = np.nan
        frame["reason"] = frame["reason"].mask(frame["value"].isna(), ALONE)
    return frame


def _of(source: str) -> Statistic:
    return lambda s: information(s["bins"].sel(source=source, drop=True))


def _beside_heads(end: xr.Dataset, over: Sequence[str]) -> list[pd.DataFrame]:
    """The heads' own information, and the proxies' as a share of it, at the last record where that holds the heads."""
    if "head_bins" not in end:
        return []
    own = _of("proxy")

    def heads(s: xr.Dataset) -> xr.DataArray:
        return information(s["head_bins"], "head") + 0 * own(s)

    def share(s: xr.Dataset) -> xr.DataArray:
        whole = heads(s).mean(list(over))
        return own(s).mean(list(over)) / whole.where(whole > 0)

    freedom = degrees(end["head_bins"], "head") * (end.sizes["layer"] if over else 1)
    name = "mutual_information_heads"
    alone = estimate(end, name, heads, null=zero(heads), pool=over, squares=freedom, absent=NO_HEADS)
    part = estimate(
        end, "mutual_information_share", share, null=lambda s: np.nan * share(s), correct_bias=True, absent=NO_HEADS
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

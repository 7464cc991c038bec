"""Do proxies specialize? Each number with its null and its interval, as tidy tables.

Every function takes a selection Dataset (`msa_lab.selections.open_selections(run)`) or its `tally`, which is worth
keeping when several are called. Learned slots of unsaturated rows count, nothing else (`msa_analysis.choices`).

Columns: metric, step, phase, layer, proxy (other, bin, where they apply), value, low, high (95 %, delete-one-document
jackknife with Student's t: it speaks of this one model), null (what a choice without the property would give),
documents, reason (why a number is "not defined", i.e. NaN). `pool` names dimensions that are averaged over before
the interval is taken: ("proxy",) gives a number a layer, ("layer", "proxy") one a run.

Definitions of block recall: MiniMax Sparse Attention, section on selection quality; the others are this project's.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from msa_analysis.choices import bin_label
from msa_analysis.estimate import Statistic, estimate
from msa_analysis.information import eta_squared, information, permuted
from msa_analysis.tally import tally

KEYS = ["metric", "step", "layer"]
NUMBERS = ["value", "low", "high"]
RUN = ("layer", "proxy")
"""Pool over these for one number a run."""


def distance_profile(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of a proxy's learned slots in each log2 bin of distance: metric `distance_profile`, columns bin, distance.

    Null: a uniform choice among the eligible blocks of the same rows. The teacher's own top blocks: metric
    `distance_profile_teacher`.
    """
    return _profiles(data, "distance_profile", "bins", "bin", pool)


def position_profile(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of learned slots in eight equal parts of x = (distance - 1) / (visible - 2): 0 nearest, 1 farthest.

    Metric `position_profile`, column part. Null and teacher as in `distance_profile`.
    """
    return _profiles(data, "position_profile", "shares", "part", pool)


def recency(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Recency index R = E[1 - x] over learned slots: 1 = always the newest blocks, 0 = always the oldest.

    Null: exactly 0.5, for uniform choice without replacement. `excess_recency` is R minus the R of the teacher's own
    top blocks (null 0): what the proxy adds to its heads' own taste for the near.
    """
    sums = _tallied(data)

    def index(source: str) -> Statistic:
        return lambda s: s["closeness"].sel(source=source, drop=True) / s["slots"].sel(source=source, drop=True)

    own, teacher = index("proxy"), index("teacher")
    return _table(
        estimate(sums, "recency", own, null=lambda s: xr.full_like(own(s), 0.5), pool=pool),
        estimate(sums, "recency_teacher", teacher, null=lambda s: xr.full_like(own(s), 0.5), pool=pool),
        estimate(sums, "excess_recency", lambda s: own(s) - teacher(s), null=lambda s: 0 * own(s), pool=pool),
    )


def block_recall(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of the teacher's learned-slot blocks that the proxy chose too (forced blocks left out on both sides).

    The teacher: the group's own top blocks by dense attention mass on the same weights; for a model trained sparse
    it is a diagnostic, no ceiling. Null: the exact expectation under uniform choice of as many blocks, row by row:
    slots / eligible. `recall_excess` is recall minus that (null 0).
    """
    sums = _tallied(data)

    def share(name: str) -> Statistic:
        return lambda s: s[name].sum("bin") / s["wanted"].sum("bin")

    hit, chance = share("hits"), share("chance_hits")
    return _table(
        estimate(sums, "block_recall", hit, null=chance, pool=pool),
        estimate(sums, "recall_excess", lambda s: hit(s) - chance(s), null=lambda s: 0 * hit(s), pool=pool),
    )


def recall_by_distance(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """`block_recall` by the log2 distance of the teacher's block: metric `recall_by_distance`. Null: as there."""
    rate = estimate(
        _tallied(data),
        "recall_by_distance",
        lambda s: s["hits"] / s["wanted"],
        null=lambda s: s["chance_hits"] / s["wanted"],
        pool=pool,
    )
    return _table(_labelled(rate))


def overlap(data: xr.Dataset, *, pool: Sequence[str] = ("proxy", "other")) -> pd.DataFrame:
    """How alike two proxies choose in the same row, split into where they look and what they look at.

    `overlap` o: blocks both chose / learned slots; null e: the same under uniform choice. `kappa` = (o - e)/(1 - e).
    `positional`: kappa with the second proxy taken in another document at the same query position (mean over all
    pairs of documents). `content` = kappa - positional. Nulls 0. With pool=() a row a pair, else the mean over pairs.
    """
    sums = _tallied(data)
    proxies = sums.sizes["proxy"]
    upper = xr.DataArray(np.triu(np.ones((proxies, proxies), bool), 1), dims=("proxy", "other"))

    def ratio(name: str, slots: str) -> Statistic:
        def statistic(s: xr.Dataset) -> xr.DataArray:
            below = s["slots"].sel(source="proxy", drop=True) if slots == "slots" else s[slots]
            return (s[name] / below.where(below > 0)).where(upper)

        return statistic

    same, chance, other = (
        ratio("shared", "slots"),
        ratio("chance_shared", "slots"),
        ratio("shared_other", "slots_other"),
    )

    def kappa(of: Statistic) -> Statistic:
        return lambda s: (of(s) - chance(s)) / (1 - chance(s))

    def zero(s: xr.Dataset) -> xr.DataArray:
        return 0 * same(s)

    parts = [
        estimate(sums, "overlap", same, null=chance, pool=pool),
        estimate(sums, "kappa", kappa(same), null=zero, pool=pool),
        estimate(sums, "positional", kappa(other), null=zero, pool=pool),
        estimate(sums, "content", lambda s: kappa(same)(s) - kappa(other)(s), null=zero, pool=pool),
    ]
    frame = _table(*parts)
    if "other" not in pool and proxies > 1:
        frame = frame[frame["proxy"] < frame["other"]].reset_index(drop=True)
    if proxies < 2:
        frame["reason"] = "one proxy: there is no pair"
    return frame


def mutual_information(data: xr.Dataset, *, pool: Sequence[str] = (), permutations: int = 999) -> pd.DataFrame:
    """Specialization strength: I(proxy; log2 bin of distance) in bits over learned slots; 0 to log2(proxies).

    `mutual_information`: jackknife bias-corrected. Its null: 0; beside it `plug_in` (uncorrected), and from labels
    of the proxies permuted within documents (each document's whole table at a time, so that rows of a document stay
    together) `null_mean`, `null_high` (95 %) and the one-sided `p_value` of the plug-in. With p proxies and D
    documents there are (p!)^(D - 1) distinct labellings: where they cannot reach 0.05 the p-value is not defined.
    `mutual_information_excess`: minus the same of the untrained proxies (first record), paired by document; not
    defined where the log does not begin with them.
    `mutual_information_teacher`, `mutual_information_heads` (each head's own top blocks, last record): proxies can
    specialize only as far as their heads differ. `eta_squared`: between-proxy share of the variance of log2 distance.
    """
    sums = _tallied(data)

    def of(source: str) -> Statistic:
        return lambda s: information(s["bins"].sel(source=source, drop=True))

    own, over = of("proxy"), [name for name in pool if name != "proxy"]

    def zero(s: xr.Dataset) -> xr.DataArray:
        return 0 * own(s)

    def excess(s: xr.Dataset) -> xr.DataArray:
        return own(s) - own(s).isel(step=0, drop=True)

    def corrected(metric: str, statistic: Statistic) -> pd.DataFrame:
        return estimate(sums, metric, statistic, null=zero, pool=over, correct_bias=True)

    first = corrected("mutual_information", own)
    beyond = corrected("mutual_information_excess", excess)
    untrained = beyond["step"] == sums["step"].values[0]
    beyond.loc[untrained, [*NUMBERS, "reason"]] = [np.nan, np.nan, np.nan, "the first record is the reference"]
    if sums["step"].values[0] != sums.attrs.get("first_step", sums["step"].values[0]):
        beyond[[*NUMBERS, "reason"]] = [np.nan, np.nan, np.nan, "the log does not begin with untrained proxies"]
    parts = [first.merge(permuted(sums, over, permutations), how="left"), beyond]
    parts.append(corrected("mutual_information_teacher", of("teacher")))
    if "head_bins" in sums:
        heads = corrected("mutual_information_heads", lambda s: information(s["head_bins"], "head") + 0 * own(s))
        parts.append(heads[heads["step"] == sums["step"].values[-1]])
    parts.append(corrected("eta_squared", eta_squared))
    frame = _table(*parts)
    if sums.sizes["proxy"] < 2:
        frame.loc[~frame["metric"].str.endswith("heads"), ["value", "low", "high"]] = np.nan
        frame["reason"] = frame["reason"].mask(frame["value"].isna(), "one proxy: nothing to tell apart")
    return frame


def summary(data: xr.Dataset, *, history: pd.DataFrame | None = None) -> pd.DataFrame:
    """The last record in one table: each metric a layer, and the mean over layers (layer is missing there).

    `q_value` is the p-value of the mutual information corrected over layers (Benjamini and Hochberg). `history` is
    what `dynamics` gave for the same data, where that is at hand.
    """
    sums = _tallied(data.isel(step=sorted({0, data.sizes["step"] - 1})))
    frame = dynamics(sums) if history is None else history
    frame = frame[frame["step"] == sums["step"].values[-1]].drop(columns=["null_mean", "null_high", "p_value"])
    end = sums.isel(step=[-1])
    null = pd.concat([mutual_information(end, pool=pool, permutations=999) for pool in (("proxy",), RUN)])
    frame = frame.merge(null[[*KEYS, "null_mean", "null_high", "p_value"]], how="left", on=KEYS)
    family = frame["p_value"].notna() & frame["layer"].notna()
    frame["q_value"] = np.nan
    if family.any():
        frame.loc[family, "q_value"] = stats.false_discovery_control(frame.loc[family, "p_value"])
    return frame


def dynamics(data: xr.Dataset) -> pd.DataFrame:
    """Recency, recall, overlap and mutual information at every record, a layer and (layer missing) their mean."""
    sums = _tallied(data)
    parts = [function(sums, pool=pool) for function in (recency, block_recall) for pool in (("proxy",), RUN)]
    parts += [overlap(sums, pool=pool) for pool in (("proxy", "other"), (*RUN, "other"))]
    parts += [mutual_information(sums, pool=pool, permutations=0) for pool in (("proxy",), RUN)]
    return pd.concat(parts, ignore_index=True)


def _tallied(data: xr.Dataset) -> xr.Dataset:
    return tally(data) if "selected" in data else data


def _profiles(data: xr.Dataset, metric: str, name: str, dim: str, pool: Sequence[str]) -> pd.DataFrame:
    sums = _tallied(data)

    def share(source: str, of: str) -> Statistic:
        return lambda s: s[of].sel(source=source, drop=True) / s["slots"].sel(source=source, drop=True)

    parts = []
    for source, suffix in (("proxy", ""), ("teacher", "_teacher")):
        rate, uniform = share(source, name), share(source, f"uniform_{name}")
        parts.append(_labelled(estimate(sums, metric + suffix, rate, null=uniform, pool=pool)))
    return _table(*parts)


def _labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """With the distances that a log2 bin holds."""
    return frame.assign(distance=frame["bin"].map(bin_label)) if "bin" in frame else frame


def _table(*parts: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True)

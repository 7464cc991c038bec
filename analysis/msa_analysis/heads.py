"""What the single heads want, and whether the groups that proxies serve are better than groups drawn at random.

A proxy can specialize only as far as its heads differ, and serve them only as far as they agree. Adjacent heads make a
group. Heads' own top blocks, by dense attention on the same weights, are recorded at the last record only.
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
from jaxtyping import Bool
from scipy.special import gammaln

from msa_analysis.estimate import (
    NO_HEADS,
    NUMBERS,
    Statistic,
    difference,
    estimate,
    ratio,
    rescaled,
    table,
    tallied,
    zero,
)
from msa_analysis.information import LEAST, grouped_information, rank

HEADS = ("head_bins", "head_slots", "head_shared", "head_chance_shared")
REGROUPINGS = 64
"""Random regroupings behind `group_information_excess`."""
NO_GROUPS = "one head a group, or one group: nothing to regroup"


def head_groups(data: xr.Dataset, *, pool: Sequence[str] = (), permutations: int = 999) -> pd.DataFrame:
    """The heads' own top blocks at the last record, a row a layer (or, with "layer" in `pool`, one in all).

    `overlap_heads`, `kappa_heads`: as `overlap`, mean over all pairs of heads. `kappa_within_groups`: over pairs that
    share a proxy; null: all pairs, which is its expectation over random regroupings.
    `group_information`: I(group; log2 bin of distance) in bits, plug-in, no interval; null: its mean over random
    regroupings of the layer's heads into groups of the same size; beside it `null_high` (95 %) and the one-sided
    `p_value`, the rank among regroupings. Its steps are as coarse as groupings are few: 8 heads in 2 groups have 35, so
    that it rejects at 1/35 where 1/20 is asked (with fewer than 20 it is not defined); in 4 groups they have 105, 16
    heads in 2 groups 6,435.
    `group_information_excess`: minus that mean. Its null, 0, is the same and so is its test, the `p_value`: where no
    head differs from another the interval leaves 0 out less often than 5 %.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, optional=HEADS).isel(step=[-1])
    over = [name for name in pool if name == "layer"]
    if "head_bins" not in sums:
        return _undefined(sums, METRICS, ("proxy", *over), NO_HEADS)
    heads, groups = sums.sizes["head"], sums.sizes["proxy"]
    if heads % groups:
        raise ValueError(f"head_teacher: has {heads} heads, which {groups} proxies do not divide; try {groups * 2}")
    above = np.triu(np.ones((heads, heads), bool), 1)
    group = np.arange(heads) // (heads // groups)
    overlap, kappa = _pairwise(above)
    _, within = _pairwise(above & (group[:, None] == group))
    frame = table(
        estimate(sums, "overlap_heads", overlap, null=_pairwise(above, "head_chance_shared")[0], pool=over),
        estimate(sums, "kappa_heads", kappa, null=zero(kappa), pool=over),
        estimate(sums, "kappa_within_groups", within, null=kappa, pool=over),
        *_informed(sums, over, permutations),
    )
    if groups in (1, heads):
        grouped = frame["metric"].isin(METRICS[2:])
        frame.loc[grouped, [*NUMBERS, "p_value"]], frame.loc[grouped, "reason"] = np.nan, NO_GROUPS
    return frame


METRICS = ("overlap_heads", "kappa_heads", "kappa_within_groups", "group_information", "group_information_excess")


def _pairwise(pairs: Bool[np.ndarray, "head other_head"], name: str = "head_shared") -> tuple[Statistic, Statistic]:
    """Overlap and kappa, mean over the marked pairs of heads."""
    marked = xr.DataArray(pairs, dims=("head", "other_head"))
    same, chance = ratio(name, "head_slots"), ratio("head_chance_shared", "head_slots")

    def mean(of: Statistic) -> Statistic:
        return lambda s: of(s).where(marked).mean(("head", "other_head")) + 0 * _any(s)

    return mean(same), mean(rescaled(same, chance))


def _any(sums: xr.Dataset) -> xr.DataArray:
    """Of the shape of one number a record and layer."""
    return sums["slots"].sum(("source", "proxy"))


def _informed(sums: xr.Dataset, over: Sequence[str], permutations: int) -> list[pd.DataFrame]:
    """Information of the groups as they are, against heads regrouped at random."""
    heads, groups, layers = sums.sizes["head"], sums.sizes["proxy"], sums.sizes["layer"]
    rng = np.random.default_rng(0)
    drawn = rng.random((layers, max(permutations, REGROUPINGS), heads)).argsort(-1)
    as_is = np.broadcast_to(np.arange(heads), (layers, 1, heads))

    def under(order: np.ndarray) -> Statistic:
        return lambda s: grouped_information(s["head_bins"], order, groups).mean("regrouping") + 0 * _any(s)

    real, random = under(as_is), under(drawn[:, :REGROUPINGS])
    excess = difference(real, random)
    whole = sums["head_bins"].sum("document")
    null = grouped_information(whole, drawn, groups).mean(list(over)).rename(regrouping="draw")
    plug_in = grouped_information(whole, as_is, groups).isel(regrouping=0).mean(list(over))
    # Groups are sets, and the heads of a group have no order.
    groupings = gammaln(heads + 1) - groups * gammaln(heads // groups + 1) - gammaln(groups + 1)
    p_value = rank(plug_in, null).where((permutations > 0) & (groupings >= LEAST - 1e-9))
    parts = [
        estimate(sums, "group_information", real, null=random, pool=over),
        estimate(sums, "group_information_excess", excess, null=zero(excess), pool=over),
    ]
    # Plug-in, and so too high by what the null is too high by: an interval around it would hold nothing.
    parts[0][["low", "high"]] = np.nan
    parts[0]["null_high"] = null.quantile(0.95, "draw").values.reshape(-1)
    return [frame.assign(p_value=p_value.values.reshape(-1)) for frame in parts]


def group_divergence(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """How much the heads of a proxy's group disagree: the part of the KL to single heads that no proxy can remove.

    `group_divergence`: generalised Jensen-Shannon divergence H(mean of heads) - mean of H(head), in nats, of the dense
    attention mass by block, mean over queries; 0 to log(heads of a group), and a lower bound of that of single keys.
    At every record. Null, at the last record: the mean over random regroupings of the layer's heads, as recorded.
    `group_divergence_excess`: minus that (null 0; negative: adjacent heads agree more), at the last record.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    names = ("divergence", "all_rows")
    sums = tallied(data, *names, optional=("regrouped_divergence",))
    own, why = ratio(*names), "the log holds no divergence of heads"
    frame = estimate(sums, "group_divergence", own, null=lambda s: np.nan * own(s), pool=pool, absent=why)
    end = sums.isel(step=[-1])
    if "regrouped_divergence" not in sums:
        return table(frame, _undefined(end, ("group_divergence_excess",), pool, why))

    def random(s: xr.Dataset) -> xr.DataArray:
        rows = s["all_rows"].where(s["all_rows"] > 0)
        return s["regrouped_divergence"].mean("regrouping") / rows

    excess = difference(own, random)
    beyond = estimate(end, "group_divergence_excess", excess, null=zero(excess), pool=pool, absent=why)
    last = (frame["step"] == beyond["step"].iloc[0]).to_numpy()
    frame.loc[last, "null"] = estimate(end, "", random, null=random, pool=pool)["value"].to_numpy()
    frame = table(frame, beyond)
    heads = sums.attrs.get("num_query_heads", 0)
    if sums.sizes["proxy"] == heads:
        frame[NUMBERS], frame["null"], frame["reason"] = np.nan, np.nan, "one head a group: nothing to disagree"
    elif sums.sizes["proxy"] == 1:
        alone = frame["metric"] == "group_divergence_excess"
        frame.loc[alone, NUMBERS], frame.loc[alone, "reason"] = np.nan, NO_GROUPS
    return frame


def teacher_entropy(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """How spread out the dense attention of a proxy's group is: `teacher_entropy`, in nats over blocks, of the mean of
    its heads; mean over queries. Null: log of the visible blocks, attention spread evenly, which is its most.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums, names = tallied(data, "entropy", "log_visible", "all_rows"), ("entropy", "log_visible")
    own, most = (ratio(name, "all_rows") for name in names)
    why = "the log holds no entropy of the dense attention"
    return table(estimate(sums, "teacher_entropy", own, null=most, pool=pool, absent=why))


def _undefined(sums: xr.Dataset, metrics: Sequence[str], pool: Sequence[str], reason: str) -> pd.DataFrame:
    """A row where each number would stand, with the reason why there is none."""

    def nothing(s: xr.Dataset) -> xr.DataArray:
        return np.nan * s["slots"].sum("source")

    return table(*(estimate(sums, metric, nothing, null=nothing, pool=pool, absent=reason) for metric in metrics))

"""Where proxies look: distances, recency, the first block, and what they never look at.

Learned slots of unsaturated rows count, nothing else. Columns, `pool` and intervals: `msa_analysis.specialization`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.estimate import NO_SLOTS, NO_TEACHER, difference, estimate, ratio, table, tallied, zero


def distance_profile(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of a proxy's learned slots in each log2 bin of distance: metric `distance_profile`, columns bin, distance.

    Null: a uniform choice among the eligible blocks of the same rows. The teacher's own top blocks: metric
    `distance_profile_teacher`.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    return _profiles(data, "distance_profile", "bins", pool)


def position_profile(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of learned slots in eight equal parts of x = (distance - 1) / (visible - 2): 0 nearest, 1 farthest.

    Metric `position_profile`, column part. Null and teacher as in `distance_profile`.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    return _profiles(data, "position_profile", "shares", pool)


def _profiles(data: xr.Dataset, metric: str, name: str, pool: Sequence[str]) -> pd.DataFrame:
    sums = tallied(data, name, f"uniform_{name}")
    parts = []
    for source, suffix, absent in (("proxy", "", NO_SLOTS), ("teacher", "_teacher", NO_TEACHER)):
        rate, uniform = ratio(name, "slots", source=source), ratio(f"uniform_{name}", "slots", source=source)
        parts.append(estimate(sums, metric + suffix, rate, null=uniform, pool=pool, rate=rate, absent=absent))
    return table(*parts)


def recency(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Recency index R = E[1 - x] over learned slots: 1 = always the newest blocks, 0 = always the oldest.

    Null: exactly 0.5, for uniform choice without replacement. `excess_recency` is R minus the R of the teacher's own
    top blocks (null 0): what the proxy adds to its heads' own taste for the near.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, "closeness")
    own, teacher = ratio("closeness", "slots", source="proxy"), ratio("closeness", "slots", source="teacher")
    excess = difference(own, teacher)

    def half(s: xr.Dataset) -> xr.DataArray:
        return xr.full_like(own(s), 0.5)

    return table(
        estimate(sums, "recency", own, null=half, pool=pool),
        estimate(sums, "recency_teacher", teacher, null=half, pool=pool, absent=NO_TEACHER),
        estimate(sums, "excess_recency", excess, null=zero(excess), pool=pool, absent=NO_TEACHER),
    )


def sink_share(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of the queries whose learned slots hold block 0, where attention sinks would be.

    Null: the exact expectation under uniform choice of as many blocks, row by row: slots / eligible. `sink_excess` is
    the share minus that (null 0); `sink_share_teacher` the same for the teacher's own top blocks. Not defined where
    block 0 is forced: then it is no choice.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, "first_block", "rows", "chance_first_block")
    if sums.attrs.get("num_sink_blocks", 0):
        sums = sums.assign(first_block=np.nan * sums["first_block"])
    own, teacher = ratio("first_block", "rows", source="proxy"), ratio("first_block", "rows", source="teacher")
    chance = ratio("chance_first_block", "rows", source="proxy")
    excess, why = difference(own, chance), "block 0 is forced, or there are no learned slots"
    return table(
        estimate(sums, "sink_share", own, null=chance, pool=pool, rate=own, absent=why),
        estimate(sums, "sink_share_teacher", teacher, null=chance, pool=pool, rate=teacher, absent=NO_TEACHER),
        estimate(sums, "sink_excess", excess, null=zero(excess), pool=pool, rate=own, absent=why),
    )


def never_selected(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of the blocks of a document that some query could have chosen and none did.

    Null: the exact expectation under uniform choice, every query by itself: the mean over those blocks of the product
    of 1 - slots / eligible over the queries that could. Real queries are alike, so that values above the null are no
    alarm by themselves; a number that rises while training is.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, "never", "choosable", "chance_never")
    share, chance = ratio("never", "choosable"), ratio("chance_never", "choosable")
    return table(estimate(sums, "never_selected", share, null=chance, pool=pool, rate=share))

"""How alike choices are: of two proxies in one row, and of one proxy at two records.

Columns, `pool` and intervals: `msa_analysis.specialization`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.estimate import Statistic, estimate, ratio, rescaled, table, tallied, zero
from msa_analysis.pair_sums import NEXT

PAIRS = ("shared", "chance_shared", "shared_here", *NEXT, *NEXT.values())


def overlap(data: xr.Dataset, *, pool: Sequence[str] = ("proxy", "other")) -> pd.DataFrame:
    """How alike two proxies choose in the same row, split into where they look and what they look at.

    `overlap` o: blocks both chose / learned slots; null e: the same under uniform choice. `kappa` = (o - e)/(1 - e).
    `positional`: kappa with the second proxy taken in another document at the same query position (mean over all
    ordered pairs of documents, in the rows that both have). `content`: what the own document adds to that, in the same
    rows and units. kappa = positional + content where documents have equal lengths. Nulls 0. With pool=() a row a pair,
    else the mean over pairs.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, *PAIRS)
    proxies = sums.sizes["proxy"]
    upper = xr.DataArray(np.triu(np.ones((proxies, proxies), bool), 1), dims=("proxy", "other"))

    def paired(of: Statistic) -> Statistic:
        return lambda s: of(s).where(upper)

    same, chance = (paired(ratio(name, "slots", source="proxy")) for name in ("shared", "chance_shared"))
    kappa = rescaled(same, chance)
    positional, content = (
        paired(_beyond("shared_other", "chance_other")),
        paired(_beyond("shared_here", "shared_other")),
    )
    frame = table(
        estimate(sums, "overlap", same, null=chance, pool=pool),
        estimate(sums, "kappa", kappa, null=zero(kappa), pool=pool),
        estimate(sums, "positional", positional, null=zero(positional), pool=pool, paired=True),
        estimate(sums, "content", content, null=zero(content), pool=pool),
    )
    if "other" not in pool and proxies > 1:
        frame = frame.loc[frame["proxy"] < frame["other"]].reset_index(drop=True)
    if proxies < 2:
        frame["reason"] = "one proxy: there is no pair"
    return frame


def _beyond(name: str, less: str) -> Statistic:
    """The difference of two sums over pairs of documents, in units of what chance leaves: as kappa."""

    def statistic(sums: xr.Dataset) -> xr.DataArray:
        room = sums["slots_other"] - sums["chance_other"]
        return (sums[name] - sums[less]) / room.where(room > 0)

    return statistic


def fixed_choice(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """`fixed_choice`: how alike one proxy chooses at the same position of two documents, as kappa: 0 is uniform choice
    (the null), 1 is a choice that heeds the position alone, whatever is written.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, *PAIRS[3:])
    itself = xr.DataArray(np.eye(sums.sizes["proxy"], dtype=bool), dims=("proxy", "other"))
    positional = _beyond("shared_other", "chance_other")

    def alike(s: xr.Dataset) -> xr.DataArray:
        return positional(s).where(itself).max("other")

    return table(estimate(sums, "fixed_choice", alike, null=zero(alike), pool=pool, paired=True))


def churn(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of a proxy's learned slots that it had not chosen at the record before, same document and query.

    Rows count as often as there are other documents that have them. Null: the same against the record before of those
    *other* documents at the same query position: what would change even if only the position mattered. `stability` =
    1 - churn/null churn: 0 where the earlier choice of this very document says no more than another document's (the
    null), 1 where nothing changed. Not defined at the first record.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, "kept_here", "kept_other", "kept_slots")
    same, other = ratio("kept_here", "kept_slots"), ratio("kept_other", "kept_slots")
    stability, why = rescaled(same, other), "there is no record before this one"
    return table(
        estimate(sums, "churn", lambda s: 1 - same(s), null=lambda s: 1 - other(s), pool=pool, absent=why),
        estimate(sums, "stability", stability, null=zero(stability), pool=pool, absent=why),
    )

"""How well a proxy finds what its heads want: the teacher's blocks, and the dense attention that lies on them.

The teacher is the group's own top blocks by dense attention mass on the same weights; for a model trained sparse it is
a diagnostic, off its training support, and no ceiling. Forced blocks are left out on both sides, and rows in which the
proxy chose nothing. Columns, `pool` and intervals: `msa_analysis.specialization`.

Block recall: MiniMax Sparse Attention, section on selection quality. Coverage rescaled by what uniform choice and the
newest blocks reach is this project's: by itself coverage is high for any rule that likes the near.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import xarray as xr

from msa_analysis.estimate import (
    NO_MASS,
    NO_NEWEST,
    NO_TEACHER,
    Statistic,
    difference,
    estimate,
    ratio,
    rescaled,
    table,
    tallied,
    zero,
)

POSITION = ("position",)


def block_recall(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of the teacher's learned-slot blocks that the proxy chose too.

    Null: the exact expectation under uniform choice of as many blocks, row by row: slots / eligible. `recall_excess` is
    recall minus that (null 0).

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, "hits", "wanted", "chance_hits")
    hit, chance = (ratio(name, "wanted", over=("bin",)) for name in ("hits", "chance_hits"))
    excess = difference(hit, chance)
    return table(
        estimate(sums, "block_recall", hit, null=chance, pool=pool, rate=hit, absent=NO_TEACHER),
        estimate(sums, "recall_excess", excess, null=zero(excess), pool=pool, rate=hit, absent=NO_TEACHER),
    )


def recall_by_distance(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """`block_recall` by the log2 distance of the teacher's block: metric `recall_by_distance`. Null: as there. What is

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    pooled is summed before the ratio: a proxy whose teacher has hardly a block at that distance does not decide."""
    return _recall(data, "recall_by_distance", "", pool)


def recall_by_position(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """`block_recall` by the query's place: metric `recall_by_position`, columns position (eighths of the context) and

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    blocks (own blocks that are in it). Null: as there; pooled as in `recall_by_distance`."""
    return _recall(data, "recall_by_position", "_by_position", pool)


def _recall(data: xr.Dataset, metric: str, suffix: str, pool: Sequence[str]) -> pd.DataFrame:
    hits, wanted, chance = (f"{name}{suffix}" for name in ("hits", "wanted", "chance_hits"))
    sums = tallied(data, hits, wanted, chance)
    (rate, null), why = (ratio(name, wanted, over=pool) for name in (hits, chance)), f"{NO_TEACHER}, or no rows"
    return table(estimate(sums, metric, rate, null=null, pool=pool, rate=rate, absent=why))


def captured_mass(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """Share of the group's dense attention that lies on a proxy's learned slots: mean over queries, 0 to 1.

    Null: uniform choice of as many blocks: slots / eligible of what is not on forced blocks. Beside it
    `captured_mass_teacher` (the most that as many blocks hold) and `captured_mass_window` (that of the newest ones).

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    return _captured(data, POSITION, "", pool)


def _captured(data: xr.Dataset, over: Sequence[str], suffix: str, pool: Sequence[str]) -> pd.DataFrame:
    sums = tallied(data, *(f"{name}_by_position" for name in (*_MASSES, "mass_rows")))
    own, chance, best, newest = (ratio(f"{name}_by_position", "mass_rows_by_position", over=over) for name in _MASSES)
    parts = (("", own, NO_MASS), ("_teacher", best, NO_MASS), ("_window", newest, NO_NEWEST))
    return table(
        *(
            estimate(
                sums, f"captured_mass{of}{suffix}", share, null=chance, pool=pool, rate=_rate(share, over), absent=why
            )
            for of, share, why in parts
        )
    )


def _rate(share: Statistic, over: Sequence[str]) -> Statistic | None:
    """Of one part of the context, which few documents may reach, a skewed rate; over all of it a mean."""
    return None if over else share


_MASSES = ("captured", "chance_captured", "best", "newest_captured")


def coverage(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """c = captured mass / the teacher's, a ratio of means over queries (forced blocks left out of both): 1 at the most.

    Null of `coverage`: that of uniform choice, c_random. `coverage_window`: that of the newest blocks, c_window.
    `coverage_over_random` = (c - c_random)/(1 - c_random) and `coverage_over_window` = (c - c_window)/(1 - c_window):
    0 for the rule that is compared with (the null), 1 for the teacher's own blocks; negative below the rule. What is
    pooled is summed before the ratio, so that a layer in which the newest blocks hold nearly all does not decide.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    return _covered(data, POSITION, "", pool)


def coverage_by_position(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """`captured_mass` and `coverage` by the query's place: the same metrics with `_by_position` behind their names,

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    columns position (eighths of the context) and blocks."""
    return table(_captured(data, (), "_by_position", pool), _covered(data, (), "_by_position", pool))


def _covered(data: xr.Dataset, over: Sequence[str], suffix: str, pool: Sequence[str]) -> pd.DataFrame:
    sums = tallied(data, *(f"{name}_by_position" for name in _MASSES))
    own, chance, _, newest = (ratio(f"{name}_by_position", "best_by_position", over=(*over, *pool)) for name in _MASSES)
    parts = [
        estimate(sums, f"coverage{of}{suffix}", share, null=chance, pool=pool, rate=_rate(share, over), absent=why)
        for of, share, why in (("", own, NO_MASS), ("_window", newest, NO_NEWEST))
    ]
    return table(*parts, *_rescaled(sums, own, chance, newest, suffix, pool, NO_NEWEST, _rate(own, over)))


def coverage_by_distance(data: xr.Dataset, *, pool: Sequence[str] = ()) -> pd.DataFrame:
    """By the log2 distance of the teacher's block: the dense mass on the teacher's blocks there, and the share of it
    that lies on blocks which the proxy chose too.

    `captured_mass_by_distance`: that mass a query (null: uniform choice). `coverage_by_distance`: its share of the
    teacher's (null: uniform choice), rescaled as in `coverage`: `coverage_over_random_by_distance`,
    `coverage_over_window_by_distance` (not defined where the newest blocks hold all of it). Columns bin, distance.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, "reached", "chance_reached", "newest_reached", "best", "mass_rows_by_position")
    rows = sums["mass_rows_by_position"].sum("position", skipna=False)
    sums = sums.drop_vars("mass_rows_by_position").assign(mass_rows=rows)
    own, chance, newest = (ratio(name, "best", over=pool) for name in ("reached", "chance_reached", "newest_reached"))
    mass, null = (ratio(name, "mass_rows", over=pool) for name in ("reached", "chance_reached"))
    suffix, all_newest = "_by_distance", "no mass of the teacher's here, or the newest blocks hold all of it"
    return table(
        estimate(sums, f"captured_mass{suffix}", mass, null=null, pool=pool, rate=own, absent=NO_MASS),
        estimate(sums, f"coverage{suffix}", own, null=chance, pool=pool, rate=own, absent=NO_MASS),
        *_rescaled(sums, own, chance, newest, suffix, pool, all_newest, own),
    )


def _rescaled(
    sums: xr.Dataset,
    own: Statistic,
    chance: Statistic,
    newest: Statistic,
    suffix: str,
    pool: Sequence[str],
    no_window: str,
    rate: Statistic | None,
) -> list[pd.DataFrame]:
    over_chance, over_window = rescaled(own, chance), rescaled(own, newest)
    random, window = f"coverage_over_random{suffix}", f"coverage_over_window{suffix}"
    return [
        estimate(sums, random, over_chance, null=zero(over_chance), pool=pool, rate=rate, absent=NO_MASS),
        estimate(sums, window, over_window, null=zero(over_window), pool=pool, rate=rate, absent=no_window),
    ]

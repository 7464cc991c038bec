"""From a statistic of per-document sums to rows of a tidy table: value, interval, null, and why where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.choices import bin_label, position_label
from msa_analysis.statistics import (
    MIN_DOCUMENTS,
    SQUARE_DOCUMENTS,
    jackknife,
    jackknife_skewed,
    jackknife_square,
    matter,
    pair_shrinkage,
    rests_on_few,
)
from msa_analysis.tally import tally, totals, without_two

Statistic = Callable[[xr.Dataset], xr.DataArray]
LABELS = ("step", "phase", "layer", "proxy", "other")
NUMBERS = ["value", "low", "high"]
RUN = ("layer", "proxy")
"""Pool over these for one number a run."""
NO_SLOTS = "no learned slots"
NO_TEACHER = "no teacher blocks in these rows"
NO_HEADS = "the log holds no single heads of its last record"
NO_MASS = "the log holds no attention mass here"
NO_NEWEST = "the log holds no mass of the newest blocks"


def tallied(data: xr.Dataset, *names: str, optional: Sequence[str] = ()) -> xr.Dataset:
    """The sums of these names (optional ones where there are), and the slots, of a selection Dataset or its tally."""
    sums = tally(data) if "selected" in data else data
    return sums[["slots", *names, *(name for name in optional if name in sums)]]


def ratio(above: str, below: str, *, over: Sequence[str] = (), **choice: str) -> Statistic:
    """One sum over another, each summed over `over`; `choice` picks a label of a dimension, such as source="proxy"."""

    def part(sums: xr.Dataset, name: str) -> xr.DataArray:
        array = sums[name]
        array = array.sel({dim: label for dim, label in choice.items() if dim in array.dims}, drop=True)
        return array.sum([dim for dim in over if dim in array.dims], skipna=False)

    def statistic(sums: xr.Dataset) -> xr.DataArray:
        below_ = part(sums, below)
        return part(sums, above) / below_.where(below_ > 0)

    return statistic


def zero(of: Statistic) -> Statistic:
    """The null of a difference: 0 wherever the statistic is defined."""
    return lambda sums: 0 * of(sums)


def difference(first: Statistic, second: Statistic) -> Statistic:
    """The one minus the other."""
    return lambda sums: first(sums) - second(sums)


def rescaled(of: Statistic, reference: Statistic) -> Statistic:
    """(of - reference) / (1 - reference): 0 at the reference, 1 at the most; not defined where the reference is 1."""

    def statistic(sums: xr.Dataset) -> xr.DataArray:
        base = reference(sums)
        return (of(sums) - base) / (1 - base).where(1 - base > 1e-9)

    return statistic


def estimate(
    sums: xr.Dataset,
    metric: str,
    statistic: Statistic,
    *,
    null: Statistic,
    pool: Sequence[str] = (),
    correct_bias: bool = False,
    squares: float | None = None,
    rate: Statistic | None = None,
    paired: bool = False,
    absent: str = NO_SLOTS,
) -> pd.DataFrame:
    """Value, jackknife interval and null of a statistic, as rows; `absent` says why a number may be missing.

    `correct_bias` takes from the value what is proportional to 1/documents; `squares` does too, for a statistic that is
    a sum of squares near 0, of so many degrees of freedom (`jackknife_square`). `rate` is the share of cases behind the
    statistic, whose interval is then that of `jackknife_skewed`: not defined at exactly 0 or 1, where fewer than
    MIN_DOCUMENTS documents have a case, nor where its variance rests on fewer than two. `paired`: pairs of documents
    may decide its error (`pair_shrinkage`); of the sums over pairs it may use those in `pair_sums.NEXT` alone.
    """
    slots = sums["slots"].sel(source="proxy").sum([d for d in sums["slots"].dims if d not in ("document", "source")])
    # Labels are put aside meanwhile: aligning them costs more than the arithmetic.
    labels = {name: sums[name] for name in LABELS if name in sums.coords}
    counts = slots.values > 0
    followed = xr.DataArray(np.roll(counts, -1)[counts], dims="document")
    sums = sums.drop_vars([*labels, "document"], errors="ignore").isel(document=np.flatnonzero(counts))
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        whole, without = totals(sums)
        numbers = [statistic(whole), statistic(without), null(whole)]
        over = [dim for dim in pool if dim in numbers[0].dims]
        value, left_out, reference = (number.mean(over, skipna=True) for number in numbers)
        bare = scarce = xr.zeros_like(value, dtype=bool)
        if squares is not None:
            value, low, high = jackknife_square(value, left_out, degrees=squares)
        elif rate is None:
            scale = 1.0
            if paired:
                left_two = statistic(without_two(sums, without)).mean(over, skipna=True)
                scale = pair_shrinkage(value, left_out, left_two.where(followed))
            about = {"having": matter(value, left_out), "scale": scale}
            value, low, high = jackknife(value, left_out, correct_bias=correct_bias, **about)
        else:
            share, alone = (rate(part).mean(over, skipna=True) for part in (whole, sums))
            low, high, bare, scarce = _of_rate(value, left_out, share, alone.notnull().sum("document"))
    held = xr.Dataset({"value": value, "low": low, "high": high, "null": reference, "bare": bare, "scarce": scarce})
    held = held.assign_coords({name: label for name, label in labels.items() if set(label.dims) <= set(held.dims)})
    frame = held.drop_vars("source", errors="ignore").to_dataframe().reset_index()
    frame.insert(0, "metric", metric)
    if "bin" in frame:
        frame["distance"] = frame["bin"].map(bin_label)
    if "position" in frame:
        frame["blocks"] = frame["position"].map(lambda part: position_label(part, sums.attrs["num_blocks"]))
    count, needed = sums.sizes["document"], MIN_DOCUMENTS if squares is None else SQUARE_DOCUMENTS
    if count < MIN_DOCUMENTS and (correct_bias or squares is not None):
        frame["value"] = np.nan
    return _explained(frame, count, needed, absent)


def _of_rate(
    value: xr.DataArray, left_out: xr.DataArray, share: xr.DataArray, having: xr.DataArray
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray, xr.DataArray]:
    """The interval's ends; where the rate is 0 or 1 throughout, and where too few documents have a case: none there."""
    bare, scarce = (share <= 1e-12) | (share >= 1 - 1e-12), having < MIN_DOCUMENTS
    _, low, high = jackknife_skewed(value, left_out, having)
    held = ~(bare | rests_on_few(left_out))
    return low.where(held), high.where(held), bare, scarce & ~bare


def _explained(frame: pd.DataFrame, documents: int, needed: int, absent: str) -> pd.DataFrame:
    """With the number of documents, and the reason of every number that is not defined."""
    frame["documents"], frame["reason"] = documents, ""
    frame.loc[frame["low"].isna(), "reason"] = absent
    few = "the interval would rest on fewer than two documents"
    frame.loc[frame["low"].isna() & frame["value"].notna(), "reason"] = few
    unlike = f"fewer than {MIN_DOCUMENTS} documents have a case: no interval"
    frame.loc[frame["value"].notna() & frame.pop("scarce").astype(bool), "reason"] = unlike
    frame.loc[frame.pop("bare").astype(bool), "reason"] = "0 or 1 in every document: no interval"
    if documents < needed:
        frame["reason"] = f"{documents} documents: an interval needs {needed}"
    if documents == 0:
        frame["reason"] = "no query sees enough blocks to have a choice"
    return frame


def table(*parts: pd.DataFrame) -> pd.DataFrame:
    """One table of several."""
    return pd.concat(parts, ignore_index=True)

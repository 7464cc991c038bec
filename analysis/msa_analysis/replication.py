"""Across runs: proxies brought into one order, and intervals whose unit is the seed.

Proxies have no names: proxy 2 of one seed is no relative of proxy 2 of another. Before numbers of single proxies are
averaged over seeds, the proxies of every layer are matched by where they look. Numbers of layers or runs need no match.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float, Int
from scipy import stats
from scipy.optimize import linear_sum_assignment

from msa_analysis.tally import tally

MIN_SEEDS = 3
"""Fewer seeds than this give no interval."""
KEYS = ("metric", "of", "step", "phase", "layer", "proxy", "other", "bin", "distance", "part", "position", "blocks")
"""What tells the rows of one table from each other, where it has these columns."""
ROUNDS = 20
"""Most turns of matching and averaging; two or three are the rule."""


def match_proxies(runs: Sequence[xr.Dataset]) -> list[xr.Dataset]:
    """The tallies of runs that differ in seed, each with its proxies in one common order within every layer.

    Profile of a proxy: its log2 distance profile at the last record. The order of each run is the assignment with the
    least sum of Jensen-Shannon divergences to a reference, the mean of the matched profiles of all runs; the two are
    found in turns, from the first run's order. At the end proxies go from those that look nearest to those that look
    farthest. Matching makes any proxies look alike: that matched profiles agree over seeds is no evidence by itself.

    Raises:
        ValueError: No runs, or runs that differ in layers, proxies, or blocks.
    """
    sums = [tally(run) if "selected" in run else run for run in runs]
    profiles = _profiles(sums)
    orders = np.stack([_orders(profiles[:, layer]) for layer in range(profiles.shape[1])], 1)
    return [_reordered(run, order) for run, order in zip(sums, orders, strict=True)]


def _profiles(sums: Sequence[xr.Dataset]) -> Float[np.ndarray, "run layer proxy bin"]:
    if not sums:
        raise ValueError("runs=[]: nothing to match; give the tallies of two seeds or more")
    for name in ("layer", "proxy", "bin"):
        sizes = [run.sizes[name] for run in sums]
        if len(set(sizes)) > 1:
            raise ValueError(f"runs: have {sizes} of {name}; match runs of one arm, which differ in seed alone")
    layers = [run["layer"].values.tolist() for run in sums]
    if any(held != layers[0] for held in layers):
        raise ValueError(f"runs: hold the layers {layers}; match runs of one arm, which differ in seed alone")
    bins = [run["bins"].isel(step=-1).sel(source="proxy").sum("document") for run in sums]
    counts = np.stack([held.transpose("layer", "proxy", "bin").values for held in bins])
    return counts / np.maximum(counts.sum(-1, keepdims=True), 1)


def _orders(profiles: Float[np.ndarray, "run proxy bin"]) -> Int[np.ndarray, "run proxy"]:
    """Which proxy of each run takes which place, in one layer."""
    orders = np.broadcast_to(np.arange(profiles.shape[1]), profiles.shape[:2])
    for _ in range(ROUNDS):
        reference = np.take_along_axis(profiles, orders[..., None], 1).mean(0)
        cost = _divergence(reference[None, :, None], profiles[:, None])
        found = np.stack([linear_sum_assignment(of_run)[1] for of_run in cost])
        if (found == orders).all():
            break
        orders = found
    reference = np.take_along_axis(profiles, orders[..., None], 1).mean(0)
    near_first = (reference @ np.arange(reference.shape[-1])).argsort(kind="stable")
    return orders[:, near_first]


def _divergence(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence over the last axis, in bits."""
    middle = (first + second) / 2

    def relative(p: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(p > 0, p * np.log2(p / middle), 0).sum(-1)

    return (relative(first) + relative(second)) / 2


def _reordered(sums: xr.Dataset, order: Int[np.ndarray, "layer proxy"]) -> xr.Dataset:
    layer = xr.DataArray(np.arange(len(order)), dims="layer")
    result = sums.copy()
    for dim in ("proxy", "other"):
        moved = [name for name in sums.data_vars if {"layer", dim} <= set(sums[name].dims)]
        place = xr.DataArray(order, dims=("layer", dim))
        turned = result[moved].drop_vars([dim, "layer"], errors="ignore").isel({"layer": layer, dim: place})
        result = result.assign({name: turned[name].transpose(*sums[name].dims) for name in moved})
    return result


def across_seeds(frames: Mapping[Hashable, pd.DataFrame]) -> pd.DataFrame:
    """Mean over seeds of the tables that one function gave for each, with Student's t over seeds.

    `frames` goes from seed to table. Columns: those that name a row, value, low, high, null (mean over seeds), seeds
    (in which the number is defined), reason. Fewer than 3 seeds: the interval is not defined. The intervals by
    documents of the single tables speak of one model each and are not used.
    """
    return _over(_stacked(frames))


def paired_difference(ours: Mapping[Hashable, pd.DataFrame], theirs: Mapping[Hashable, pd.DataFrame]) -> pd.DataFrame:
    """`across_seeds` of ours minus theirs, seed by seed (null 0), over the seeds and rows that both hold.

    Raises:
        ValueError: No seed in common.
    """
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        raise ValueError(f"seeds {list(ours)} and {list(theirs)}: none in common; compare arms of the same seeds")
    first, second = (_stacked({seed: frames[seed] for seed in seeds}) for frames in (ours, theirs))
    keys = [name for name in (*KEYS, "seed") if name in first and name in second]
    both = first.merge(second[[*keys, "value"]], on=keys, suffixes=("", "_theirs"))
    return _over(both.assign(value=both["value"] - both["value_theirs"], null=0.0))


def _stacked(frames: Mapping[Hashable, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([frame.assign(seed=seed) for seed, frame in frames.items()], ignore_index=True)


def _over(frame: pd.DataFrame) -> pd.DataFrame:
    keys = [name for name in KEYS if name in frame]
    groups = frame.groupby(keys, sort=False, dropna=False)
    spread = groups["value"].agg(["mean", "std", "count"])
    reasons = groups["reason"].agg(lambda held: "; ".join(dict.fromkeys(text for text in held if text)))
    found = spread.assign(null=groups["null"].mean(), whole=groups.size(), reason=reasons).reset_index()
    seeds = found["count"].to_numpy()
    half = stats.t.ppf(0.975, np.maximum(seeds - 1, 1)) * found["std"] / np.sqrt(np.maximum(seeds, 1))
    half = half.where(seeds >= MIN_SEEDS)  # pyright: ignore[reportAttributeAccessIssue]
    found = found.assign(value=found["mean"], low=found["mean"] - half, high=found["mean"] + half, seeds=seeds)
    few = found["seeds"].astype(str) + f" seeds: an interval needs {MIN_SEEDS}"
    part = (
        "defined in " + found["seeds"].astype(str) + " of " + found["whole"].astype(str) + " seeds: " + found["reason"]
    )
    found["reason"] = np.select(
        [found["seeds"] == 0, found["seeds"] < MIN_SEEDS, found["seeds"] < found["whole"]],
        [found["reason"], few, part],
        "",
    )
    return found[[*keys, "value", "low", "high", "null", "seeds", "reason"]]

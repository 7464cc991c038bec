"""Mutual information and variance shares of per-document tables, and what permuted proxies give."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float, Int

LEAST = float(np.log(20))
"""Log of the fewest labellings whose p-values can reach 0.05."""


def information(counts: xr.DataArray, of: str = "proxy") -> xr.DataArray:
    """Plug-in mutual information, in bits, of the dimensions `of` and `bin` of a table of counts."""
    return xr.apply_ufunc(_plug_in, counts, input_core_dims=[[of, "bin"]])


def _plug_in(counts: Float[np.ndarray, "*lead label bin"]) -> Float[np.ndarray, "*lead"]:
    with np.errstate(divide="ignore", invalid="ignore"):
        joint = counts / counts.sum((-2, -1), keepdims=True)
        apart = joint.sum(-2, keepdims=True) * joint.sum(-1, keepdims=True)
        terms = np.where(joint > 0, joint * np.log2(joint / apart), 0 * joint)
    return terms.sum((-2, -1))


MOMENTS = ("log_slots", "log_distance", "log_distance2")
"""Number, sum and sum of squares of log2 distances (slots with distance >= 1)."""


def eta_squared(moments: xr.DataArray, of: str = "proxy") -> xr.DataArray:
    """Share of the variance of log2 distance that lies between the labels `of`, plug-in, from its MOMENTS."""
    return xr.apply_ufunc(_eta_squared, moments, input_core_dims=[[of, "moment"]])


def _eta_squared(of: Float[np.ndarray, "*lead label moment"]) -> Float[np.ndarray, "*lead"]:
    with np.errstate(divide="ignore", invalid="ignore"):
        count, first, second = np.moveaxis(of, -1, 0)
        centre = first.sum(-1) ** 2 / count.sum(-1)
        between = np.where(count > 0, first**2 / count, 0).sum(-1) - centre
        spread = second.sum(-1) - centre
        return np.where(spread > 1e-9, between / spread, np.nan)


def proxy_divergence(counts: xr.DataArray) -> xr.DataArray:
    """Plug-in Kullback-Leibler divergence, in bits, of each proxy's distances from those of all proxies together.

    Its mean over proxies, weighted by their slots, is the mutual information.
    """
    return xr.apply_ufunc(_divergence, counts, input_core_dims=[["proxy", "bin"]], output_core_dims=[["proxy"]])


def _divergence(counts: Float[np.ndarray, "*lead proxy bin"]) -> Float[np.ndarray, "*lead proxy"]:
    with np.errstate(divide="ignore", invalid="ignore"):
        own = counts / counts.sum(-1, keepdims=True)
        everyone = counts.sum(-2, keepdims=True) / counts.sum((-2, -1), keepdims=True)
        terms = np.where(own > 0, own * np.log2(own / everyone), 0 * own)
    return terms.sum(-1)


def grouped_information(
    head_bins: xr.DataArray, order: Int[np.ndarray, "layer regrouping head"], groups: int
) -> xr.DataArray:
    """Plug-in information between groups of heads and distance, by `regrouping`: heads in that order, cut equally."""
    bins = head_bins.transpose("layer", ..., "head", "bin")
    found = []
    for draw in range(order.shape[1]):
        place = order[:, draw].reshape(len(order), *[1] * (bins.ndim - 3), -1, 1)
        drawn = np.take_along_axis(bins.values, np.broadcast_to(place, (*bins.shape[:-1], 1)), -2)
        found.append(_plug_in(drawn.reshape(*bins.shape[:-2], groups, -1, bins.shape[-1]).sum(-2)))
    return xr.DataArray(np.stack(found, -1), dims=(*bins.dims[:-2], "regrouping"))


def degrees(counts: xr.DataArray, of: str = "proxy", *, one: bool = False) -> float:
    """Degrees of freedom of plug-in information between `of` and the bins that are ever used; of one label of them."""
    used = int((counts.sum([dim for dim in counts.dims if dim != "bin"]) > 0).sum())
    return float(max((1 if one else counts.sizes[of] - 1) * (used - 1), 1))


MEASURES = {"information": (_plug_in, "bin", False), "divergence": (_divergence, "bin", True)}
MEASURES |= {"eta_squared": (_eta_squared, "moment", False)}
"""How a table by proxy and the named dimension is measured, and whether each proxy has a number of its own."""


def permuted(counts: xr.DataArray, measure: str, pool: Sequence[str], permutations: int) -> pd.DataFrame:
    """The plug-in value of one of MEASURES, and what it is when proxies are relabelled within documents."""
    function, last, each = MEASURES[measure]
    dims = ("step", "layer", "proxy") if each else ("step", "layer")
    counts = counts.transpose("step", "layer", "document", "proxy", last)
    coords = {name: counts[name] for name in dims if name in counts.coords}
    plug_in = xr.DataArray(function(counts.values.sum(2)), dims=dims, coords=coords)
    rng = np.random.default_rng(0)
    drawn = [function(_relabelled(counts.values, rng)) for _ in range(permutations)]
    null = xr.DataArray(np.stack(drawn or [np.full(plug_in.shape, np.nan)]), dims=("draw", *dims), coords=coords)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Mean of empty|All-NaN) slice", RuntimeWarning)
        plug_in, null = (array.mean(list(pool), skipna=True) for array in (plug_in, null))
        held = {"plug_in": plug_in, "null_mean": null.mean("draw"), "null_high": null.quantile(0.95, "draw")}
    # Fewer distinct labellings than 20 cannot give a p-value of 0.05; an empty document has none.
    documents = int((counts.sum(["step", "layer", "proxy", last]) > 0).sum())
    labellings = (documents - 1) * np.log(np.arange(1, counts.sizes["proxy"] + 1)).sum()
    held["p_value"] = rank(plug_in, null).where((permutations > 0) & (labellings >= LEAST) & plug_in.notnull())
    return xr.Dataset(held).drop_vars("quantile").to_dataframe().reset_index()


def rank(value: xr.DataArray, null: xr.DataArray) -> xr.DataArray:
    """One-sided p-value: the rank of a value among its draws, itself included."""
    return (1 + (null >= value - 1e-12).sum("draw")) / (1 + null.sizes["draw"])


def _relabelled(counts: Float[np.ndarray, "step layer document proxy last"], rng: np.random.Generator) -> np.ndarray:
    """The sums of documents after the proxies were permuted within each, independent between layers."""
    order = rng.random(counts.shape[:-1]).argsort(-1)
    return np.take_along_axis(counts, order[..., None], -2).sum(-3)

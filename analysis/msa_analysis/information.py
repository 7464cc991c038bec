"""Mutual information and variance shares of per-document tables, and what permuted proxies give."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float


def information(counts: xr.DataArray, of: str = "proxy") -> xr.DataArray:
    """Plug-in mutual information, in bits, of the dimensions `of` and `bin` of a table of counts."""
    return xr.apply_ufunc(_plug_in, counts, input_core_dims=[[of, "bin"]])


def _plug_in(counts: Float[np.ndarray, "*lead label bin"]) -> Float[np.ndarray, "*lead"]:
    with np.errstate(divide="ignore", invalid="ignore"):
        joint = counts / counts.sum((-2, -1), keepdims=True)
        apart = joint.sum(-2, keepdims=True) * joint.sum(-1, keepdims=True)
        terms = np.where(joint > 0, joint * np.log2(joint / apart), 0 * joint)
    return terms.sum((-2, -1))


def eta_squared(sums: xr.Dataset) -> xr.DataArray:
    """Between-proxy share of the variance of log2 distance (slots with distance >= 1), plug-in."""
    own = sums.sel(source="proxy", drop=True)
    count, first, second = own["log_slots"], own["log_distance"], own["log_distance2"]
    centre = first.sum("proxy") ** 2 / count.sum("proxy")
    between = (first**2 / count.where(count > 0)).sum("proxy") - centre
    spread = second.sum("proxy") - centre
    return between / spread.where(spread > 1e-9)


def permuted(sums: xr.Dataset, pool: Sequence[str], permutations: int) -> pd.DataFrame:
    """The plug-in information and what it is when proxies are relabelled within documents."""
    bins = sums["bins"].sel(source="proxy", drop=True).transpose("step", "layer", "document", "proxy", "bin")
    plug_in = information(bins.sum("document"))
    rng = np.random.default_rng(0)
    drawn = [_relabelled(bins.values, rng) for _ in range(permutations)] or [np.full(plug_in.shape, np.nan)]
    null = xr.DataArray(np.stack(drawn), dims=("draw", *plug_in.dims), coords=plug_in.coords)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Mean of empty|All-NaN) slice", RuntimeWarning)
        plug_in, null = (array.mean(list(pool), skipna=True) for array in (plug_in, null))
        table = {"plug_in": plug_in, "null_mean": null.mean("draw"), "null_high": null.quantile(0.95, "draw")}
    # Fewer distinct labellings than 20 cannot give a p-value of 0.05.
    labellings = (sums.sizes["document"] - 1) * np.log(np.arange(1, sums.sizes["proxy"] + 1)).sum()
    rank = (1 + (null >= plug_in - 1e-12).sum("draw")) / (1 + permutations)
    table["p_value"] = rank.where((permutations > 0) & (labellings >= np.log(20)) & plug_in.notnull())
    return xr.Dataset(table).drop_vars("quantile").to_dataframe().reset_index()


def _relabelled(bins: Float[np.ndarray, "step layer document proxy bin"], rng: np.random.Generator) -> np.ndarray:
    """Plug-in information after one permutation of the proxies within each document, independent between layers."""
    order = rng.random(bins.shape[:-1]).argsort(-1)
    return _plug_in(np.take_along_axis(bins, order[..., None], -2).sum(-3))

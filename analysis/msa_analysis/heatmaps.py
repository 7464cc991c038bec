"""Selection-rate heatmaps: query block by key block, a panel a layer and proxy, all on one colour scale."""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from msa_analysis.figures import FAINT, INK, STYLE

IMPOSSIBLE = "#c3cbd6"
"""Colour of key blocks that lie in the query's future: not applicable, which is not zero."""
PIXELS = 512
"""Most cells drawn along an axis of one panel; longer maps are pooled to this."""


def selection_rate(data: xr.Dataset, *, step: int = -1) -> xr.DataArray:
    """Share of a query block's queries, over all documents, whose selection holds each key block.

    Dims layer, proxy, query_block, key_block; forced blocks included; NaN for key blocks in the future. `step` is the
    place of the record, the last by default.
    """
    from msa_lab import selections

    record = data["selected"].isel(step=step).transpose("layer", "proxy", "document", "query", "slot")
    size = int(data.attrs["block_size"])
    blocks = -(-int(data.attrs["context_length"]) // size)
    rate = selections.selection_rate(record.values, data["query"].values, block_size=size, num_blocks=blocks)
    coords = {"layer": data["layer"].values, "proxy": data["proxy"].values, "step": int(record["step"])}
    dims = ("layer", "proxy", "query_block", "key_block")
    return xr.DataArray(rate.mean(2), dims=dims, coords=coords, name="selection_rate")


def pool(
    rate: Float[np.ndarray, "query_block key_block"], limit: int = PIXELS
) -> tuple[Float[np.ndarray, "row column"], Float[np.ndarray, "row column"]]:
    """Sums and numbers of possible (not NaN) cells over at most `limit` by `limit` tiles: no mass is lost.

    The mean rate of a tile is the first over the second; a tile without possible cells has 0 of 0.
    """
    possible = ~np.isnan(rate)
    parts = [np.where(possible, rate, 0.0), possible]
    for axis in (0, 1):
        size = rate.shape[axis]
        count = min(limit, size)
        starts = np.arange(count) * size // count
        parts = [np.add.reduceat(part, starts, axis=axis, dtype=float) for part in parts]
    return parts[0], parts[1]


def selection_heatmap(rate: xr.DataArray, *, block_size: int, title: str = "", limit: int = PIXELS) -> Figure:
    """Panels layer x proxy of a rate with dims (layer, proxy, query_block, key_block).

    Documents start at the top left; queries go down. One square-root colour scale from 0 for all panels, so that rare
    choices show beside the forced diagonal; zero has the scale's own lightest colour, the impossible another one.
    """
    layers, proxies = rate.sizes["layer"], rate.sizes["proxy"]
    colours = mpl.colormaps["magma_r"].with_extremes(bad=IMPOSSIBLE)
    tiles = [[_mean(rate.isel(layer=i, proxy=j).values, limit) for j in range(proxies)] for i in range(layers)]
    top = max(float(np.nanmax(tile, initial=0.0)) for row in tiles for tile in row)
    norm = PowerNorm(0.5, vmin=0.0, vmax=max(top, 1e-9))
    rows, columns = rate.sizes["query_block"], rate.sizes["key_block"]
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(2.3 * proxies + 1.6, 2.3 * layers + 0.9), layout="constrained")
        axes = figure.subplots(layers, proxies, sharex=True, sharey=True, squeeze=False)
    image = None
    for i, j in np.ndindex(layers, proxies):
        axis = axes[i, j]
        extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        masked = np.ma.masked_invalid(tiles[i][j])
        image = axis.imshow(masked, cmap=colours, norm=norm, extent=extent, aspect="auto", interpolation="nearest")  # pyright: ignore[reportAttributeAccessIssue]
        axis.set_title(f"layer {rate.layer.values[i]}, proxy {rate.proxy.values[j]}", fontsize="small")  # pyright: ignore[reportAttributeAccessIssue]
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))  # pyright: ignore[reportAttributeAccessIssue]
        axis.yaxis.set_major_locator(MaxNLocator(4, integer=True))  # pyright: ignore[reportAttributeAccessIssue]
    _label(figure, axes, block_size)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 2.2 / layers), label="selection rate (square-root scale)")
    bar.outline.set_edgecolor(FAINT)
    figure.suptitle(title, x=0.01, ha="left", fontsize="large")
    return figure


def _mean(rate: Float[np.ndarray, "query_block key_block"], limit: int) -> Float[np.ndarray, "row column"]:
    mass, cells = pool(rate, limit)
    return np.where(cells > 0, mass / np.maximum(cells, 1), np.nan)


def _label(figure: Figure, axes: np.ndarray, block_size: int) -> None:
    """Blocks on the near axes, tokens on the far ones."""
    for axis in axes[:, 0]:
        axis.set_ylabel("query block (0 on top)")
    for axis in axes[-1]:
        axis.set_xlabel("key block")
    scale = (lambda blocks: blocks * block_size, lambda tokens: tokens / block_size)
    for axis in axes[0]:
        tokens = axis.secondary_xaxis("top", functions=scale)
        tokens.set_xlabel("key position, tokens", fontsize="x-small", color=INK)
        tokens.tick_params(labelsize="x-small")
        tokens.xaxis.set_major_locator(MaxNLocator(3, integer=True))

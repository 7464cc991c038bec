"""Selection-rate heatmaps: query block by key block, a panel a layer and proxy, all on one colour scale."""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from msa_analysis.canvas import FAINT, INK, finish, on_paper, page_width, panels, small

IMPOSSIBLE = "#c3cbd6"
"""Colour of key blocks that lie in the query's future: not applicable, which is not zero."""
PIXELS = 512
"""Most cells drawn along an axis of one panel; longer maps are pooled to this."""
NARROWEST = 0.55
"""Inches of a panel on paper."""


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


def highest(*rates: xr.DataArray, limit: int = PIXELS) -> float:
    """The largest cell that `selection_heatmap` would draw of these: what they take as `vmax` to be comparable."""
    return max(_highest(_tiles(rate, limit)) for rate in rates)


def selection_heatmap(
    rate: xr.DataArray, *, block_size: int, title: str = "", limit: int = PIXELS, vmax: float | None = None
) -> Figure:
    """Panels layer x proxy of a rate with dims (layer, proxy, query_block, key_block).

    Documents start at the top left; queries go down; blocks on the near axes, tokens on the far ones. One square-root
    colour scale from 0 to `vmax` (by default the largest cell drawn) for all panels, so that rare choices show beside
    the forced diagonal; zero has the scale's own lightest colour, the impossible another one.
    """
    layers, proxies = rate.sizes["layer"], rate.sizes["proxy"]
    tiles = _tiles(rate, limit)
    norm = PowerNorm(0.5, vmin=0.0, vmax=max(_highest(tiles) if vmax is None else vmax, 1e-9))
    colours = mpl.colormaps["magma_r"].with_extremes(bad=IMPOSSIBLE)
    rows, columns = rate.sizes["query_block"], rate.sizes["key_block"]
    figure, axes = _panels(layers, proxies)
    image, narrow = None, on_paper() and axes.shape[1] > 2
    for axis, (i, j) in zip(axes.flat, np.ndindex(layers, proxies), strict=True):
        extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        masked = np.ma.masked_invalid(tiles[i][j])
        image = axis.imshow(masked, cmap=colours, norm=norm, extent=extent, aspect="auto", interpolation="nearest")
        between = "\n" if narrow else ", "
        axis.set_title(f"layer {rate.layer.values[i]}{between}proxy {rate.proxy.values[j]}", fontsize=small())
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_locator(MaxNLocator(2 if narrow else 4, integer=True))
    _label(axes, block_size, narrow)
    beside = {"location": "bottom", "aspect": 40} if on_paper() else {"shrink": min(1.0, 2.2 / layers)}
    bar = figure.colorbar(image, ax=axes, label="selection rate (square-root scale)", **beside)
    bar.outline.set_edgecolor(FAINT)
    bar.ax.tick_params(labelsize=small() if on_paper() else None)
    return finish(figure, [], title)


def _tiles(rate: xr.DataArray, limit: int) -> list[list[Float[np.ndarray, "row column"]]]:
    """Of each layer and proxy: the mean rate of every tile that is drawn."""
    sizes = rate.sizes["layer"], rate.sizes["proxy"]
    return [[_mean(rate.isel(layer=i, proxy=j).values, limit) for j in range(sizes[1])] for i in range(sizes[0])]


def _highest(tiles: list[list[Float[np.ndarray, "row column"]]]) -> float:
    return max(float(np.nanmax(tile, initial=0.0)) for row in tiles for tile in row)


def _mean(rate: Float[np.ndarray, "query_block key_block"], limit: int) -> Float[np.ndarray, "row column"]:
    mass, cells = pool(rate, limit)
    return np.where(cells > 0, mass / np.maximum(cells, 1), np.nan)


def _panels(layers: int, proxies: int) -> tuple[Figure, np.ndarray]:
    """Axes (row, column): a row a layer, on paper several where the panels of one would be too narrow."""
    rows, columns, size = layers, proxies, (2.3 * proxies + 2.0, 2.3 * layers + 0.9)
    if on_paper():
        most = int(page_width() // NARROWEST)
        columns = max(count for count in range(1, most + 1) if proxies % count == 0)
        rows = layers * proxies // columns
        size = (page_width(), rows * (min(2.2, (page_width() - 1.1) / columns) + 0.35) + 1.1)
    figure, axes = panels(rows, columns, size, sharex=True, sharey=True)
    for axis in axes.flat:
        axis.grid(visible=False)
        axis.tick_params(labelsize=small() if on_paper() else None)
    return figure, axes


def _label(axes: np.ndarray, block_size: int, narrow: bool) -> None:
    """Blocks on the near axes, tokens on the far ones."""
    scale = (lambda blocks: blocks * block_size, lambda tokens: tokens / block_size)
    for axis in axes[:, 0]:
        axis.set_ylabel("query block\n(0 on top)" if on_paper() else "query block (0 on top)")
    for axis in axes[-1]:
        axis.set_xlabel("key block")
    far = [(axis.secondary_xaxis("top", functions=scale), "key") for axis in axes[0]]
    far += [(axis.secondary_yaxis("right", functions=scale), "query") for axis in axes[:, -1]]
    for tokens, what in far:
        one = tokens.xaxis if what == "key" else tokens.yaxis
        one.set_label_text("tokens" if narrow else f"{what} position, tokens", fontsize=small(), color=INK)
        tokens.tick_params(labelsize=small())
        one.set_major_locator(MaxNLocator(2 if narrow else 3, integer=True))
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}" if value < 1e4 else f"{value / 1e3:g}K"))

"""What a figure shows, checked on the artists that draw it."""

from __future__ import annotations

import gc
import io
import os
import sys
import time
import warnings
from pathlib import Path

import masses
import matplotlib as mpl
import numpy as np
import pandas as pd
import planted
import pytest
import xarray as xr
from matplotlib.colors import to_rgba
from matplotlib.container import ErrorbarContainer
from msa_analysis import figures, heatmaps, specialization
from msa_analysis.tally import tally


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rate_of(values: np.ndarray) -> xr.DataArray:
    layers, proxies = values.shape[:2]
    coords = {"layer": range(layers), "proxy": range(proxies)}
    return xr.DataArray(values, dims=("layer", "proxy", "query_block", "key_block"), coords=coords)


def images(figure: mpl.figure.Figure) -> list:
    return [image for axis in figure.axes for image in axis.get_images()]


def test_impossible_cells_differ_from_zeros() -> None:
    values = np.where(np.tri(8, dtype=bool), 0.0, np.nan)
    values[5, 2] = 0.5
    figure = heatmaps.selection_heatmap(rate_of(values[None, None]), block_size=16)
    (image,) = images(figure)
    drawn = image.get_array()
    assert np.array_equal(np.ma.getmaskarray(drawn), ~np.tri(8, dtype=bool))
    colour = image.to_rgba(drawn)
    assert colour[0, 7] == pytest.approx(to_rgba(heatmaps.IMPOSSIBLE), abs=0.01)
    assert colour[7, 0] == pytest.approx(image.cmap(0.0), abs=0.01)
    assert not np.allclose(colour[7, 0], colour[0, 7], atol=0.05)
    assert figure.axes[0].yaxis_inverted()
    assert "0 on top" in figure.axes[0].get_ylabel()


def test_all_panels_share_one_scale_from_zero() -> None:
    values = np.where(np.tri(8, dtype=bool), 0.1, np.nan)[None, None].repeat(2, 0).repeat(3, 1)
    values[1, 2, 7, 0] = 0.9
    figure = heatmaps.selection_heatmap(rate_of(values), block_size=16)
    limits = {image.norm.vmin for image in images(figure)} | {image.norm.vmax for image in images(figure)}
    assert len(images(figure)) == 6
    assert limits == {0.0, 0.9}


def test_maps_share_a_scale_that_is_given() -> None:
    low, high = (rate_of(np.full((1, 1, 8, 8), value)) for value in (0.2, 0.8))
    top = heatmaps.highest(low, high)
    figures_ = [heatmaps.selection_heatmap(rate, block_size=16, vmax=top) for rate in (low, high)]
    assert [image.norm.vmax for figure in figures_ for image in images(figure)] == [0.8, 0.8]
    tall = np.zeros((1, 1, 1024, 8))
    tall[0, 0, 3] = 0.5  # half of a pooled cell
    assert heatmaps.highest(rate_of(tall), low) == 0.25


def test_both_axes_are_in_blocks_and_in_tokens() -> None:
    figure = heatmaps.selection_heatmap(rate_of(np.zeros((2, 2, 8, 6))), block_size=16)
    figures.save(figure, io.BytesIO(), dpi=50)
    first, last = figure.axes[0], figure.axes[3]
    assert (first.get_xlim(), first.get_ylim()) == ((-0.5, 5.5), (7.5, -0.5))
    (key,) = first.child_axes
    assert key.get_xlim() == pytest.approx((-8, 88))
    assert key.get_xlabel() == "key position, tokens"
    (query,) = last.child_axes
    assert query.get_ylim() == pytest.approx((120, -8))
    assert query.get_ylabel() == "query position, tokens"


def test_a_long_map_keeps_its_mass_and_its_hot_row() -> None:
    values = np.random.default_rng(0).random((60_000, 512)) * 0.02
    values[12_345] = 1.0
    start = time.process_time()  # what other work on the machine takes is no fault of the figure
    mass, cells = heatmaps.pool(values)
    figure = heatmaps.selection_heatmap(rate_of(values[None, None]), block_size=128)
    figures.save(figure, io.BytesIO())
    assert time.process_time() - start < 10
    assert mass.shape == (512, 512)
    assert mass.sum() == pytest.approx(values.sum(), rel=1e-9)
    assert cells.sum() == values.size
    (image,) = images(figure)
    drawn = np.asarray(image.get_array())
    assert (drawn * cells).sum() == pytest.approx(values.sum(), rel=1e-9)
    rows = drawn.mean(1)
    hot = 12_345 * 512 // 60_000
    assert rows.argmax() == hot
    assert rows[hot] > 1.5 * np.delete(rows, hot).max()
    assert len(figure.axes[0].get_yticks()) < 10


@pytest.mark.parametrize("shape", [(4096, 32), (7, 5), (513, 512)])
def test_pooling_keeps_mass_beside_impossible_cells(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(1).random(shape)
    values[np.triu_indices(shape[0], 1, shape[1])] = np.nan
    mass, cells = heatmaps.pool(values)
    assert mass.sum() == pytest.approx(np.nansum(values))
    assert cells.sum() == np.isfinite(values).sum()


def test_selection_rate_counts_queries_of_all_documents() -> None:
    log = planted.log([planted.newest], documents=3, context=128, block_size=16, top_k=3)
    rate = heatmaps.selection_rate(log).values[0, 0]
    expected = np.where(np.tri(8, dtype=bool), np.tri(8) - np.tri(8, k=-3), np.nan)
    assert np.array_equal(rate, expected, equal_nan=True)


def test_profiles_draw_the_null_and_the_teacher_with_units() -> None:
    log = planted.log([planted.newest, planted.oldest], layers=2, steps=(0,))
    frame = specialization.distance_profile(log)
    figure = figures.distance_profiles(frame, block_size=16)
    assert len(figure.axes) == 2
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert "null: uniform choice" in labels
    assert "teacher (mean of groups)" in labels
    assert "16 tokens each" in figure.axes[0].get_xlabel()
    null = next(line for line in figure.axes[0].get_lines() if line.get_label() == "null: uniform choice")
    assert null.get_ydata() == pytest.approx(frame[frame["null"] > 0].groupby("bin")["null"].mean().to_numpy())


def bars(container: ErrorbarContainer) -> np.ndarray:
    """(bar, 2): where its vertical bars begin and end."""
    segments = container.lines[2][-1].get_segments()
    return np.array([segment[:, 1] if len(segment) else (np.nan, np.nan) for segment in segments])


def test_profiles_draw_the_interval_of_each_proxy() -> None:
    log = planted.log([planted.leaning(2.0), planted.uniform], layers=2, steps=(0,))
    frame = specialization.distance_profile(log)
    figure = figures.distance_profiles(frame, block_size=16)
    own = frame[(frame["metric"] == "distance_profile") & (frame["null"] > 0)]
    for layer, axis in enumerate(figure.axes):
        for proxy, container in enumerate(axis.containers):
            part = own[(own["layer"] == layer) & (own["proxy"] == proxy)].sort_values("bin")
            assert bars(container) == pytest.approx(part[["low", "high"]].to_numpy(float), nan_ok=True)
            assert (part["high"] - part["low"]).max() > 0.01


def test_what_is_found_by_distance_stands_beside_its_null() -> None:
    plain = planted.log([planted.leaning(3.0), planted.uniform], layers=2, steps=(0,))
    log, _ = masses.with_masses(plain, lambda distance: 1.0 / (1 + distance))
    parts = (specialization.recall_by_distance, specialization.coverage_by_distance)
    frame = pd.concat([part(log, pool=pool) for part in parts for pool in (("proxy",), specialization.RUN)])
    figure = figures.choice_by_distance(frame, block_size=16)
    for axis, metric in zip(figure.axes, figures.BY_DISTANCE, strict=True):
        rows = frame[(frame["metric"] == metric) & (frame["step"] == frame["step"].max())].sort_values("bin")
        whole = rows[rows["layer"].isna() & rows["value"].notna()]
        (container,) = axis.containers
        assert container.lines[0].get_ydata().astype(float) == pytest.approx(whole["value"].to_numpy(float))
        assert bars(container) == pytest.approx(whole[["low", "high"]].to_numpy(float), nan_ok=True)
        drawn = {line.get_label(): line.get_ydata().astype(float) for line in axis.get_lines()}
        assert drawn["null: uniform choice"] == pytest.approx(whole["null"].to_numpy(float))
        layer = rows[(rows["layer"] == 0) & rows["value"].notna()]
        assert drawn["layer 0"] == pytest.approx(layer["value"].to_numpy(float))


def test_a_layers_dot_is_its_positional_part_against_its_content() -> None:
    log = planted.log([planted.newest, planted.newest, planted.uniform], layers=2, steps=(0, 10))
    frame = specialization.dynamics(tally(log))
    figure = figures.position_or_content(frame)
    (axis,) = figure.axes
    last = frame[(frame["step"] == 10) & frame["layer"].notna()].set_index(["metric", "layer"])
    for layer, container in enumerate(axis.containers):
        (line,), across, up = container.lines[0:1], *container.lines[2]
        parts = [last.loc[(name, layer)] for name in ("positional", "content")]
        assert [line.get_xdata()[0], line.get_ydata()[0]] == pytest.approx([part["value"] for part in parts])
        ends = [across.get_segments()[0][:, 0], up.get_segments()[0][:, 1]]
        assert np.array(ends) == pytest.approx(np.array([[part["low"], part["high"]] for part in parts]))
    assert [text.get_text() for text in axis.texts] == ["0", "1"]
    assert "position" in axis.get_xlabel()
    assert "content" in axis.get_ylabel()


def test_dynamics_mark_the_switch_and_say_what_is_not_defined() -> None:
    frame = specialization.dynamics(tally(planted.log([planted.uniform], steps=(0, 10, 20))))
    figure = figures.training_dynamics(frame.assign(arm="p1", seed=0, run="r"), switches=[10])
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert any("one proxy" in text for text in texts)
    for axis in figure.axes:
        assert any(list(line.get_xdata()) == [10, 10] for line in axis.get_lines())
        assert axis.get_xlabel() == "optimizer step"
    recency = frame[(frame["metric"] == "recency") & frame["layer"].isna()]
    (band,) = figure.axes[0].collections
    corners = band.get_paths()[0].vertices
    for row in recency.itertuples():
        ends = corners[corners[:, 0] == row.step, 1]
        assert (ends.min(), ends.max()) == pytest.approx((row.low, row.high))
        assert row.high - row.low > 0.001


def test_an_arm_has_one_colour_whatever_stands_beside_it() -> None:
    colours = figures.palette(["dense", "msa", "window"])
    metrics = pd.DataFrame({"step": [0, 1] * 2, "name": "train/ce", "value": [3.0, 2.0, 3.1, 2.1]})
    metrics["run"] = metrics["arm"] = ["msa"] * 2 + ["window"] * 2
    scored = metrics.assign(name="validation/bits_per_byte")
    figure = figures.loss_curves(pd.concat([metrics, scored]), colours=colours, bigram=3.5)
    drawn = {tuple(line.get_color()) for line in figure.axes[0].get_lines() if len(line.get_xdata())}
    assert drawn == {colours["msa"], colours["window"]}


@pytest.mark.parametrize("measure", ["loss", "bits_per_byte"])
def test_no_line_of_validation_joins_dense_attention_and_sparse(measure: str) -> None:
    names = ["validation/warmup/" + measure] * 2 + ["validation/" + measure] * 2
    metrics = pd.DataFrame({"step": [0, 10, 20, 30], "name": names, "value": [3.0, 2.0, 2.5, 2.2]})
    figure = figures.loss_curves(pd.concat([metrics, metrics.assign(name="train/ce")]).assign(run="a", arm="msa"))
    lines = [line for line in figure.axes[1].get_lines() if len(line.get_xdata())]
    drawn = {line.get_linestyle(): line.get_xdata().tolist() for line in lines}
    assert drawn == {"-": [20, 30], ":": [0, 10]}
    assert "dotted" in figure.axes[1].get_title()


def test_no_figure_is_left_open() -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    for _ in range(5):
        figure = heatmaps.selection_heatmap(rate_of(np.zeros((1, 1, 8, 8))), block_size=16)
        figures.save(figure, io.BytesIO(), dpi=50)
    assert plt.get_fignums() == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_hundred_figures_take_no_more_memory_than_ten() -> None:
    import matplotlib.pyplot as plt

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, sizes = plt.get_fignums(), []
    for drawn in range(210):
        if drawn in (10, 209):
            gc.collect()
            sizes.append(resident())
        figure = heatmaps.selection_heatmap(rate_of(np.zeros((1, 1, 8, 8))), block_size=16)
        figures.save(figure, io.BytesIO(), dpi=50)
    assert plt.get_fignums() == before
    assert sizes[1] - sizes[0] < 50_000_000

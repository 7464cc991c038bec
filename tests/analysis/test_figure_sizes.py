"""Every figure fits the column of a paper and the whole page, with letters that can be read."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import planted
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from msa_analysis import figures, heatmaps, specialization, study_figures
from msa_analysis import intervention_figures as costs
from msa_analysis.canvas import SIZES, lines, save, sized
from msa_analysis.tally import tally
from test_intervention_figures import table as cost_table

pytestmark = pytest.mark.xdist_group("figure_sizes")  # what is drawn is measured once, not once a worker

RULES = [planted.newest, planted.oldest, planted.uniform, planted.leaning(3.0)]
ARMS = ["dense", "msa", "window-with-a-long-name"]
METRICS = {"train/ce": 2.0, "validation/bits_per_byte": 1.5, "train/kl/layer0": 0.5, "train/kl/layer1": 0.25}
NAMES = ["heatmap", "heatmap_long", "profiles", "dynamics", "found", "alike", "kl", "loss", "quality", "differences"]
NAMES += ["rules", "layers", "many_layers", "distances", "study_differences", "study_costs", "study_layers"]


@pytest.fixture(scope="module")
def drawn() -> dict[str, Callable[[], Figure]]:
    log = planted.log(RULES, layers=2, steps=(0, 10), documents=6)
    sums, rate = tally(log), heatmaps.selection_rate(log)
    long = rate.isel(query_block=np.arange(2048) % 32, key_block=np.arange(512) % 32)
    dynamics, end = specialization.dynamics(sums), sums.isel(step=[-1])
    parts = (specialization.recall_by_distance, specialization.coverage_by_distance)
    found = pd.concat([part(end, pool=pool) for part in parts for pool in (("proxy",), specialization.RUN)])
    steps = itertools.product(ARMS, METRICS.items(), (0, 500, 1000))
    metrics = [
        {"arm": arm, "run": arm, "seed": 0, "step": step, "name": name, "value": value + step / 1000}
        for arm, (name, value), step in steps
    ]
    arm = {"value": 0.9, "low": 0.8, "high": 1.0, "metric": "bits_per_byte", "bigram": 2.1, "bits_per_byte": 0.9}
    arm |= {"parameters": 27_534_800.0, "flops_total": 3e16, "wall_seconds": 320.0}
    arms = pd.DataFrame([arm | {"arm": name, "parameters": 27_534_800.0 + 500 * i} for i, name in enumerate(ARMS)])
    pair = {"reference": "dense", "difference": 0.01, "low": -0.02, "high": 0.04, "n": 32, "over": "rows"}
    pairs = pd.DataFrame([pair | {"arm": name, "metric": "bits_per_byte", "value": 0.01} for name in ARMS[1:]])
    cost = cost_table()
    many = pd.concat([cost[cost["layer"] == 2].assign(layer=i) for i in range(24)]).astype({"layer": "Int64"})
    cells = cost[cost["quantity"].eq("loss") & cost["bin"].isna()].assign(arm="msa")
    told: dict[str, Any] = {"colours": figures.palette(ARMS)}
    whole, single = cells.query("layer.isna()"), cells.query("layer.notna()").astype({"layer": int})
    return {
        "heatmap": lambda: heatmaps.selection_heatmap(rate, block_size=16),
        "heatmap_long": lambda: heatmaps.selection_heatmap(long, block_size=128),
        "profiles": lambda: figures.distance_profiles(specialization.distance_profile(end), block_size=16),
        "dynamics": lambda: figures.training_dynamics(dynamics.assign(arm="msa", run="r"), switches=[5]),
        "found": lambda: figures.choice_by_distance(found, block_size=16),
        "alike": lambda: figures.position_or_content(dynamics),
        "kl": lambda: figures.kl_curves(pd.DataFrame(metrics), switches=[5]),
        "loss": lambda: figures.loss_curves(pd.DataFrame(metrics), bigram=2.1),
        "quality": lambda: figures.quality_against_cost(arms, arms),
        "differences": lambda: figures.paired_differences(pairs),
        "rules": lambda: costs.cost_per_rule(cost),
        "layers": lambda: costs.cost_per_layer(cost),
        "many_layers": lambda: costs.cost_per_layer(many),
        "distances": lambda: costs.cost_by_distance(cost, block_size=16),
        "study_differences": lambda: study_figures.differences(
            pairs, pairs, margin=0.01, metric="bits_per_byte", **told
        ),
        "study_costs": lambda: study_figures.costs(whole, **told),
        "study_layers": lambda: study_figures.layers(single, **told),
    }


def written(figure: Figure, patch: pytest.MonkeyPatch) -> list[tuple[Text, Bbox]]:
    """The words that are really drawn, and where, in pixels: axes hold labels of ticks beyond their limits, too."""
    found, draw = [], Text.draw

    def drawn(text: Text, renderer: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            found.append((text, text.get_window_extent()))
        draw(text, renderer)

    with patch.context() as patched:
        patched.setattr(Text, "draw", drawn)
        figure.draw_without_rendering()
    return found


@pytest.mark.parametrize("size", ["column", pytest.param("paper", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_figure_on_paper_has_its_width_and_readable_words(
    drawn: dict[str, Callable[[], Figure]], name: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(), sized(size):
        warnings.simplefilter("error")
        figure = drawn[name]()
        words = written(figure, monkeypatch)
    assert figure.get_figwidth() == SIZES[size].width
    assert len(words) > 5
    for text, box in words:
        assert float(text.get_fontsize()) >= 7, text
        assert box.x0 > -2, text
        assert box.x1 < figure.bbox.x1 + 2, text
    level = [(text, box) for text, box in words if not text.get_rotation()]  # tilted ones are narrower than their boxes
    for (one, box), (other, its) in itertools.combinations(level, 2):
        assert not box.padded(-1).overlaps(its.padded(-1)), (one, other)


def test_a_screen_is_what_is_drawn_for_otherwise(drawn: dict[str, Callable[[], Figure]]) -> None:
    assert drawn["dynamics"]().get_figwidth() == 10
    with sized("column"):
        assert drawn["dynamics"]().get_figwidth() == 3.4
        with sized("screen"):
            assert drawn["loss"]().get_figwidth() == 10
        assert len(lines("so many words " * 9).splitlines()) > len(lines("so many words " * 9, 7.0).splitlines())
    assert drawn["dynamics"]().get_figwidth() == 10


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"size='poster': must be one of screen, paper, column"), sized("poster"):
        pass


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_every_kind_of_file_is_the_same_each_time(drawn: dict[str, Callable[[], Figure]], kind: str) -> None:
    files = []
    for _ in range(2):
        files.append(io.BytesIO())
        save(drawn["differences"](), files[-1], kind=kind)
    assert files[0].getvalue() == files[1].getvalue()
    assert files[0].getvalue()[:4] == {"png": b"\x89PNG", "svg": b"<?xm", "pdf": b"%PDF"}[kind]

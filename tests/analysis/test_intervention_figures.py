"""What the figures of interventions show, checked on the artists that draw it."""

from __future__ import annotations

import io
import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from msa_analysis import figures
from msa_analysis import intervention_figures as drawn

COST = {"shared": 0.01, "recency": 0.08, "random": 0.4, "shift1": np.nan}


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def table(quantities: tuple[str, ...] = ("loss", "bits_per_byte")) -> pd.DataFrame:
    """Costs that grow with the rule, the layer and the distance; one rule is not defined."""
    rows = []
    for (rule, cost), layer, quantity in itertools.product(COST.items(), (pd.NA, 0, 2), quantities):
        scale = 1.0 if layer is pd.NA else 0.1 * (1 + layer)
        for bin_, distance, share in ((pd.NA, pd.NA, 1.0), (-1, "nothing lost", 0.5), (1, "1", 0.3), (2, "2–3", 0.2)):  # noqa: RUF001 (a range)
            value = cost * scale * (1 if bin_ is pd.NA else bin_)
            row = {"rule": rule, "layer": layer, "proxy": pd.NA, "quantity": quantity, "distance_of": "", "bin": bin_}
            if bin_ is not pd.NA:
                row["distance_of"] = "lost block"
            reason = "" if np.isfinite(value) else "not defined: the run has one proxy"
            row |= {"distance": distance, "value": value, "low": value - 0.02, "high": value + 0.02}
            rows.append(row | {"baseline": 2.0, "documents": 32, "share": share, "reason": reason})
    return pd.DataFrame(rows).astype({"layer": "Int64", "proxy": "Int64", "bin": "Int64"})


def dots(axis: object) -> list[tuple[float, float]]:
    lines = [line for line in axis.lines if line.get_marker() == "o"]  # pyright: ignore[reportAttributeAccessIssue]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines]


def test_each_rule_has_its_dot_and_what_is_not_defined_has_words() -> None:
    figure = drawn.cost_per_rule(table(), title="cost")
    loss, bits = figure.axes
    assert dots(loss) == [(0.01, 0.0), (0.08, 1.0), (0.4, 2.0)]
    assert [text.get_text() for text in loss.texts] == ["not defined: the run has one proxy"]
    labels = [label.get_text() for label in loss.get_yticklabels()]
    assert labels == ["shared", "recency", "random", "proxy 1 further on"]
    assert "bits per byte" in bits.get_xlabel()
    figures.save(figure, io.BytesIO(), kind="svg")


def test_layers_are_cells_and_the_undefined_is_no_zero() -> None:
    figure = drawn.cost_per_layer(table())
    (image,) = figure.axes[0].get_images()
    held = image.get_array()
    assert held.shape == (4, 2)
    assert held[2].tolist() == pytest.approx([0.04, 0.12])
    assert np.ma.getmaskarray(held).tolist() == [[False] * 2] * 3 + [[True] * 2]
    assert image.to_rgba(held)[3, 0] == pytest.approx(to_rgba(drawn.ABSENT), abs=0.01)
    assert image.norm.vmin == -image.norm.vmax
    weights = {text.get_text(): text.get_fontweight() for text in figure.axes[0].texts}
    assert weights["+0.0400"] == "bold"
    assert weights["+0.0010"] == "normal"
    assert "not defined" in weights
    figures.save(figure, io.BytesIO())


def test_distances_stand_in_order_with_their_share_behind() -> None:
    frame = table()
    figure = drawn.cost_by_distance(frame, block_size=16, rules=["recency", "random"])
    recency, random = figure.axes
    assert [value for _, value in dots(random)] == pytest.approx([-0.4, 0.4, 0.8])
    assert [bar.get_height() for bar in recency.patches] == [0.5, 0.3, 0.2]
    assert recency.get_xticklabels()[0].get_text() == "nothing lost"
    assert recency.get_ylim()[1] < 2
    assert "best lost block, blocks of 16 tokens" in figure.get_supxlabel()
    figures.save(figure, io.BytesIO())


def test_a_table_without_the_rows_is_refused() -> None:
    frame = table()
    whole = frame[frame["layer"].isna() & frame["bin"].isna()]
    with pytest.raises(ValueError, match=r"no rows for single layers in loss; make it with intervene"):
        drawn.cost_per_layer(whole)
    with pytest.raises(ValueError, match=r"no rows for distances in loss"):
        drawn.cost_by_distance(whole, block_size=16)
    with pytest.raises(ValueError, match=r"no rows for all layers"):
        drawn.cost_per_rule(frame[frame["layer"].notna()])

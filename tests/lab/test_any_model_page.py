"""The page on other models' selections: its code runs, and what it says comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "any_model.md"


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the page's code leaves behind, run from top to bottom in a folder of its own."""
    folder = tmp_path_factory.mktemp("page")
    held: dict = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for place, code in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)):
            exec(compile(code, f"{PAGE.name}, block {place + 1}", "exec"), held)
    return held | {"folder": folder}


def test_the_planted_heads_come_out_near_and_far(namespace: dict) -> None:
    rows = namespace["recency"]
    rows = rows[rows["metric"] == "recency"].set_index("proxy")
    assert rows.loc[0, "low"] > 0.5 > rows.loc[1, "high"]
    strength = namespace["strength"].set_index("metric").loc["mutual_information"]
    assert strength["low"] > 0.1
    assert strength["p_value"] < 0.05


def test_the_file_gives_the_same_selection(namespace: dict) -> None:
    from msa_lab.import_selections import from_file

    again = from_file(namespace["folder"] / "other.npz")
    assert again.equals(namespace["log"])


def test_the_modules_are_seen_with_scores_and_teacher(namespace: dict) -> None:
    recorded = namespace["recorded"]
    assert recorded.attrs["modules"] == ["0.choose", "1.choose"]
    assert set(recorded.data_vars) == {"selected", "score", "mass", "teacher", "teacher_mass"}
    assert recorded.sizes["document"] == 6


def test_every_key_of_a_file_is_in_the_table() -> None:
    import inspect

    from msa_lab.import_selections import from_arrays

    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE))))
    assert told == set(inspect.signature(from_arrays).parameters)

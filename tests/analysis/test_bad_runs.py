"""Runs that cannot be measured, or not together, through the report: it says so and shows no number in their place."""

from __future__ import annotations

import re
from pathlib import Path

import folders
import numpy as np
import pandas as pd
import planted
import pytest
import xarray as xr
import zarr
from msa_analysis.evidence import Evidence, collect
from msa_analysis.report import selection_table, write_report

from msa_lab.cli import main
from msa_lab.runs import Run

pytestmark = pytest.mark.xdist_group("bad_runs")  # its study is measured once, not once a worker

SMALL = {"model": {"num_layers": 1}, "selections": {"documents": 8, "records": 2}}


def log(proxies: int = 2, **sizes: int) -> xr.Dataset:
    rules = [planted.leaning(6.0), planted.leaning(-6.0)][:proxies]
    return planted.log(rules, teacher=rules, first=[planted.uniform] * proxies, steps=(0, 110), documents=8, **sizes)


def made(root: Path, held: xr.Dataset | None, *, arm: str = "msa", kind: str = "msa", **model: int) -> Run:
    changes = {**SMALL, "model": {**SMALL["model"], **model}}
    return folders.finished(root, folders.config(arm, kind, **changes), quality=2.8, log=held)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run, and beside it an arm for everything that can be wrong."""
    root = tmp_path_factory.mktemp("study")
    made(root, log())
    made(root, None, arm="bare")
    made(root, None, arm="dense", kind="dense")
    tear(made(root, log(proxies=1), arm="single", num_proxies=1), 1)
    finer = made(root, log(block_size=8, top_k=3), arm="finer", block_size=8, top_k_blocks=3)
    zarr.open_array(finer.path / "selections.zarr" / "tokens", mode="r+")[:] = 7
    broken = made(root, log(), arm="broken")
    score = zarr.open_array(broken.path / "selections.zarr" / "score", mode="r+")
    held = np.asarray(score[1])
    held[0, 2, 0, 500, 0] = np.nan
    score[1] = held
    tear(made(root, log(), arm="torn"), 0, 1)
    return root


def tear(run: Run, *records: int) -> None:
    for record in records:
        chunks = (run.path / "selections.zarr" / "selected" / "c" / str(record)).rglob("*")
        chunk = next(path for path in chunks if path.is_file())
        chunk.write_bytes(chunk.read_bytes()[:-20])


@pytest.fixture(scope="module")
def evidence(study: Path) -> Evidence:
    with pytest.warns(UserWarning, match="is torn and was dropped"):
        return collect(study)


@pytest.fixture(scope="module")
def text(evidence: Evidence, study: Path) -> str:
    """What the report says, without its figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msa_analysis.report.pictures", lambda *_: iter(()))
        page = write_report(evidence, study / "report.html").read_text()
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL).split())


def measured(evidence: Evidence, arm: str) -> pd.DataFrame:
    table = selection_table(evidence)
    return table[table["arm"] == arm].set_index("measure")


@pytest.mark.parametrize(
    ("arm", "why"),
    [
        ("bare", "has no selections.zarr: nothing was recorded"),
        ("broken", "scores are NaN or infinite at step 110 (layer 0, package/module_2.py): training had diverged."),
        ("torn", "its log holds no whole record."),
    ],
)
def test_what_cannot_be_measured_is_named_and_has_no_numbers(evidence: Evidence, text: str, arm: str, why: str) -> None:
    assert measured(evidence, arm).empty
    at = text.index(f"No selections measured: {arm}, seed 0: ")
    assert why in text[at : at + 400]


def test_a_dense_arm_has_no_selections_and_no_complaint(evidence: Evidence, text: str) -> None:
    assert measured(evidence, "dense").empty
    assert "No selections measured: dense" not in text


def test_one_proxy_is_not_defined_where_two_are_needed(evidence: Evidence, text: str) -> None:
    table = measured(evidence, "single")
    assert table.loc["mutual information", "value"] == "not defined"
    assert table.loc["recency", "value"] != "not defined"
    assert "one proxy: nothing to tell apart" in text


def test_a_sound_run_beside_them_is_measured(evidence: Evidence) -> None:
    assert not measured(evidence, "msa")["value"].str.startswith("not defined").any()


def test_unlike_blocks_budgets_and_documents_are_said_to_be_unlike(text: str) -> None:
    for words in ("block sizes differ", "block budgets differ", "probe documents differ"):
        assert f"Selections of these runs cannot be compared: {words}" in text


def test_a_torn_last_record_is_left_out(evidence: Evidence) -> None:
    (single,) = (item for item in evidence.selected.values() if item.label == "single, seed 0")
    assert single.data["step"].values.tolist() == [0]


def test_the_viewer_is_refused_where_nothing_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lab.cli._write_report", lambda runs, out: out.write_text("the report"))
    made(tmp_path, None, arm="dense", kind="dense")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html"), "--viewer"]) == 2
    assert "--viewer: none of these runs recorded selections" in capsys.readouterr().err
    assert (tmp_path / "page.html").exists()

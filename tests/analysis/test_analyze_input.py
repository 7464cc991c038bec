"""What `analyze` is given: bad input is refused in one line, and what is unusual is measured and called so."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from folders import small_log, small_run
from msa_analysis.analyze import analyze
from msa_analysis.describe import describe
from msa_analysis.logs import sources

from msa_lab.cli import main


def refused(capsys, *arguments: str) -> str:
    code = main(["analyze", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, err
    return lines[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs in a folder of its own, so that nothing is written elsewhere."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_without_selections_is_refused(here: Path, capsys) -> None:
    small_run(here, None)
    assert "has no selections.zarr: nothing was recorded" in refused(capsys, str(here))


def test_a_dense_run_is_refused(here: Path, capsys) -> None:
    run = small_run(here, None, kind="dense")
    said = refused(capsys, str(here))
    assert said == f"msa-lab: {run.path}: no layer has proxies: attention is dense"


def test_a_run_without_a_whole_record_is_refused(here: Path, capsys) -> None:
    run = small_run(here, small_log(records=1))
    shutil.rmtree(run.path / "selections.zarr" / "selected" / "c" / "0")
    assert "its log holds no whole record" in refused(capsys, str(here))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: holds no run"),
        (["nowhere.npz"], "nowhere.npz: must be an existing file"),
        (["."], ".: holds no run"),
    ],
)
def test_nothing_there_is_refused(here: Path, capsys, arguments: list[str], said: str) -> None:
    assert said in refused(capsys, *arguments)


@pytest.mark.slow
def test_one_proxy_has_places_but_no_differences(here: Path) -> None:
    run = small_run(here, small_log(proxies=1), model={"num_proxies": 1})
    measured, _ = analyze([run.path])
    text = describe(measured, [])
    assert "leans near" in text
    assert "not defined: mutual information: one proxy: nothing to tell apart" in text
    assert "not defined: kappa: one proxy: there is no pair" in text
    table = measured[0].tables["summary"]
    between = table["metric"].isin(["mutual_information", "eta_squared", "overlap", "kappa", "positional", "content"])
    assert table.loc[between, "value"].isna().all()


def test_a_torn_last_record_is_dropped_with_a_warning(here: Path) -> None:
    run = small_run(here, small_log())
    torn = next((run.path / "selections.zarr" / "selected" / "c" / "1").rglob("0"))
    while torn.is_dir():
        torn = next(torn.iterdir())
    torn.write_bytes(torn.read_bytes()[:-20])
    (source,) = sources([run.path])
    with pytest.warns(UserWarning, match="the record of step 10 is torn and was dropped"):
        data = source.open()
    assert data["step"].values.tolist() == [0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_scores_are_refused_with_their_place(here: Path, capsys, value: float) -> None:
    import zarr

    run = small_run(here, small_log())
    score = zarr.open_array(run.path / "selections.zarr" / "score", mode="r+")
    held = np.asarray(score[1])
    held[0, 3, 1, 500, 0] = value
    score[1] = held
    said = refused(capsys, str(here))
    assert "scores are NaN or infinite at step 10 (layer 0, package/module_3.py): training had diverged" in said


def test_nan_scores_in_a_slot_without_a_block_are_as_they_should_be(here: Path) -> None:
    import zarr

    run = small_run(here, small_log())
    group = zarr.open_group(run.path / "selections.zarr", mode="r+")
    score = group["score"]
    score[:] = np.where(np.asarray(group["selected"][:]) < 0, np.nan, 1.0).astype(np.float16)
    (source,) = sources([run.path])
    assert source.open().sizes["step"] == 2


@pytest.mark.slow
def test_a_file_of_another_model_is_measured_and_can_be_clicked_through(here: Path, capsys) -> None:
    ids = small_log(records=2)["selected"].values[-1]
    text = np.tile(np.frombuffer(b"what is <b>read</b> and what is not ", np.uint8), 15)[:512]
    shown = {"tokens": np.tile(text, (8, 1)), "tokenizer": "bytes"}
    np.savez(here / "other.npz", blocks=np.where(ids < 0, 32, ids)[..., ::-1], block_size=16, **shown)
    assert main(["analyze", "other.npz", "./other.npz", "--out", "t", "--format", "parquet", "--viewer"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("other (other.npz)\n")
    assert out.count("leans near") == 1  # what is named twice is measured once
    assert "leans far" in out
    assert "not defined: block recall: no teacher blocks in these rows" in out
    assert re.search(r"^\d+ tables: t\nviewer: t/viewer.html$", out, re.MULTILINE)
    assert set(pd.read_parquet(here / "t" / "recency.parquet")["arm"]) == {"other"}
    html = (here / "t" / "viewer.html").read_text()
    assert "other" in html
    assert "<b>read" not in html


def test_a_broken_file_is_refused_in_one_line(here: Path, capsys) -> None:
    (here / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    assert refused(capsys, "torn.npz").startswith("msa-lab: torn.npz: ")
    np.savez(here / "future.npz", blocks=np.full((1, 1, 1, 64, 1), 3), block_size=16)
    assert "future.npz: blocks: block 3 of record 0" in refused(capsys, "future.npz")


def test_an_unfinished_run_is_measured_and_called_so(here: Path) -> None:
    run = small_run(here, small_log())
    (run.path / "result.json").unlink()
    (source,) = sources([here])
    assert source.label.endswith(", seed 0 (unfinished)")
    assert source.open().sizes["step"] == 2

"""`analyze` on planted run folders and files: tables that hold what the metrics give, and bad input that says so."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import numpy as np
import pandas as pd
import planted
import pytest
import xarray as xr
from msa_analysis import specialization
from msa_analysis.analyze import Measured, Skipped, analyze, seeds, write_tables
from msa_analysis.describe import describe
from msa_analysis.logs import sources
from msa_analysis.tally import tally

from msa_lab.cli import main
from msa_lab.runs import Run

pytestmark = pytest.mark.xdist_group("analyze")  # its study is measured once, not once a worker

SMALL = {"model": {"num_layers": 1}, "selections": {"documents": 8, "records": 2}}


def small_log(*, proxies: int = 2, documents: int = 8, seed: int = 0, records: int = 2, heads=None, **sizes: int):
    """One near proxy, one far (or only the first), alike in the first record."""
    rules = [planted.leaning(6.0), planted.leaning(-6.0)][:proxies]
    first, steps = [planted.uniform] * proxies, tuple(range(0, 10 * records, 10))
    made = planted.log(rules, teacher=rules, first=first, steps=steps, documents=documents, seed=seed, **sizes)
    return made if heads is None else made.assign(head_teacher=heads(documents, seed))


def four_heads(documents: int, seed: int) -> xr.DataArray:
    """Own blocks of four heads of which two look near and two far."""
    rules = [planted.leaning(strength) for strength in (6.0, 5.0, -6.0, -5.0)]
    return planted.log(rules[:1], heads=rules, documents=documents, seed=seed)["head_teacher"]


def planted_run(root: Path, log: xr.Dataset | None, *, arm: str = "msa", kind: str = "msa", **changes: Any) -> Run:
    changes = {name: {**SMALL.get(name, {}), **dict(value)} for name, value in changes.items()}
    made = folders.config(arm, kind, **{**SMALL, **changes})
    return folders.finished(root, made, quality=2.8, log=log)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A near-far run with two seeds, whose proxies stand in another order, and a dense arm."""
    root = tmp_path_factory.mktemp("study")
    for seed in (0, 1):
        made = folders.config("msa", "msa", seed, **SMALL)
        log = small_log(seed=seed, heads=four_heads)
        log = log.isel(proxy=[1, 0]).assign_coords(proxy=[0, 1]) if seed else log
        folders.finished(root, made, quality=2.8, log=log)
    planted_run(root, None, arm="dense", kind="dense")
    return root


@pytest.fixture(scope="module")
def done(study: Path) -> tuple[list[Measured], list[Skipped]]:
    return analyze([study])


@pytest.fixture(scope="module")
def tables(done: tuple[list[Measured], list[Skipped]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write_tables(*done, folder)
    return folder


def test_tables_hold_what_the_metrics_give(tables: Path, done: tuple[list[Measured], list[Skipped]]) -> None:
    measured, _ = done
    read = pd.read_csv(tables / "recency.csv")
    assert list(read.columns[:5]) == ["run", "arm", "seed", "block_size", "top_k_blocks"]
    assert read["run"].nunique() == 2
    assert set(read["block_size"]) == {16}
    first = read[read["seed"] == 0].reset_index(drop=True)
    wanted = specialization.recency(measured[0].sums)
    for name in ("value", "low", "high", "null"):
        np.testing.assert_allclose(first[name], wanted[name], rtol=1e-12, equal_nan=True)


def test_every_metric_of_the_analysis_is_in_a_table(tables: Path) -> None:
    found = {metric for path in tables.glob("*.csv") for metric in pd.read_csv(path).get("metric", [])}
    for metric in (
        *("distance_profile", "position_profile", "recency", "excess_recency", "sink_share", "block_recall"),
        *("recall_by_distance", "recall_by_position", "captured_mass", "coverage", "coverage_over_random"),
        *("coverage_over_window", "coverage_by_distance", "coverage_by_position", "overlap", "kappa", "positional"),
        *("content", "mutual_information", "mutual_information_excess", "mutual_information_share", "eta_squared"),
        *("proxy_information", "kappa_within_groups", "group_divergence", "churn", "never_selected", "collapse"),
        "emergence",
    ):
        assert metric in found, metric


def test_no_number_is_missing_without_a_reason(tables: Path) -> None:
    for path in tables.glob("*.csv"):
        table = pd.read_csv(path)
        if "value" in table and path.stem != "seeds":
            silent = table[table["value"].isna() & table["reason"].isna()]
            assert silent.empty, f"{path.stem}: {silent.head(3).to_dict('records')}"


def test_parquet_holds_the_same_and_leaves_no_older_csv(
    tmp_path: Path, done: tuple[list[Measured], list[Skipped]]
) -> None:
    write_tables(*done, tmp_path)
    plain = pd.read_csv(tmp_path / "summary.csv")
    write_tables(*done, tmp_path, kind="parquet")
    assert not list(tmp_path.glob("*.csv"))
    kept = pd.read_parquet(tmp_path / "summary.parquet")
    np.testing.assert_array_equal(kept["value"], plain["value"])
    assert list(kept.columns) == list(plain.columns)


def test_the_summary_says_who_is_near_and_who_is_far(done: tuple[list[Measured], list[Skipped]]) -> None:
    lines = describe(*done).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("layer  proxy"))
    near, far = lines[at + 1 : at + 3]
    assert near.split()[:2] == ["0", "0"]
    assert "leans near" in near
    assert "leans far" in far
    table = next(i for i, line in enumerate(lines) if line.startswith("layer  proxies differ"))
    assert "divide them since step 10" in lines[table + 1]
    assert any(line.startswith("not measured: planted/dense") and "attention is dense" in line for line in lines)


def test_over_seeds_proxies_are_matched_and_two_seeds_have_no_interval(
    done: tuple[list[Measured], list[Skipped]],
) -> None:
    table = seeds(done[0])
    rows = table[(table["metric"] == "recency") & table["proxy"].notna()].sort_values("value")
    assert rows["value"].iloc[0] < 0.4 < 0.6 < rows["value"].iloc[-1]
    assert rows["low"].isna().all()
    assert (rows["reason"] != "").all()


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
    planted_run(here, None)
    assert "has no selections.zarr: nothing was recorded" in refused(capsys, str(here))


def test_a_dense_run_is_refused(here: Path, capsys) -> None:
    run = planted_run(here, None, kind="dense")
    said = refused(capsys, str(here))
    assert said == f"msa-lab: {run.path}: no layer has proxies: attention is dense"


def test_a_run_without_a_whole_record_is_refused(here: Path, capsys) -> None:
    run = planted_run(here, small_log(records=1))
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
    run = planted_run(here, small_log(proxies=1), model={"num_proxies": 1})
    measured, _ = analyze([run.path])
    text = describe(measured, [])
    assert "leans near" in text
    assert "not defined: mutual information: one proxy: nothing to tell apart" in text
    assert "not defined: kappa: one proxy: there is no pair" in text
    table = measured[0].tables["summary"]
    between = table["metric"].isin(["mutual_information", "eta_squared", "overlap", "kappa", "positional", "content"])
    assert table.loc[between, "value"].isna().all()


def test_a_torn_last_record_is_dropped_with_a_warning(here: Path) -> None:
    run = planted_run(here, small_log())
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

    run = planted_run(here, small_log())
    score = zarr.open_array(run.path / "selections.zarr" / "score", mode="r+")
    held = np.asarray(score[1])
    held[0, 3, 1, 500, 0] = value
    score[1] = held
    said = refused(capsys, str(here))
    assert "scores are NaN or infinite at step 10 (layer 0, package/module_3.py): training had diverged" in said


def test_nan_scores_in_a_slot_without_a_block_are_as_they_should_be(here: Path) -> None:
    import zarr

    run = planted_run(here, small_log())
    group = zarr.open_group(run.path / "selections.zarr", mode="r+")
    score = group["score"]
    score[:] = np.where(np.asarray(group["selected"][:]) < 0, np.nan, 1.0).astype(np.float16)
    (source,) = sources([run.path])
    assert source.open().sizes["step"] == 2


def test_an_empty_document_counts_in_no_number_and_is_named(done: tuple[list[Measured], list[Skipped]]) -> None:
    full, part = small_log().isel(document=slice(0, 7)), small_log()
    part["selected"][:, :, 7] = -1
    sums = tally(part)
    for metric in (specialization.recency, specialization.overlap):
        ours, theirs = metric(sums), metric(tally(full))
        np.testing.assert_allclose(ours["value"], theirs["value"], equal_nan=True)
        assert set(ours["documents"]) == {7}
    text = describe([replace(done[0][0], data=part, sums=sums)], [])
    assert "documents without any choice, which count in no number: package/module_7.py" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 8}, "block sizes differ, so a distance in blocks is another one in tokens: planted/msa-"),
        ({"top_k_blocks": 3}, "block budgets differ, and with them every chance value: planted/msa-"),
        ({"tokens": 7}, "probe documents differ: planted/msa-"),
    ],
)
def test_unlike_logs_are_not_to_be_compared_and_have_no_mean_over_seeds(
    done: tuple[list[Measured], list[Skipped]], change: dict[str, int], said: str
) -> None:
    first, second = done[0]
    if "tokens" in change:
        other = second.data.assign(tokens=second.data["tokens"] + change["tokens"])
    else:
        other = second.data.assign_attrs(change)
    measured = [first, replace(second, data=other)]
    text = describe(measured, [])
    assert f"do not compare: {said}" in text
    assert f"means over seeds are not defined: {said}" in text
    table = seeds(measured)
    assert table["value"].isna().all()
    assert table["reason"].str.startswith(said).all()


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
    run = planted_run(here, small_log())
    (run.path / "result.json").unlink()
    (source,) = sources([here])
    assert source.label.endswith(", seed 0 (unfinished)")
    assert source.open().sizes["step"] == 2

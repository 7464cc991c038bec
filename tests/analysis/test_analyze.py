"""`analyze` on a study of planted run folders: tables that hold what the metrics give, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import folders
import numpy as np
import pandas as pd
import planted
import pytest
import xarray as xr
from folders import small_log, small_run
from msa_analysis import specialization
from msa_analysis.analyze import Measured, Skipped, analyze, seeds, write_tables
from msa_analysis.describe import describe
from msa_analysis.tally import tally

pytestmark = pytest.mark.xdist_group("analyze")  # its study is measured once, not once a worker


def four_heads(seed: int) -> xr.DataArray:
    """Own blocks of four heads of which two look near and two far."""
    rules = [planted.leaning(strength) for strength in (6.0, 5.0, -6.0, -5.0)]
    return planted.log(rules[:1], heads=rules, seed=seed)["head_teacher"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A near-far run with two seeds, whose proxies stand in another order, and a dense arm."""
    root = tmp_path_factory.mktemp("study")
    for seed in (0, 1):
        made = folders.config("msa", "msa", seed, **folders.SMALL)
        log = small_log(seed=seed).assign(head_teacher=four_heads(seed))
        log = log.isel(proxy=[1, 0]).assign_coords(proxy=[0, 1]) if seed else log
        folders.finished(root, made, quality=2.8, log=log)
    small_run(root, None, arm="dense", kind="dense")
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
        *("eta_squared_excess", "eta_squared_heads", "eta_squared_share"),
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


def test_pairs_of_proxies_are_tested_over_layers_and_pairs(tables: Path) -> None:
    table = pd.read_csv(tables / "overlap.csv").query("metric == 'kappa' and p_value.notna()")
    assert len(table) > 1
    for _, family in table.groupby(["run", "step"]):
        assert (family["q_value"] >= family["p_value"]).all()
        assert family["q_value"].max() == pytest.approx(family["p_value"].max())


def test_the_summary_corrects_every_test_over_layers() -> None:
    log = planted.log([planted.leaning(6.0), planted.leaning(-6.0)], layers=3, documents=8)
    table = specialization.summary(log)
    for metric in ("mutual_information", "eta_squared", "kappa", "positional", "content", "excess_recency"):
        rows = table[table["metric"] == metric]
        layers = rows[rows["layer"].notna()]
        assert layers["p_value"].notna().all(), metric
        assert (layers["q_value"] >= layers["p_value"]).all(), metric
        assert rows[rows["layer"].isna()]["q_value"].isna().all(), metric


def test_empty_documents_make_no_labellings(tmp_path: Path) -> None:
    """With two proxies, five documents have 16 labellings: too few for 0.05; six have 32."""
    log = planted.log([planted.leaning(6.0), planted.leaning(-6.0)], documents=6)
    emptied = log.assign(selected=log["selected"].where(log["document"] != log["document"][-1], -1))
    for name, data, defined in (("whole", log, True), ("emptied", emptied, False)):
        frame = specialization.mutual_information(data)
        level = frame[frame["metric"] == "mutual_information"]["p_value"]
        assert level.notna().any() == defined, name


def test_a_lean_is_claimed_only_after_correction(tmp_path: Path) -> None:
    log = planted.log([planted.uniform] * 4, layers=8, documents=8)
    small_run(tmp_path, log, model={"num_layers": 8, "num_proxies": 4})
    measured, skipped = analyze([tmp_path])
    table = measured[0].tables["proxies"].query("metric == 'recency'")
    alone = (table["low"] > table["null"]) | (table["high"] < table["null"])
    assert alone.any()
    assert (table["q_value"] > 0.05).all()
    assert "leans near" not in (text := describe(measured, skipped))
    assert "leans far" not in text
    assert text.count("no lean shown") == 32


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
        ({"num_local_blocks": 2}, "forced local blocks differ: planted/msa-"),
        ({"num_sink_blocks": 1}, "forced sink blocks differ: planted/msa-"),
        ({"query_stride": 4}, "recorded queries differ: planted/msa-"),
        ({"context_length": 1024}, "context lengths differ, and with them every chance value: planted/msa-"),
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

"""The viewer's page as a file: it holds what the log holds, in the space it may take, and loads nothing else."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import numpy as np
import planted
import pytest
import xarray as xr
from msa_analysis.viewer import write_viewer
from msa_analysis.viewer_data import tile_rate
from msa_analysis.viewer_plan import Size, page_bytes, plan_page

from msa_lab.config import DataConfig, RunConfig
from msa_lab.runs import Run
from msa_lab.selections import SelectionStore, open_selections, selection_rate

EVIL = "</script><img src=x onerror=alert(1)>"


def small(arm: str = "msa", **changes: Any) -> RunConfig:
    model = {"block_size": 16, "top_k_blocks": 4, "num_query_heads": 4, "num_proxies": 2, "num_layers": 2}
    data = {"context_length": 160} | changes.pop("data", {})
    wanted = {"records": 3, "documents": 2} | changes.pop("selections", {})
    return folders.config(arm, "msa", model=model | changes.pop("model", {}), data=data, selections=wanted, **changes)


def text_tokens(texts: list[str], length: int) -> np.ndarray:
    return np.stack([np.frombuffer(text.encode().ljust(length, b"."), np.uint8)[:length] for text in texts])


def recorded(root: Path, config: RunConfig, *, seed: int = 0, names: tuple[str, ...] = ("one.py", "two.py")) -> Run:
    """A run folder with a log of planted choices and random scores and masses."""
    run = Run.of(config, root)
    run.write_config(config)
    rng, model, length = np.random.default_rng(seed), config.model, config.data.context_length
    texts = [f"{EVIL} & é {name}\n" + "x = 1\n" * length for name in names]
    tokens = text_tokens(texts, length)
    store = SelectionStore.create(run.path / "selections.zarr", config, list(names), tokens)
    for step in (0, 40, 110):
        log = planted.log(
            [planted.uniform, planted.leaning(3.0)],
            layers=model.num_layers,
            documents=len(names),
            context=length,
            block_size=model.block_size,
            top_k=model.top_k_blocks,
            seed=seed + step,
            steps=(step,),
        )
        values = {name: log[name].isel(step=0).values for name in ("selected", "teacher")}
        none = values["selected"] < 0
        for name in ("score", "mass", "teacher_mass"):
            made = rng.random(none.shape, np.float32) * (3 if name == "score" else 0.2)
            values[name] = np.where(none, np.nan, made)
        store.append(step, "warmup" if step < 40 else "sparse", values)
    return run


def pieces(page: Path) -> dict[str, bytes]:
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>', page.read_text())
    return {name: base64.b64decode(text) for name, text in found}


def described(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="page">(.*?)</script>', page.read_text())
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("runs"), small())


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_viewer([run], tmp_path_factory.mktemp("page") / "viewer.html")


def test_maps_in_the_page_are_the_logs_selection_rates(run: Run, page: Path) -> None:
    data, held = open_selections(run), pieces(page)
    for step in range(3):
        selected = data["selected"].isel(step=step).values
        rate = selection_rate(selected, data["query"].values, block_size=16, num_blocks=10).mean(1)
        stored = np.frombuffer(held[f"r0m{step}"], "<u2").reshape(2, 2, -1)
        lower = np.tril_indices(10)
        np.testing.assert_allclose(stored / 65534, rate[..., lower[0], lower[1]], atol=1e-5)


def test_slots_in_the_page_are_the_logs_bit_for_bit(run: Run, page: Path) -> None:
    data, held = open_selections(run), pieces(page)
    shape = tuple(data.sizes[name] for name in ("layer", "proxy", "query", "slot"))
    for step, document in np.ndindex(3, 2):
        raw = held[f"r0d{step}-{document}"]
        for name, width in described(page)["runs"][0]["fields"]:
            size = int(np.prod(shape)) * (width or 2)
            part, raw = raw[:size], raw[size:]
            wanted = data[name].isel(step=step, document=document).values
            if width:
                stored = np.frombuffer(part, np.uint8).reshape(shape).astype(int)
                np.testing.assert_array_equal(np.where(stored == 255, -1, stored), wanted)
            else:
                np.testing.assert_array_equal(np.frombuffer(part, "<f2").reshape(shape), wanted)
        assert not raw


def test_more_than_255_blocks_keep_their_ids(tmp_path: Path) -> None:
    log = planted.log([planted.oldest, planted.newest], documents=1, context=600, block_size=2, steps=(0, 5))
    raw = pieces(write_viewer([log], tmp_path / "viewer.html"))["r0d1-0"]
    stored = np.frombuffer(raw, "<u2")[: log["selected"][1].size].reshape(1, 2, 600, 4).astype(int)
    np.testing.assert_array_equal(np.where(stored == 65535, -1, stored), log["selected"].values[1, :, 0])


def test_the_text_in_the_page_is_the_documents(run: Run, page: Path) -> None:
    held, tokens = pieces(page), open_selections(run)["tokens"].values
    for document in range(2):
        assert held[f"t{document}"] == tokens[document].astype(np.uint8).tobytes()
        assert (np.frombuffer(held[f"l{document}"], "<u2") == 1).all()


def test_a_tile_of_several_blocks_is_the_share_of_visible_pairs_that_were_selected() -> None:
    selected = planted.choose(planted.uniform, documents=3, context=110, block_size=8, top_k=4, seed=1)[:, ::2]
    query = np.arange(0, 110, 2)
    found = tile_rate(selected, query, 8, (4, 4))
    chosen, pairs = np.zeros((3, 4, 4)), np.zeros((4, 4))
    for i, position in enumerate(query):
        for block in range(position // 8 + 1):
            pairs[position // 32, block // 4] += 1
            chosen[:, position // 32, block // 4] += (selected[:, i] == block).any(-1)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(found, chosen / pairs)


def test_a_tile_of_one_block_is_the_selection_rate() -> None:
    selected = planted.choose(planted.uniform, documents=2, context=100, block_size=8, top_k=4, seed=2)
    query = np.arange(100)
    plain = selection_rate(selected, query, block_size=8, num_blocks=13)
    np.testing.assert_array_equal(tile_rate(selected, query, 8, (1, 13)), plain)


def test_impossible_cells_are_no_zeros_and_unrecorded_ones_neither(tmp_path: Path) -> None:
    log = open_selections(recorded(tmp_path, small())).isel(query=slice(None, None, 32))
    stored = np.frombuffer(pieces(write_viewer([log], tmp_path / "viewer.html"))["r0m0"], "<u2")
    rows = np.tril_indices(10)[0]
    assert (stored.reshape(4, -1)[:, rows % 2 == 1] == 65535).all()
    assert (stored.reshape(4, -1)[:, rows % 2 == 0] <= 65534).all()
    assert stored.size == 4 * 55, "only the lower triangle is stored"


def test_nothing_that_a_document_or_its_name_says_becomes_markup(tmp_path: Path) -> None:
    run = recorded(tmp_path, small(), names=(f"{EVIL}.py", "two.py"))
    html = write_viewer([run], tmp_path / "viewer.html").read_text()
    assert "<img" not in html
    assert "onerror" not in re.sub(r'<script type="application/json".*?</script>', "", html)
    assert described(tmp_path / "viewer.html")["documents"][0] == f"{EVIL}.py"
    assert "innerHTML" not in html
    assert "insertAdjacentHTML" not in html


def test_the_page_names_no_resource_outside_itself(page: Path) -> None:
    html = re.sub(r'<script type="text/plain".*?</script>', "", page.read_text())
    assert not re.search(r"https?://|//[a-z]+\.", html)
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(", html)
    assert all(target.startswith("data:") for target in re.findall(r'(?:src|href)="([^"]*)"', html))
    assert "default-src 'none'" in html


@pytest.mark.parametrize("max_mb", [0.2, 0.3, 1.0])
def test_the_page_keeps_its_size_and_says_what_it_left_out(tmp_path: Path, max_mb: float) -> None:
    run = recorded(tmp_path, small())
    page = write_viewer([run], tmp_path / "viewer.html", max_mb=max_mb)
    assert page.stat().st_size <= max_mb * 1e6
    held = described(page)["runs"][0]
    assert held["log"] == {"step": 3, "document": 2, "query": 160}
    kept = len(held["queries"])
    assert (kept < 160) == (max_mb < 1), kept
    assert (held["steps"][0], held["steps"][-1]) == (0, 110)


def test_thinned_queries_are_the_ones_they_say_they_are(tmp_path: Path) -> None:
    run = recorded(tmp_path, small())
    page = write_viewer([run], tmp_path / "viewer.html", max_mb=0.3)
    queries, data = described(page)["runs"][0]["queries"], open_selections(run)
    assert 10 <= len(queries) < 160
    assert np.ptp(np.diff(queries)) <= 1
    score = np.frombuffer(pieces(page)["r0d2-1"], "<f2")[: 4 * len(queries) * 4].reshape(2, 2, -1, 4)
    np.testing.assert_array_equal(score, data["score"].sel(query=queries).isel(step=2, document=1).values)


def test_a_plan_fits_and_keeps_both_ends_whatever_the_log() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        steps, documents, queries, blocks, maps, slots = (int(n) for n in 2 ** rng.uniform(1, 11, 6))
        size = Size(steps, documents, max(queries, 64), blocks, min(maps, 256), min(slots, 64), 8, queries * 6)
        plan = plan_page(size, 40e6)
        smallest = plan == plan_page(size, 0)
        assert page_bytes(size, plan) <= 40e6 or smallest
        assert page_bytes(size, plan) > 15e6 or smallest or plan == plan_page(size, 1e18)
        assert plan.steps >= 2
        assert min(plan.documents, plan.queries, plan.tiles) >= 1


def test_two_runs_share_their_documents_and_others_keep_their_own(tmp_path: Path) -> None:
    one, two = recorded(tmp_path, small()), recorded(tmp_path, small(seed=1), seed=5)
    other = recorded(tmp_path, small("other"), names=("one.py", "three.py"))
    page = described(write_viewer([one, two, other], tmp_path / "viewer.html"))
    assert page["documents"] == ["one.py", "two.py", "three.py"]
    assert [run["documents"] for run in page["runs"]] == [[0, 1], [0, 1], [0, 2]]
    assert len({run["label"] for run in page["runs"]}) == 3


def test_the_words_of_the_recall_task_are_readable(tmp_path: Path) -> None:
    from msa_lab.data import open_data

    config = small()
    config = replace(config, data=DataConfig(source="recall", context_length=1024))
    run, data = Run.of(config, tmp_path), open_data(config.data, tmp_path)
    run.write_config(config)
    tokens = data.probe(2).tokens.numpy()
    store = SelectionStore.create(run.path / "selections.zarr", config, ["recall/0", "recall/1"], tokens)
    shape = store.arrays["selected"].shape[1:]
    store.append(0, "sparse", {n: np.zeros(shape) for n in ("selected", "teacher", "score", "mass", "teacher_mass")})
    held = pieces(write_viewer([run], tmp_path / "viewer.html"))
    assert held["t0"].decode().split() == data.decode(tokens[0].tolist()).split()
    assert np.frombuffer(held["l0"], "<u2").sum() == len(held["t0"])


def test_bad_input_is_told_in_one_line(tmp_path: Path, run: Run) -> None:
    empty = Run.of(small("empty"), tmp_path)
    empty.write_config(small("empty"))
    started = small("started")
    Run.of(started, tmp_path).write_config(started)
    log = Run.of(started, tmp_path).path / "selections.zarr"
    SelectionStore.create(log, started, ["one.py", "two.py"], np.zeros((2, 160), int))
    for runs, options, said in (
        ([], {}, "nothing to show"),
        ([run, empty], {}, f"{empty.path}: has no selections.zarr"),
        ([Run(log.parent)], {}, "holds no whole record"),
        ([run], {"max_mb": 0.15}, "max_mb=0.15: the smallest page of this log is larger; try 0.2"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            write_viewer(runs, tmp_path / "viewer.html", **options)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "viewer.html").exists()


def test_a_log_without_scores_or_teacher_or_text_is_shown_as_it_is(tmp_path: Path) -> None:
    log: xr.Dataset = planted.log([planted.newest, planted.oldest], documents=1, context=64).drop_vars("teacher")
    page = write_viewer([log], tmp_path / "viewer.html")
    assert described(page)["runs"][0]["fields"] == [["selected", 1]]
    assert pieces(page)["t0"] == b""

"""`intervene` on run folders: the costs it tables, what it calls undefined, and the requests it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import interventions as planted
import pytest
from msa_analysis.intervene import _paths, _rules, cost_table, intervene
from tiny import write_corpus

from msa_lab.config import ModelConfig, RunConfig
from msa_lab.data import open_data
from msa_lab.evaluate import load_model, score


@pytest.fixture(scope="module")
def recall(tmp_path_factory: pytest.TempPathFactory):
    return planted.recall_run(tmp_path_factory.mktemp("recall"))


def test_a_run_gives_a_tidy_table_whose_baseline_is_the_run_s_own_score(recall, tmp_path: Path) -> None:
    frame = intervene(recall, ["shared", "shift", "own"], documents=6, layers="both", cache=tmp_path)
    assert list(frame.columns) == [
        *("rule", "layer", "proxy", "quantity", "distance_of", "bin", "distance"),
        *("value", "low", "high", "baseline", "documents", "share", "reason"),
    ]
    assert set(frame["rule"]) == {"shared", "shift1", "own"}
    assert set(frame["layer"].dropna()) == {0, 1}
    assert set(frame["quantity"]) == {"loss", "accuracy"}
    assert set(frame["distance_of"]) == {"", "dependency"}
    assert (frame.loc[frame["rule"] == "own", "value"] == 0.0).all()
    assert frame.loc[frame["rule"] == "own", "low"].isna().all()
    whole = frame[frame["layer"].isna() & frame["bin"].isna()].set_index(["rule", "quantity"])
    assert whole.loc[("shared", "loss"), "low"] < whole.loc[("shared", "loss"), "high"]
    assert whole.loc[("shared", "loss"), "documents"] == 6
    data = open_data(recall.config.data, tmp_path)
    size = replace(recall.config, train=replace(recall.config.train, batch_size=6))
    scored = score(load_model(recall), data, size, 1)
    assert whole.loc[("shared", "loss"), "baseline"] == pytest.approx(scored["validation_loss"], rel=1e-6)
    hits = sum(a["accuracy"] * a["questions"] for a in scored["accuracy_by_distance"].values())
    asked = sum(a["questions"] for a in scored["accuracy_by_distance"].values())
    assert whole.loc[("own", "accuracy"), "baseline"] == pytest.approx(hits / asked)
    shown = cost_table(frame)
    assert list(shown.index) == ["shared", "shift1", "own"]
    assert "no document changed" in shown.loc["own", "loss"]
    assert " to " in shown.loc["shared", "loss"]


def test_bits_per_byte_and_packed_rows(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", words=120)
    run = planted.text_run(tmp_path, corpus, document_mask=True)
    frame = intervene(
        run, ["recency", "other_document", "teacher"], documents=5, layers="all", cache=tmp_path / "cache"
    )
    whole = frame[frame["bin"].isna()].set_index(["rule", "quantity"])
    data = open_data(run.config.data, tmp_path / "cache")
    size = replace(run.config, train=replace(run.config.train, batch_size=5))
    scored = score(load_model(run), data, size, 1)
    assert whole.loc[("recency", "bits_per_byte"), "baseline"] == pytest.approx(scored["bits_per_byte"], rel=1e-6)
    assert whole.loc[("recency", "bits_per_byte"), "value"] == pytest.approx(
        whole.loc[("recency", "loss"), "value"]
        * sum(row["tokens"] for row in scored["rows"])
        / sum(row["bytes"] for row in scored["rows"])
        / math.log(2)
    )
    undefined = whole.loc["other_document"]
    assert undefined["value"].isna().all()
    assert undefined["reason"].str.contains("not defined: rows hold several documents").all()
    assert set(frame["distance_of"]) == {"", "lost block"}


def test_one_proxy_at_a_time(recall, tmp_path: Path) -> None:
    frame = intervene(recall, ["random"], documents=4, layers="each", proxies="each", cache=tmp_path)
    whole = frame[frame["bin"].isna() & (frame["quantity"] == "loss")]
    assert [(row.layer, row.proxy) for row in whole.fillna(-1).itertuples()] == [
        *((0, -1), (0, 0), (0, 1)),
        *((1, -1), (1, 0), (1, 1)),
    ]
    assert whole["value"].nunique() == 6
    shown = cost_table(frame)
    assert list(shown.index) == [("random", 0), ("random", 1)]
    assert all(shown["loss"].str.contains(" to "))


def test_what_is_not_defined_says_so(tmp_path: Path) -> None:
    one = planted.recall_run(tmp_path / "one", model={"num_proxies": 1})
    frame = intervene(one, ["shared", "shift", "recency"], documents=4, layers="all", cache=tmp_path)
    assert set(frame.loc[frame["reason"].str.contains("one proxy"), "rule"]) == {"shared", "shift1"}
    assert frame.loc[frame["rule"] != "recency", ["value", "low", "high"]].isna().all().all()
    assert frame.loc[frame["rule"] == "recency", "value"].notna().all()
    few = intervene(one, ["recency", "other_document"], documents=1, layers="all", cache=tmp_path)
    assert few["low"].isna().all()
    assert "1 documents: an interval needs 4" in set(few["reason"])
    assert few["reason"].str.contains("one document: there is no other").any()
    window = planted.recall_run(tmp_path / "window", model={"attention": "window"})
    frame = intervene(window, ["shared", "recency", "random"], documents=4, layers="all", cache=tmp_path)
    assert frame.loc[frame["rule"] == "shared", "reason"].str.contains("the run has no proxies").all()
    assert (frame.loc[frame["rule"] == "recency", "value"] == 0).all()
    assert frame.loc[frame["rule"] == "random", "value"].iloc[0] != 0
    full = planted.recall_run(tmp_path / "full", model={"top_k_blocks": 16})
    frame = intervene(full, ["recency"], documents=4, cache=tmp_path)
    assert frame["reason"].str.contains("no query sees more than top_k_blocks=16 blocks").all()
    forced = planted.recall_run(tmp_path / "forced", model={"num_local_blocks": 3})
    assert intervene(forced, documents=4, cache=tmp_path)["value"].isna().all()


def test_bad_requests_are_refused_in_one_line(recall, tmp_path: Path) -> None:
    dense = planted.recall_run(tmp_path / "dense", model={"attention": "dense"})
    stopped = planted.recall_run(tmp_path / "stopped", finish=False)
    cases = [
        (dense, {}, "dense layers only"),
        (stopped, {}, "no result.json yet"),
        (recall, {"rules": ["sharde"]}, "'sharde' is none; use own, shared"),
        (recall, {"rules": ["shift2"]}, "shift2: the run has 2 proxies; use shift1"),
        (recall, {"rules": []}, "none is given"),
        (recall, {"documents": 257}, "must be 1 to 256"),
        (recall, {"documents": 0}, "must be 1 to 256"),
        (recall, {"layers": "some"}, "must be one of all, each, both"),
    ]
    for run, request, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            intervene(run, **{"cache": tmp_path, **request})
        assert "\n" not in str(caught.value)
    recall_elsewhere = planted.recall_run(tmp_path / "elsewhere")
    recall_elsewhere.write_json("environment.json", {"corpus": {"hash": "0123"}})
    with pytest.raises(ValueError, match="expected_hash='0123'"):
        intervene(recall_elsewhere, cache=tmp_path)


def test_a_model_that_draws_its_own_blocks_is_compared_with_that_draw(tmp_path: Path) -> None:
    run = planted.recall_run(tmp_path, model={"attention": "random"})
    frame = intervene(run, ["own", "random"], documents=6, layers="all", cache=tmp_path)
    whole = frame[frame["bin"].isna() & (frame["quantity"] == "loss")].set_index("rule")
    scored = score(load_model(run), open_data(run.config.data, tmp_path), run.config, 2)
    nats, tokens = (sum(row[name] for row in scored["rows"][:6]) for name in ("nats", "tokens"))
    assert whole.loc["own", "baseline"] == pytest.approx(nats / tokens, rel=1e-6)
    assert whole.loc["own", "value"] == 0
    assert whole.loc["random", "value"] != 0


def test_a_rule_that_acts_behind_the_choice_acts_in_every_layer_that_shares_it() -> None:
    model = ModelConfig(num_layers=4, attention=("msa", "shared", "msa", "shared"))
    teacher, recency = _rules(["teacher", "recency"], RunConfig(model=model))
    layers = {rule.name: _paths(rule, [0], RunConfig(model=model)) for rule in (teacher, recency)}
    assert layers["teacher"] == ("layers.0.attention.select", "layers.1.attention.select")
    assert layers["recency"] == ("layers.0.attention.select",)

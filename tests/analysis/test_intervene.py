"""Replacing selections: what is replaced, by what, and what it is found to cost."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import interventions as planted
import numpy as np
import pytest
import torch
from msa_analysis.changes import Intervention, tally_changes
from msa_analysis.costs import change_table
from msa_analysis.intervene import RULES, cost_table, intervene
from msa_analysis.replacement import replaced
from msa_analysis.rules import Rule, find_rule
from msa_kernels import Selection, block_scores
from scipy import stats
from tiny import MODEL, write_corpus
from torch import Tensor

from msa_lab.data import open_data
from msa_lab.evaluate import load_model, score
from msa_lab.model import Transformer
from msa_lab.selections import record
from msa_lab.teacher import block_mass

PATHS = ("layers.0.attention.select", "layers.1.attention.select")
TOKENS = torch.randint(257, (3, 100), generator=torch.Generator().manual_seed(0))
OFFSETS = torch.tensor([0, 37, 100, 200, 251, 300], dtype=torch.int32)
EVERY = ("own", "shift1", "shift3", *(name for name in RULES if name != "shift"))


def model_of(**changes: object) -> Transformer:
    plain = {"num_proxies": 4, "num_kv_heads": 2, "num_proxy_kv_heads": 2, "top_k_blocks": 4}
    return planted.sharp(Transformer(replace(MODEL, **(plain | changes)))).eval()  # pyright: ignore[reportArgumentType]


def own_blocks(model: torch.nn.Module, tokens: Tensor = TOKENS, *rest: Tensor) -> dict[str, Tensor]:
    with torch.no_grad(), record(model) as seen:
        model(tokens, *rest)
    return {path: one.selection.blocks for path, one in seen.items()}


@torch.no_grad()
def under(model: Transformer, rule: Rule | str, *rest: Tensor, **where: object) -> tuple[Tensor, dict[str, Selection]]:
    with replaced(model, rule, **where) as put:  # pyright: ignore[reportArgumentType]
        logits = model(TOKENS, *rest).logits
    return logits, dict(put)


def test_the_model_s_own_choice_put_back_changes_no_bit() -> None:
    model = model_of()
    with torch.no_grad():
        plain = model(TOKENS).logits
    assert torch.equal(under(model, "own")[0], plain)
    recorded = own_blocks(model)
    logits, put = under(model, "other_document", other=recorded)
    assert torch.equal(logits, plain)
    assert all(torch.equal(put[path].blocks, recorded[path]) for path in PATHS)


def test_sharing_between_proxies_of_equal_weights_changes_no_bit() -> None:
    model = model_of(num_proxy_kv_heads=1)
    with torch.no_grad():
        plain = model(TOKENS).logits
        assert not torch.equal(under(model, "shared")[0], plain)
        for layer in model.layers:
            weight = layer.attention.proxy.query.projection.weight
            weight.copy_(weight[:8].repeat(4, 1))
        plain = model(TOKENS).logits
    for rule in ("shared", "shift1", "shift3"):
        assert torch.equal(under(model, rule)[0], plain), rule
    assert not torch.equal(under(model, "random")[0], plain)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("local", "sink"), [(1, 0), (2, 1), (0, 1)])
def test_budget_forced_blocks_and_causality_hold_under_every_rule(packed: bool, local: int, sink: int) -> None:
    model = model_of(num_local_blocks=local, num_sink_blocks=sink)
    rest = (OFFSETS,) if packed else ()
    recorded = own_blocks(model, TOKENS, *rest)
    starts = OFFSETS if packed else torch.arange(0, 301, 100)
    token = torch.arange(300)
    visible = (token - starts[torch.searchsorted(starts, token, right=True) - 1]) // 8 + 1
    for rule in EVERY:
        if packed and rule == "other_document":
            continue
        where = {"num_local_blocks": local, "num_sink_blocks": sink, "other": recorded}
        put = under(model, rule, *rest, **where)[1]
        assert set(put) == set(PATHS)
        for selection in put.values():
            assert selection.blocks.shape == (3, 4, 100, 4)
            assert selection.blocks.dtype == torch.int32
            for ids, count in zip(selection.blocks.permute(0, 2, 1, 3).flatten(0, 1).tolist(), visible, strict=True):
                forced = set(range(max(0, int(count) - local), int(count))) | set(range(min(sink, int(count))))
                for row in ids:
                    held = [block for block in row if block >= 0]
                    assert held == sorted(set(held)), rule
                    assert row == held + [-1] * (4 - len(held)), rule
                    assert len(held) == min(4, int(count)), rule
                    assert max(held) < count, f"{rule} reads the future"
                    assert forced <= set(held), rule


def test_shared_choices_are_those_of_the_mean_score() -> None:
    model = model_of()
    with torch.no_grad(), record(model) as seen:
        model(TOKENS)
    one = seen[PATHS[0]]
    assert one.q_proxy is not None
    assert one.k_proxy is not None
    maxima = block_scores(one.q_proxy, one.k_proxy, block_size=8).double().numpy()
    for rule in ("shared", "shared_z"):
        blocks = under(model, rule, layers=PATHS[:1])[1][PATHS[0]].blocks.numpy()
        assert (blocks == blocks[:, :1]).all()
        for row, query in ((0, 99), (1, 57), (2, 40)):
            scores = maxima[row, :, query, : query // 8 + 1]
            if rule == "shared_z":
                scores = (scores - scores.mean(1, keepdims=True)) / scores.std(1, keepdims=True)
            mean = scores.mean(0)
            best = sorted([query // 8, *sorted(range(query // 8), key=lambda b: -mean[b])[:3]])
            assert blocks[row, 0, query].tolist() == best, rule


def test_the_teacher_s_blocks_come_from_the_heads_of_the_same_forward() -> None:
    model = model_of()
    with torch.no_grad(), record(model) as seen:
        model(TOKENS)
    logits, put = under(model, "teacher", layers=PATHS[:1])
    one = seen[PATHS[0]]
    assert one.q is not None
    assert one.k is not None
    mass = block_mass(one.q, one.k, block_size=8, num_groups=4)
    for query in (99, 57):
        own = query // 8
        best = mass[1, 2, query, :own].argsort(descending=True)[:3].tolist()
        assert put[PATHS[0]].blocks[1, 2, query].tolist() == sorted([*best, own])
    # The attention read them: the same blocks put in by the other road give the same.
    again = under(model, "other_document", layers=PATHS[:1], other={PATHS[0]: put[PATHS[0]].blocks})[0]
    assert torch.equal(logits, again)


def test_recency_and_sink_and_another_proxy_s() -> None:
    model = model_of()
    own = own_blocks(model)[PATHS[0]]
    first = {rule: under(model, rule, layers=PATHS[:1])[1][PATHS[0]].blocks for rule in EVERY[1:7]}
    assert first["recency"][0, 0, 99].tolist() == [9, 10, 11, 12]
    assert first["sink_recency"][2, 3, 99].tolist() == [0, 10, 11, 12]
    assert torch.equal(first["shift1"][:, 3], own[:, 0])
    assert torch.equal(first["shift3"][:, 1], own[:, 0])


def test_random_blocks_belong_to_the_document_and_differ_by_layer() -> None:
    model = model_of()
    whole = under(model, "random", documents=torch.tensor([5, 6, 7]))[1]
    moved = under(model, "random", documents=torch.tensor([6, 7, 5]))[1]
    for path in PATHS:
        assert torch.equal(whole[path].blocks[[1, 2, 0]], moved[path].blocks)
    assert not torch.equal(whole[PATHS[0]].blocks, whole[PATHS[1]].blocks)
    assert not torch.equal(whole[PATHS[0]].blocks[0], whole[PATHS[0]].blocks[1])
    assert not torch.equal(whole[PATHS[0]].blocks[:, 0], whole[PATHS[0]].blocks[:, 1])


def test_only_the_named_layer_and_proxy_are_replaced() -> None:
    model = model_of()
    own = own_blocks(model)
    with torch.no_grad(), record(model) as seen, replaced(model, "random", layers=PATHS[1:], proxies=[2]) as put:
        model(TOKENS)
    assert set(put) == {PATHS[1]}
    assert torch.equal(seen[PATHS[0]].selection.blocks, own[PATHS[0]])
    found = seen[PATHS[1]].selection.blocks
    same = [torch.equal(found[:, proxy], own[PATHS[1]][:, proxy]) for proxy in range(4)]
    assert same == [True, True, False, True]


def test_nothing_of_ours_stays_in_the_model() -> None:
    model = model_of()
    calls: list[str] = []
    theirs = model.layers[0].attention.select.register_forward_hook(lambda *_: calls.append("theirs"))

    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    before, plain = hooks(), own_blocks(model)
    with replaced(model, "random"):
        assert hooks() != before
    assert hooks() == before

    def broken(choice: object) -> Selection:
        raise RuntimeError("no")

    for needs in ("", "heads"):
        with pytest.raises(RuntimeError, match="no"):
            under(model, Rule("broken", broken, needs))  # pyright: ignore[reportArgumentType]
        assert hooks() == before
    assert all(torch.equal(plain[path], blocks) for path, blocks in own_blocks(model).items())
    assert len(calls) == 4
    theirs.remove()


def test_a_replacement_that_breaks_the_budget_or_goes_nowhere_is_refused() -> None:
    model = model_of()
    wide = Rule("wide", lambda c: c.seen.selection._replace(blocks=c.seen.selection.blocks.repeat(1, 1, 1, 2)))
    with pytest.raises(ValueError, match=r"keeps the budget"):
        under(model, wide)
    with pytest.raises(ValueError, match=r"no module 'layers.7"):
        under(model, "recency", layers=["layers.7.attention.select"])
    with pytest.raises(ValueError, match=r"must name proxies 0 to 3"):
        under(model, "recency", proxies=[4])
    nowhere = Intervention(find_rule("recency"), ("layers.0.attention.core",))
    with pytest.raises(ValueError, match=r"gives no selection in a forward; name one of layers.0.attention.select"):
        tally_changes(model, [planted.repeating(2)], [nowhere], block_size=8)
    with pytest.raises(ValueError, match=r"other_document needs one document a row"):
        under(model, "other_document", OFFSETS, other=own_blocks(model))
    # A compiled module is one, which torch.compile's own type does not say.
    with pytest.raises(ValueError, match="is compiled"), replaced(torch.compile(model, backend="eager"), "recency"):  # pyright: ignore[reportArgumentType]
        pass


def test_costs_of_a_model_whose_heads_need_a_near_and_a_far_block() -> None:
    model, rows = planted.NearAndFar(), planted.repeating(12)
    # A batch's fields are not all tensors, so their types are not kept by a loop over them.
    batches = [type(rows)(*(None if x is None else x[i : i + 4] for x in rows)) for i in (0, 4, 8)]  # pyright: ignore[reportArgumentType]
    names = ["shared", "shift1", "recency", "sink_recency", "random", "other_document", "teacher", "own"]
    made = [Intervention(find_rule(name), ("select",)) for name in names]
    table = change_table(tally_changes(model, batches, made, block_size=8))
    table["rule"] = [names[i] for i in table["intervention"]]
    loss = table[table["quantity"] == "loss"].set_index(["rule", "distance"])["value"]
    right = table[table["quantity"] == "accuracy"].set_index(["rule", "distance"])["value"]
    near, far = "1", "4–7"  # noqa: RUF001 (as the tables set a range)
    for rule in ("own", "teacher", "other_document"):
        assert loss[rule, near] == loss[rule, far] == 0.0, rule
    # Two blocks want the one free slot with equal scores; the older one, which the far head needs, wins the tie.
    assert loss["shared", near] > 2
    assert abs(loss["shared", far]) < 1e-6
    assert loss["recency", far] > 2
    assert abs(loss["recency", near]) < 1e-6
    assert loss["sink_recency", near] > 2
    # The near head reads the far block and the other way round: neither finds anything.
    assert min(loss["shift1", near], loss["shift1", far]) > 2
    assert loss.loc["random"].iloc[0] > loss.loc["recency"].iloc[0] + 0.3
    assert -1.0 <= right["shift1", near] < -0.8
    assert right["recency", near] == 0.0
    overall = table[table["bin"].isna() & (table["quantity"] == "accuracy")].set_index("rule")
    assert (overall["baseline"] == 1.0).all()
    assert overall.loc["random", "high"] < overall.loc["recency", "low"]


def test_the_interval_is_the_jackknife_over_documents_by_hand() -> None:
    model, rows = planted.NearAndFar(), planted.repeating(6)
    # Documents of unequal weight: a plain mean of document means would be another number.
    rows.targets[0, 40:] = -100
    rows.targets[3, 60:] = -100
    table = change_table(tally_changes(model, [rows], [Intervention(find_rule("recency"), ("select",))], block_size=8))
    found = table[table["bin"].isna() & (table["quantity"] == "loss")].iloc[0]
    with torch.no_grad():
        own = model(rows.inputs)
        with replaced(model, "recency"):
            new = model(rows.inputs)
    nats = [[], []]
    for store, logits in zip(nats, (own, new), strict=True):
        for row in range(6):
            picked = [i for i in range(planted.LENGTH) if rows.targets[row, i] >= 0]
            store.append([-float(logits[row, i].log_softmax(-1)[rows.targets[row, i]]) for i in picked])
    change = [sum(b) - sum(a) for a, b in zip(*nats, strict=True)]
    count = [len(a) for a in nats[0]]
    value = sum(change) / sum(count)
    left = [(sum(change) - c) / (sum(count) - n) for c, n in zip(change, count, strict=True)]
    error = math.sqrt(5 / 6 * sum((x - sum(left) / 6) ** 2 for x in left))
    half = stats.t.ppf(0.975, 5) * error
    assert found["value"] == pytest.approx(value, rel=1e-5)
    assert (found["low"], found["high"]) == pytest.approx((value - half, value + half), rel=1e-4)
    assert found["documents"] == 6
    assert found["baseline"] == pytest.approx(sum(map(sum, nats[0])) / sum(count), abs=1e-6)


def test_each_token_is_booked_at_the_distance_of_the_best_block_it_lost() -> None:
    model = model_of()
    text = [planted.Batch(TOKENS, TOKENS.roll(-1, 1), None, None)]
    with torch.no_grad(), record(model) as seen:
        model(TOKENS)
    put = under(model, "recency")[1]
    # A layer that was seen whole has its queries and keys.
    share = {path: block_mass(one.q, one.k, block_size=8, num_groups=4) for path, one in seen.items()}  # pyright: ignore[reportArgumentType]
    counts = np.zeros((3, 6))
    for row, query in np.ndindex(3, 100):
        best, bin_ = -1.0, -1
        for path in PATHS:
            for proxy in range(4):
                kept = set(put[path].blocks[row, proxy, query].tolist())
                for block in set(seen[path].selection.blocks[row, proxy, query].tolist()) - kept - {-1}:
                    mass = float(share[path][row, proxy, query, block])
                    distance = query // 8 - block
                    if mass > best:
                        best, bin_ = mass, 0 if distance == 0 else int(math.log2(distance)) + 1
        counts[row, bin_ + 1] += 1
    sums = tally_changes(model, text, [Intervention(find_rule("recency"), PATHS)], block_size=8)
    assert sums.attrs["distance_of"] == "lost block"
    assert list(sums["bin"].values) == [-1, 0, 1, 2, 3, 4]
    assert np.array_equal(sums["tokens"].isel(intervention=0).values, counts)
    assert counts[:, 0].min() >= 8 * 4
    table = change_table(sums)
    assert table["share"][1:].sum() == pytest.approx(1.0)
    assert "nothing lost" in set(table["distance"].dropna())


def test_other_document_means_the_one_before_whatever_the_batch_size() -> None:
    model, own = model_of(), own_blocks(model_of())
    rows = planted.Batch(TOKENS, TOKENS.roll(-1, 1), None, None)
    given: list[Tensor] = []

    def spy(choice: object) -> Selection:
        given.append(choice.other)  # pyright: ignore[reportAttributeAccessIssue]
        return find_rule("other_document").choose(choice)  # pyright: ignore[reportArgumentType]

    made = [Intervention(Rule("spy", spy, "another document"), PATHS[:1])]
    found = []
    for size in (1, 2, 3):
        given.clear()
        cut = [planted.Batch(*(p[i : i + size] for p in rows[:2]), None, None) for i in range(0, 3, size)]
        found.append(tally_changes(model, cut, made, block_size=8))
        assert torch.equal(torch.cat(given), own[PATHS[0]][[2, 0, 1]]), size
    for other in found[1:]:
        for name in found[0]:
            assert np.allclose(found[0][name], other[name], atol=1e-4), name


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


def test_a_loss_that_is_not_finite_is_no_number() -> None:
    model, rows = planted.NearAndFar(), planted.repeating(5)

    def forward(model: torch.nn.Module, batch: object, documents: Tensor) -> Tensor:
        logits = model(batch.inputs)  # pyright: ignore[reportAttributeAccessIssue]
        return torch.where(documents[:, None, None] == 2, torch.nan, logits)

    made = [Intervention(find_rule("recency"), ("select",))]
    table = change_table(tally_changes(model, [rows], made, block_size=8, forward=forward))
    whole = table[table["bin"].isna() & (table["quantity"] == "loss")].iloc[0]
    assert not np.isfinite(whole["value"])
    assert "not finite" in whole["reason"]


def test_long_rows_go_by_query_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    whole = {rule: under(model, rule)[1] for rule in EVERY if rule != "other_document"}
    monkeypatch.setattr("msa_analysis.rules.QUERIES", 24)
    for rule, put in whole.items():
        again = under(model, rule)[1]
        assert all(torch.equal(put[path].blocks, again[path].blocks) for path in PATHS), rule


def test_a_model_that_draws_its_own_blocks_is_compared_with_that_draw(tmp_path: Path) -> None:
    run = planted.recall_run(tmp_path, model={"attention": "random"})
    frame = intervene(run, ["own", "random"], documents=6, layers="all", cache=tmp_path)
    whole = frame[frame["bin"].isna() & (frame["quantity"] == "loss")].set_index("rule")
    scored = score(load_model(run), open_data(run.config.data, tmp_path), run.config, 2)
    nats, tokens = (sum(row[name] for row in scored["rows"][:6]) for name in ("nats", "tokens"))
    assert whole.loc["own", "baseline"] == pytest.approx(nats / tokens, rel=1e-6)
    assert whole.loc["own", "value"] == 0
    assert whole.loc["random", "value"] != 0


def test_without_heads_there_is_no_lost_distance_and_no_teacher() -> None:
    model, rows = planted.NearAndFar(), planted.repeating(5)
    text = [planted.Batch(rows.inputs, rows.targets, None, None)]
    model.attend = model.core
    del model.core
    model.core = lambda *given: model.attend(*given)
    made = [Intervention(find_rule("recency"), ("select",))]
    table = change_table(tally_changes(model, text, made, block_size=8))
    assert table["bin"].isna().all()
    assert table["value"].iloc[0] > 1
    with pytest.raises(ValueError, match="select: has no module `core` beside it, where teacher could act"):
        tally_changes(model, text, [Intervention(find_rule("teacher"), ("select",))], block_size=8)


def test_all_forwards_are_told(recall, tmp_path: Path) -> None:
    told: list[int] = []
    rows = planted.repeating(5)
    made = [Intervention(find_rule(name), ("select",)) for name in ("recency", "other_document")]
    # As many fields as a batch has, and these rows have distances.
    batches = [type(rows)(*(x[i : i + 3] for x in rows[:2]), None, rows[3][i : i + 3]) for i in (0, 3)]  # pyright: ignore[reportCallIssue, reportOptionalSubscript]
    tally_changes(planted.NearAndFar(), batches, made, block_size=8, done=lambda: told.append(1))
    assert len(told) == 2 * (1 + 2) + 1

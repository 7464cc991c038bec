"""Replacing selections: what is put in the place of a model's own choice, and what stays as it was."""

from __future__ import annotations

import pytest
import torch
from interventions import PATHS, TOKENS, model_of, own_blocks, repeating, under
from msa_analysis.changes import Intervention, tally_changes
from msa_analysis.intervene import RULES
from msa_analysis.replacement import replaced
from msa_analysis.rules import Rule, find_rule
from msa_kernels import Selection, block_scores

from msa_lab.selections import record
from msa_lab.teacher import block_mass

OFFSETS = torch.tensor([0, 37, 100, 200, 251, 300], dtype=torch.int32)
EVERY = ("own", "shift1", "shift3", *(name for name in RULES if name != "shift"))


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
        tally_changes(model, [repeating(2)], [nowhere], block_size=8)
    with pytest.raises(ValueError, match=r"other_document needs one document a row"):
        under(model, "other_document", OFFSETS, other=own_blocks(model))
    # A compiled module is one, which torch.compile's own type does not say.
    with pytest.raises(ValueError, match="is compiled"), replaced(torch.compile(model, backend="eager"), "recency"):  # pyright: ignore[reportArgumentType]
        pass


def test_long_rows_go_by_query_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    whole = {rule: under(model, rule)[1] for rule in EVERY if rule != "other_document"}
    monkeypatch.setattr("msa_analysis.rules.QUERIES", 24)
    for rule, put in whole.items():
        again = under(model, rule)[1]
        assert all(torch.equal(put[path].blocks, again[path].blocks) for path in PATHS), rule

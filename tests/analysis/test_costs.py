"""What other selections are found to cost: losses, their intervals, and the distances at which they are booked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from interventions import LENGTH, PATHS, TOKENS, NearAndFar, model_of, own_blocks, repeating, under
from msa_analysis.changes import Intervention, tally_changes
from msa_analysis.costs import change_table
from msa_analysis.replacement import replaced
from msa_analysis.rules import Rule, find_rule
from msa_kernels import Selection
from scipy import stats
from torch import Tensor

from msa_lab.batch import Batch
from msa_lab.selections import record
from msa_lab.teacher import block_mass


def test_costs_of_a_model_whose_heads_need_a_near_and_a_far_block() -> None:
    model, rows = NearAndFar(), repeating(12)
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
    model, rows = NearAndFar(), repeating(6)
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
            picked = [i for i in range(LENGTH) if rows.targets[row, i] >= 0]
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
    text = [Batch(TOKENS, TOKENS.roll(-1, 1), None, None)]
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
    rows = Batch(TOKENS, TOKENS.roll(-1, 1), None, None)
    given: list[Tensor] = []

    def spy(choice: object) -> Selection:
        given.append(choice.other)  # pyright: ignore[reportAttributeAccessIssue]
        return find_rule("other_document").choose(choice)  # pyright: ignore[reportArgumentType]

    made = [Intervention(Rule("spy", spy, "another document"), PATHS[:1])]
    found = []
    for size in (1, 2, 3):
        given.clear()
        cut = [Batch(*(p[i : i + size] for p in rows[:2]), None, None) for i in range(0, 3, size)]
        found.append(tally_changes(model, cut, made, block_size=8))
        assert torch.equal(torch.cat(given), own[PATHS[0]][[2, 0, 1]]), size
    for other in found[1:]:
        for name in found[0]:
            assert np.allclose(found[0][name], other[name], atol=1e-4), name


def test_a_loss_that_is_not_finite_is_no_number() -> None:
    model, rows = NearAndFar(), repeating(5)

    def forward(model: torch.nn.Module, batch: object, documents: Tensor) -> Tensor:
        logits = model(batch.inputs)  # pyright: ignore[reportAttributeAccessIssue]
        return torch.where(documents[:, None, None] == 2, torch.nan, logits)

    made = [Intervention(find_rule("recency"), ("select",))]
    table = change_table(tally_changes(model, [rows], made, block_size=8, forward=forward))
    whole = table[table["bin"].isna() & (table["quantity"] == "loss")].iloc[0]
    assert not np.isfinite(whole["value"])
    assert "not finite" in whole["reason"]


def test_without_heads_there_is_no_lost_distance_and_no_teacher() -> None:
    model, rows = NearAndFar(), repeating(5)
    text = [Batch(rows.inputs, rows.targets, None, None)]
    model.attend = model.core
    del model.core
    model.core = lambda *given: model.attend(*given)
    made = [Intervention(find_rule("recency"), ("select",))]
    table = change_table(tally_changes(model, text, made, block_size=8))
    assert table["bin"].isna().all()
    assert table["value"].iloc[0] > 1
    with pytest.raises(ValueError, match="select: has no module `core` beside it, where teacher could act"):
        tally_changes(model, text, [Intervention(find_rule("teacher"), ("select",))], block_size=8)


def test_all_forwards_are_told() -> None:
    told: list[int] = []
    rows = repeating(5)
    made = [Intervention(find_rule(name), ("select",)) for name in ("recency", "other_document")]
    # As many fields as a batch has, and these rows have distances.
    batches = [type(rows)(*(x[i : i + 3] for x in rows[:2]), None, rows[3][i : i + 3]) for i in (0, 3)]  # pyright: ignore[reportCallIssue, reportOptionalSubscript]
    tally_changes(NearAndFar(), batches, made, block_size=8, done=lambda: told.append(1))
    assert len(told) == 2 * (1 + 2) + 1

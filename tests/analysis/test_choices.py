"""Which slots and rows count, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import planted
import pytest
from msa_analysis.choices import bin_label, counting_rows, learned_slots, log2_bin
from msa_analysis.tally import tally


def test_unused_slots_do_not_leak_into_distances() -> None:
    """Queries that chose nothing, and a slot left empty, count as if they were not there."""
    log = planted.log([planted.newest, planted.leaning(2)], steps=(0,))
    kept = log.isel(query=slice(0, None, 2))
    log["selected"][..., 1::2, :] = -1
    ours, theirs = tally(log), tally(kept)
    for name in ("slots", "closeness", "log_distance", "bins", "shares", "uniform_bins", "shared", "first_block"):
        kept_sums, sums = (
            held[name].sel(source="proxy") if "source" in held[name].dims else held[name] for held in (theirs, ours)
        )
        assert sums.values == pytest.approx(kept_sums.values), name
    empty = log.isel(proxy=[0], query=slice(0, None, 2)).copy(deep=True)
    empty["selected"][..., 0] = -1  # the farthest of the three newest, once the first blocks are past
    sums = tally(empty).sel(source="proxy")
    assert float(sums["slots"].sum()) == pytest.approx(
        float(theirs["slots"].sel(source="proxy", proxy=0).sum()) * 2 / 3
    )
    assert float((sums["log_distance"] / sums["slots"]).mean()) == pytest.approx(0.5)  # log2 of 1 and of 2


@pytest.mark.parametrize("top_k", [2, 3, 4])
def test_the_forced_block_and_short_early_history_do_not_pass_for_recency(top_k: int) -> None:
    """Uniform choice has mean distances of these many blocks with and without what is no choice."""
    log = planted.log([planted.uniform], documents=40, context=1024, block_size=128, top_k=top_k, steps=(0,))
    ids, own = log["selected"].values[0, 0, :, 0], np.arange(1024) // 128
    distance = own[:, None] - ids
    naive = distance[ids >= 0].mean()
    assert naive == pytest.approx({2: 1.166667, 3: 1.619048, 4: 1.884615}[top_k], abs=0.02)
    saturated = distance[(ids >= 0) & (distance > 0)].mean()
    assert saturated == pytest.approx({2: 2.5, 3: 2.615385, 4: 2.722222}[top_k], abs=0.03)
    rows = counting_rows(log, min_visible=top_k + 1)
    learned = learned_slots(ids[:, rows.index], rows)
    free = (rows.own[:, None] - learned)[learned >= 0]
    assert free.mean() == pytest.approx({2: 2.75, 3: 3.0, 4: 3.25}[top_k], abs=0.02)
    sums = tally(log, min_visible=top_k + 1).sel(source="proxy").sum()
    assert float(sums["slots"]) == free.size
    assert float(sums["closeness"] / sums["slots"]) == pytest.approx(0.5, abs=0.01)
    assert float(sums["log_distance"]) == pytest.approx(np.log2(free).sum())


def test_saturated_rows_are_left_out() -> None:
    log = planted.log([planted.uniform], context=512, block_size=16, top_k=4)
    rows = counting_rows(log)
    assert rows.index.min() == 15 * 16  # the first query that sees 16 = 4 x 4 blocks
    assert rows.share == pytest.approx(272 / 512)
    # Whatever the saturated rows hold, nothing changes.
    other = log.copy(deep=True)
    other["selected"][..., : 15 * 16, :] = 0
    assert tally(log).equals(tally(other))
    assert not tally(log).equals(tally(log, min_visible=8))


def test_a_row_without_a_choice_is_refused() -> None:
    log = planted.log([planted.uniform])
    with pytest.raises(ValueError, match=r"min_visible=4: .*try 16"):
        counting_rows(log, min_visible=4)


def test_forced_local_and_sink_blocks_are_no_choice() -> None:
    log = planted.log([planted.uniform])
    log.attrs |= {"num_local_blocks": 2, "num_sink_blocks": 1}
    rows = counting_rows(log)
    own = int(rows.own[0])
    ids = np.array([[0, 1, own - 2, own - 1, own, -1]], dtype=np.int16)[:, :]
    one = next(rows.parts(1))
    assert learned_slots(ids, one).tolist() == [[-1, 1, own - 2, -1, -1, -1]]
    assert (one.nearest, one.farthest[0], one.eligible[0]) == (2, own - 1, own - 2)
    assert one.grid.x[0, [own - 2, 1]].tolist() == [0.0, 1.0]
    assert one.grid.chance[0].tolist() == [0.0, *[1 / (own - 2)] * (own - 2), *[0.0] * (32 - own + 1)]


def test_log2_bins_are_named_by_their_blocks() -> None:
    assert log2_bin(np.array([0, 1, 2, 3, 4, 7, 8, 15, 16])).tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 5]
    assert [bin_label(b) for b in range(5)] == ["0", "1", "2\N{EN DASH}3", "4\N{EN DASH}7", "8\N{EN DASH}15"]


def test_the_uniform_profile_is_a_distribution() -> None:
    sums = tally(planted.log([planted.uniform]))
    for name, dim in (("uniform_bins", "bin"), ("uniform_shares", "part")):
        assert sums[name].sum(dim).values == pytest.approx(sums["slots"].values)


def test_a_log_without_records_or_queries_is_refused() -> None:
    log = planted.log([planted.uniform])
    with pytest.raises(ValueError, match=r"step=\[\]: the log holds no record"):
        tally(log.isel(step=slice(0)))
    with pytest.raises(ValueError, match=r"query=\[\]: the log holds no query"):
        tally(log.isel(query=slice(0)))


def test_a_log_is_tallied_alike_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [planted.uniform, planted.leaning(3)]
    log = planted.log(rules, heads=rules * 2, documents=3)
    whole = tally(log)
    monkeypatch.setattr("msa_analysis.sums.PIECE", 3 * 2 * 4 * 7)  # seven rows: query blocks are cut
    monkeypatch.setattr("msa_analysis.tally.PIECE", 3 * 4 * 4 * 7)
    for name, sums in tally(log).data_vars.items():
        assert sums.values == pytest.approx(whole[name].values, nan_ok=True), name

"""Which slots and rows count, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import planted
import pytest
from msa_analysis.choices import bin_label, counting_rows, distances, learned_slots, log2_bin
from msa_analysis.tally import tally


def blocks_of(rule: planted.Rule, top_k: int, *, documents: int = 1) -> tuple[np.ndarray, np.ndarray]:
    ids = planted.choose(rule, documents=documents, context=1024, block_size=128, top_k=top_k, seed=1)
    return ids, np.arange(1024) // 128


def test_unused_slots_do_not_leak_into_distances() -> None:
    ids, own = blocks_of(planted.newest, 4)
    distance, used = distances(ids, own)
    assert used.sum() == 3328  # of 4096: the first three blocks see fewer than four
    assert distance[used].mean() == pytest.approx(1.307692, abs=1e-6)
    assert distance.mean() != pytest.approx(distance[used].mean(), abs=0.01)


@pytest.mark.parametrize(
    ("top_k", "with_own", "without", "with_a_choice"),
    [(2, 1.166667, 2.5, 2.75), (3, 1.619048, 2.615385, 3.0), (4, 1.884615, 2.722222, 3.25)],
)
def test_the_forced_block_and_short_early_history_do_not_pass_for_recency(
    top_k: int, with_own: float, without: float, with_a_choice: float
) -> None:
    """A random choice has these mean distances in blocks; only the last row is free of forced and saturated ones."""
    ids, own = blocks_of(planted.uniform, top_k, documents=40)
    distance, used = distances(ids, own)
    assert distance[used].mean() == pytest.approx(with_own, abs=0.02)
    free = used & (distance > 0)
    assert distance[free].mean() == pytest.approx(without, abs=0.02)
    free &= (own >= top_k)[:, None]
    assert distance[free].mean() == pytest.approx(with_a_choice, abs=0.02)


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
    one = type(rows)(rows.index[:1], rows.own[:1], 2, 1, 1.0)
    assert learned_slots(ids, one).tolist() == [[-1, 1, own - 2, -1, -1, -1]]
    assert (one.nearest, one.farthest[0], one.eligible[0]) == (2, own - 1, own - 2)
    x = one.position(np.array([[2, own - 1]]))
    assert x.tolist() == [[0.0, 1.0]]


def test_log2_bins_are_named_by_their_blocks() -> None:
    assert log2_bin(np.array([0, 1, 2, 3, 4, 7, 8, 15, 16])).tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 5]
    assert [bin_label(b) for b in range(5)] == ["0", "1", "2\N{EN DASH}3", "4\N{EN DASH}7", "8\N{EN DASH}15"]


def test_the_uniform_profile_is_a_distribution() -> None:
    rows = counting_rows(planted.log([planted.uniform]))
    assert rows.uniform.sum(1) == pytest.approx(1.0)
    assert rows.uniform_share.sum(1) == pytest.approx(1.0)

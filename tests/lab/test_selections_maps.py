import numpy as np
import pytest

from msa_lab.selections import never_selected, record_steps, selection_rate


@pytest.mark.parametrize(
    ("first", "last", "records", "expected"),
    [
        (0, 400, 5, [0, 100, 200, 300, 400]),
        (0, 10, 4, [0, 3, 7, 10]),
        (300, 400, 3, [300, 350, 400]),
        (0, 3, 40, [0, 1, 2, 3]),
        (0, 400, 2, [0, 400]),
        (7, 7, 2, [7]),
        (0, 400, 0, []),
    ],
)
def test_records_are_spread_evenly_with_both_ends(first, last, records, expected):
    assert record_steps(first, last, records) == expected


@pytest.mark.parametrize(("first", "last", "records", "field"), [(0, 9, 1, "records"), (9, 0, 4, "last")])
def test_impossible_schedules_name_the_field(first, last, records, field):
    with pytest.raises(ValueError, match=f"{field}="):
        record_steps(first, last, records)


def newest(queries, block_size, k):
    """The most recent blocks of each query: (query, slot), ascending, -1 last."""
    own = np.arange(queries) // block_size
    blocks = np.maximum(own - (k - 1), 0)[:, None] + np.arange(k)
    return np.where(blocks <= own[:, None], blocks, -1).astype(np.int16)


def test_unused_slots_do_not_enter_the_map():
    selected = newest(1024, 128, 4)
    assert (selected >= 0).sum() == 3328
    rate = selection_rate(selected, np.arange(1024), block_size=128, num_blocks=8)
    distance = np.arange(8)[:, None] - np.arange(8)
    assert np.isnan(rate[distance < 0]).all()
    assert (rate[(distance >= 0) & (distance < 4)] == 1).all()
    assert (rate[distance >= 4] == 0).all()
    weight = np.nan_to_num(rate)
    assert (weight * np.abs(distance)).sum() / weight.sum() == pytest.approx(1.307692, abs=1e-6)


def test_rates_keep_layers_documents_and_proxies_apart():
    rng = np.random.default_rng(0)
    query = np.arange(0, 24, 2)
    selected = np.full((2, 3, 2, 12, 2), -1, np.int16)
    for index in np.ndindex(2, 3, 2, 12):
        own = query[index[-1]] // 4
        chosen = np.sort(rng.choice(own + 1, min(2, own + 1), replace=False))
        selected[index][: len(chosen)] = chosen
    rate = selection_rate(selected, query, block_size=4, num_blocks=6)
    assert rate.shape == (2, 3, 2, 6, 6)
    for index in np.ndindex(2, 3, 2):
        for row, column in np.ndindex(6, 6):
            picks = selected[index][query // 4 == row]
            share = np.mean([column in pick for pick in picks]) if column <= row else np.nan
            np.testing.assert_equal(rate[(*index, row, column)], share)


def test_query_blocks_without_a_recorded_query_are_missing_not_zero():
    rate = selection_rate(newest(16, 4, 2)[::8], np.arange(0, 16, 8), block_size=4, num_blocks=4)
    assert np.isnan(rate[[1, 3]]).all()
    assert rate[2, 2] == 1


def test_forced_blocks_do_not_hide_a_collapse():
    query = np.arange(32)
    forced = {"block_size": 4, "num_local_blocks": 1, "num_sink_blocks": 0}
    # Blocks 0 to 6 can be chosen (7 is only ever somebody's own): a window of two misses none, the own block alone all.
    assert never_selected(newest(32, 4, 2), query, **forced) == 0
    assert never_selected(newest(32, 4, 1), query, **forced) == 7
    only_first = np.stack([np.zeros(32), query // 4], -1).astype(np.int16)
    assert never_selected(np.stack([only_first, newest(32, 4, 2)]), query, **forced).tolist() == [6, 0]
    with_sink = {**forced, "num_sink_blocks": 1}
    assert never_selected(only_first, query, **with_sink) == 6
    assert never_selected(newest(3, 4, 1), np.arange(3), **forced) == 0

"""The rules of the selection, and the selections that need no scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_oracle import as_lists, document_starts
from msa_kernels import random_selection, reference, row_keys, select_from_scores, window_selection
from msa_kernels.documents import layout

INF = float("inf")
NAN = float("nan")


def scores_of_last_query(values, block_size=1):
    """Scores for a row of len(values) blocks in which every query has these scores."""
    return torch.tensor(values).expand(1, 1, len(values) * block_size, len(values)).contiguous()


def last(values, **rule):
    return as_lists(select_from_scores(scores_of_last_query(values), block_size=1, **rule))[0][0][-1]


def distances(selection):
    """Own block minus selected block over the used slots."""
    batch, _, sequence, _ = selection.blocks.shape
    own = layout(batch, sequence, selection.block_size, selection.cu_seqlens).block[:, None, :, None]
    return (own - selection.blocks)[selection.blocks >= 0].double()


def visible_pairs(selection):
    """(query, key) pairs of one row and proxy that the selection lets see each other."""
    sequence, size = selection.blocks.shape[2], selection.block_size
    query = torch.arange(sequence)[:, None]
    seen = torch.minimum(query - selection.blocks[0, 0] * size + 1, torch.tensor(size))
    return int(seen[selection.blocks[0, 0] >= 0].sum())


def zero_proxies(sequence, proxies=1):
    return torch.zeros(1, sequence, proxies, 4), torch.zeros(1, sequence, 1, 4)


def test_own_block_counts_among_the_slots():
    assert last([5.0, 4.0, 3.0, 2.0, 1.0], top_k_blocks=1) == [4]
    assert last([5.0, 4.0, 3.0, 2.0, 1.0], top_k_blocks=3) == [0, 1, 4]


@pytest.mark.parametrize(("sequence", "k", "pairs"), [(512, 1, 33_024), (4096, 16, 6_162_432), (8192, 16, 14_290_944)])
def test_visible_pairs_have_the_calculated_number(sequence, k, pairs):
    assert visible_pairs(window_selection(1, sequence, top_k_blocks=k)) == pairs
    assert visible_pairs(select_from_scores(torch.zeros(1, 1, sequence, sequence // 128), top_k_blocks=k)) == pairs


@pytest.mark.parametrize(("sequence", "k", "density"), [(2048, 16, 1.0), (4096, 16, 0.734440), (2048, 4, 0.390922)])
def test_a_budget_that_covers_the_context_is_dense(sequence, k, density):
    pairs = visible_pairs(window_selection(1, sequence, top_k_blocks=k))
    assert pairs / (sequence * (sequence + 1) // 2) == pytest.approx(density, abs=5e-7)


@pytest.mark.parametrize(("sequence", "k", "valid"), [(1024, 4, 3328), (200, 16, 272), (300, 2, 472)])
def test_unused_slots_are_minus_one_and_never_a_future_block(sequence, k, valid):
    blocks = reference.select_blocks(*zero_proxies(sequence), top_k_blocks=k).blocks
    own = torch.arange(sequence)[:, None] // 128
    assert blocks.shape == (1, 1, sequence, k)
    assert blocks.dtype == torch.int32
    assert int((blocks >= 0).sum()) == valid
    assert bool((blocks >= -1).all())
    assert bool((blocks <= own).all())
    assert torch.equal((blocks[0, 0] >= 0).sum(-1), (own[:, 0] + 1).clamp(max=k))


def test_mean_distance_of_the_most_recent_blocks_is_not_skewed_by_unused_slots():
    assert distances(window_selection(1, 1024, top_k_blocks=4)).mean().item() == pytest.approx(1.307692, abs=5e-7)


@pytest.mark.parametrize(
    ("k", "with_own", "without_own", "with_choice"),
    [(2, 1.166667, 2.5, 2.75), (3, 1.619048, 2.615385, 3.0), (4, 1.884615, 2.722222, 3.25)],
)
def test_random_blocks_have_the_calculated_mean_distance(k, with_own, without_own, with_choice):
    keys = row_keys(0, 0, 0, torch.arange(60))
    selection = random_selection(60, 1024, 1, top_k_blocks=k, keys=keys)
    distance = distances(selection)
    assert distance.mean().item() == pytest.approx(with_own, abs=0.02)
    assert distance[distance > 0].mean().item() == pytest.approx(without_own, abs=0.02)
    choosers = selection._replace(blocks=selection.blocks.clone())
    choosers.blocks[:, :, : k * 128] = -1
    distance = distances(choosers)
    assert distance[distance > 0].mean().item() == pytest.approx(with_choice, abs=0.02)


@pytest.mark.parametrize("repeat", range(3))
def test_ties_go_to_the_lower_block_id(repeat):
    chosen = as_lists(reference.select_blocks(*zero_proxies(1024), top_k_blocks=3))[0][0]
    for query, blocks in enumerate(chosen):
        assert blocks == sorted({0, 1, query // 128} if query >= 256 else range(query // 128 + 1))


def test_zero_and_minus_zero_tie():
    assert last([-0.0, 0.0, -0.0, 0.0, 9.0], top_k_blocks=3) == [0, 1, 4]


def test_groups_choose_independently():
    sequence, proxies = 1024, 4
    q_proxy = torch.eye(8)[:proxies].expand(1, sequence, proxies, 8)
    k_proxy = torch.eye(8)[torch.arange(sequence) // 128].view(1, sequence, 1, 8)
    chosen = as_lists(reference.select_blocks(q_proxy, k_proxy, top_k_blocks=2))[0]
    assert [proxy[-1] for proxy in chosen] == [[0, 7], [1, 7], [2, 7], [3, 7]]
    assert [proxy[900] for proxy in chosen] == [[0, 7], [1, 7], [2, 7], [3, 7]]


def test_forced_blocks_overlapping_give_their_slots_back():
    values = [0.0, 3.0, 2.0, 1.0, 0.0]
    assert last(values, top_k_blocks=3, num_local_blocks=1, num_sink_blocks=1) == [0, 1, 4]
    assert last(values, top_k_blocks=3, num_local_blocks=2, num_sink_blocks=1) == [0, 3, 4]
    first_rows = as_lists(
        select_from_scores(
            scores_of_last_query(values), top_k_blocks=3, block_size=1, num_local_blocks=2, num_sink_blocks=1
        )
    )[0][0]
    assert first_rows[:3] == [[0], [0, 1], [0, 1, 2]]
    own_is_sink = scores_of_last_query([0.0, 0.0, 5.0, 6.0])
    rows = as_lists(
        select_from_scores(own_is_sink, top_k_blocks=3, block_size=1, num_local_blocks=1, num_sink_blocks=2)
    )
    assert rows[0][0] == [[0], [0, 1], [0, 1, 2], [0, 1, 3]]


def test_more_forced_blocks_than_slots_are_refused():
    with pytest.raises(ValueError, match=r"num_local_blocks=2 \+ num_sink_blocks=1 .*top_k_blocks=2; .*at least 3"):
        last([1.0, 2.0, 3.0], top_k_blocks=2, num_local_blocks=2, num_sink_blocks=1)


def test_no_forced_block_is_legal():
    assert last([1.0, 3.0, 2.0, 0.0], top_k_blocks=2, num_local_blocks=0) == [1, 2]


def test_an_infinite_score_does_not_displace_a_forced_block():
    assert last([INF, INF, INF, 0.0], top_k_blocks=2) == [0, 3]
    assert last([INF, INF, INF, -INF], top_k_blocks=2, num_sink_blocks=1) == [0, 3]


def test_a_block_with_a_nan_score_is_absent_unless_forced():
    assert last([1.0, NAN, 0.0, NAN], top_k_blocks=4) == [0, 2, 3]
    assert last([NAN, 1.0, NAN, NAN], top_k_blocks=2, num_local_blocks=0, num_sink_blocks=1) == [0, 1]
    assert last([NAN, NAN], top_k_blocks=2, num_local_blocks=0) == []


def test_a_nan_counts_only_where_it_is_visible():
    generator = torch.Generator().manual_seed(0)
    q_proxy = torch.randn(1, 12, 1, 4, generator=generator)
    k_proxy = torch.randn(1, 12, 1, 4, generator=generator)
    clean = reference.block_scores(q_proxy, k_proxy, block_size=4)
    k_proxy[0, 6] = NAN
    scores = reference.block_scores(q_proxy, k_proxy, block_size=4)
    assert torch.equal(scores[:, :, :6], clean[:, :, :6])
    assert bool(scores[0, 0, 6:, 1].isnan().all())
    assert torch.equal(scores[:, :, 6:, [0, 2]], clean[:, :, 6:, [0, 2]])
    documents = torch.tensor([0, 7, 12], dtype=torch.int32)
    packed = reference.block_scores(q_proxy, k_proxy, block_size=4, cu_seqlens=documents)
    assert bool(packed[0, 0, 6, 1].isnan())
    assert not bool(packed[0, 0, 7:].isnan().any())


def test_very_low_past_scores_still_beat_high_future_ones():
    sequence = 512
    k_proxy = torch.full((1, sequence, 1, 1), -2e4)
    k_proxy[:, 300:] = 100.0
    blocks = reference.select_blocks(torch.ones(1, sequence, 1, 1), k_proxy, top_k_blocks=2).blocks[0, 0]
    own = torch.arange(sequence) // 128
    assert bool((blocks.amax(-1) == own).all())
    assert bool((blocks[128:] >= 0).all())
    future = torch.full((1, 1, 4, 4), 100.0)
    future[..., 0] = -2e4
    assert as_lists(select_from_scores(future, top_k_blocks=2, block_size=1, num_local_blocks=0))[0][0][0] == [0]


def test_scores_are_ranked_in_fp32():
    wide = torch.tensor([1.0, 1.0 + 1e-12, 0.0], dtype=torch.float64).expand(1, 1, 3, 3)
    assert as_lists(select_from_scores(wide, top_k_blocks=2, block_size=1))[0][0][-1] == [0, 2]
    half = torch.tensor([1.0, 1.0 + 2**-7, 0.0]).bfloat16().expand(1, 1, 3, 3)
    assert as_lists(select_from_scores(half, top_k_blocks=2, block_size=1))[0][0][-1] == [1, 2]


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 7, 50, 50, 63, 100], dtype=torch.int32)])
def test_a_range_of_queries_equals_the_rows_of_the_whole(cu_seqlens):
    generator = torch.Generator().manual_seed(1)
    proxies = torch.randn(2, 50, 4, 3, generator=generator), torch.randn(2, 50, 2, 3, generator=generator)
    grid = {"block_size": 4, "cu_seqlens": cu_seqlens}
    whole = reference.block_scores(*proxies, **grid)
    part = reference.block_scores(*proxies, **grid, queries=(11, 31))
    torch.testing.assert_close(part, whole[:, :, 11:31], rtol=1e-6, atol=1e-6)
    assert reference.block_scores(*proxies, **grid, queries=(5, 5)).shape == (2, 4, 0, 13)
    rule = {"top_k_blocks": 3, **grid}
    picked = select_from_scores(whole[:, :, 11:31], **rule, queries=(11, 31), sequence=50)
    assert torch.equal(picked.blocks, select_from_scores(whole, **rule).blocks[:, :, 11:31])
    strided = reference.block_scores(*proxies, **grid, queries=(11, 48), stride=3)
    torch.testing.assert_close(strided, whole[:, :, 11:48:3], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"queries=\(11, 51\)"):
        reference.block_scores(*proxies, queries=(11, 51))


def test_chunks_of_scores_cover_all_queries_and_are_large_on_a_gpu():
    for device, longest in (("cpu", 8), ("cuda", 64)):
        chunks = list(reference._score_chunks(1000, 2**20, torch.device(device)))
        assert [i for low, high in chunks for i in range(low, high)] == list(range(1000))
        assert max(high - low for low, high in chunks) == longest


def test_heads_that_are_not_adjacent_get_their_proxys_choice():
    selection = random_selection(2, 40, 3, top_k_blocks=2, block_size=4, keys=torch.arange(2))
    for head_to_proxy in ([2, 0, 0, 1, 2, 1], torch.tensor([2, 0, 0, 1, 2, 1])):
        spread = selection.for_heads(head_to_proxy)
        assert torch.equal(spread.blocks[:, 3], selection.blocks[:, 1])
        assert spread.blocks.shape[1] == 6
        assert spread.block_size == 4
    with pytest.raises(ValueError, match=r"head_to_proxy=\[0, 3\] must name proxies 0 to 2"):
        selection.for_heads([0, 3])


def test_window_is_the_most_recent_blocks_of_the_own_document():
    offsets = torch.tensor([0, 10, 24], dtype=torch.int32)
    rows = as_lists(window_selection(1, 24, top_k_blocks=2, block_size=4, cu_seqlens=offsets))[0][0]
    assert rows[3] == [0]
    assert rows[9] == [1, 2]
    assert rows[10] == [0]
    assert rows[23] == [2, 3]


def test_random_blocks_are_a_pure_function_of_the_key():
    rule = {"top_k_blocks": 3, "block_size": 4}
    keys = row_keys(3, 5, 1, torch.tensor([7, 8, 7]))
    first = random_selection(3, 60, 2, **rule, keys=keys)
    torch.manual_seed(12345)
    torch.rand(3)
    again = random_selection(3, 60, 2, **rule, keys=keys)
    assert torch.equal(first.blocks, again.blocks)
    assert torch.equal(first.blocks[0], first.blocks[2])
    assert not torch.equal(first.blocks[0], first.blocks[1])
    assert not torch.equal(first.blocks[:, 0], first.blocks[:, 1])
    alone = random_selection(1, 60, 2, **rule, keys=keys[1:2])
    assert torch.equal(alone.blocks[0], first.blocks[1])
    words = random_selection(3, 60, 2, **rule, keys=torch.tensor([1, 2, 2**32 + 1])).blocks
    assert not torch.equal(words[0], words[1])
    assert not torch.equal(words[0], words[2])
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 2)):
        changed = random_selection(3, 60, 2, **rule, keys=row_keys(*other, torch.tensor([7, 8, 7])))
        assert not torch.equal(changed.blocks, first.blocks)


def test_random_blocks_do_not_depend_on_how_the_work_is_cut(monkeypatch):
    keys = row_keys(0, 1, 2, torch.arange(2))
    whole = random_selection(2, 60, 2, top_k_blocks=3, block_size=4, keys=keys)
    scores = torch.randn(2, 2, 60, 15, generator=torch.Generator().manual_seed(0))
    chosen = select_from_scores(scores, top_k_blocks=3, block_size=4)
    monkeypatch.setattr("msa_kernels.selection.LARGEST_CHUNK", 500)
    assert torch.equal(random_selection(2, 60, 2, top_k_blocks=3, block_size=4, keys=keys).blocks, whole.blocks)
    assert torch.equal(select_from_scores(scores, top_k_blocks=3, block_size=4).blocks, chosen.blocks)


def test_random_blocks_are_uniform_over_the_earlier_ones():
    keys = row_keys(1, 0, 0, torch.arange(4000))
    selection = random_selection(4000, 10, 1, top_k_blocks=4, block_size=1, keys=keys)
    counts = torch.bincount(selection.blocks[:, 0, 9].flatten().long(), minlength=10)
    assert counts[9] == 4000
    expected, deviation = 4000 / 3, (4000 * (1 / 3) * (2 / 3)) ** 0.5
    assert bool(((counts[:9] - expected).abs() < 4 * deviation).all())


def test_row_keys_differ_in_every_argument():
    documents = torch.arange(50)
    keys = torch.cat([row_keys(s, t, u, documents) for s in (0, 1, 2**40) for t in (0, 1, 9) for u in (0, 1)])
    assert len(keys.unique()) == len(keys)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_every_selection_keeps_the_invariants(data):
    draw = data.draw
    batch, sequence, proxies = draw(st.integers(1, 2)), draw(st.integers(1, 40)), draw(st.integers(1, 3))
    block_size, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    local = draw(st.integers(0, top_k))
    sink = draw(st.integers(0, top_k - local))
    cuts = draw(st.lists(st.integers(0, batch * sequence), max_size=6))
    rows = [row * sequence for row in range(batch + 1)]
    offsets = torch.tensor(sorted(cuts + rows), dtype=torch.int32) if draw(st.booleans()) else None
    seed = draw(st.integers(0, 1000))
    count = -(-sequence // block_size)
    values = torch.randint(-2, 3, (batch, proxies, sequence, count), generator=torch.Generator().manual_seed(seed))
    scores = values.float() * torch.tensor(draw(st.sampled_from([1.0, 1e30, INF])))  # INF x 0 makes NaN
    grid = {"top_k_blocks": top_k, "block_size": block_size, "cu_seqlens": offsets}
    forced = {"num_local_blocks": local, "num_sink_blocks": sink}
    by_score = select_from_scores(scores, **grid, **forced)
    at_random = random_selection(batch, sequence, proxies, **grid, **forced, keys=torch.arange(batch))
    starts = document_starts(batch, sequence, offsets)
    for selection in (by_score, at_random):
        for b, proxy, i in ((b, p, i) for b in range(batch) for p in range(proxies) for i in range(sequence)):
            slots = selection.blocks[b, proxy, i].tolist()
            own = (i - starts[b][i]) // block_size
            used = [x for x in slots if x != -1]
            assert slots == used + [-1] * (top_k - len(used))
            assert used == sorted(set(used))
            assert all(0 <= x <= own for x in used)
            assert {x for x in range(own + 1) if x > own - local or x < sink} <= set(used)
            if selection is at_random or bool(scores.isfinite().all()):
                assert len(used) == min(top_k, own + 1)

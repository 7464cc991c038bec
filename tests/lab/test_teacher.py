import math

import pytest
import torch
from msa_kernels import select_from_scores

from msa_lab import teacher
from msa_lab.teacher import at_blocks, block_mass, top_blocks


def heads(batch, sequence, query_heads, kv_heads, dim=8, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, sequence, query_heads, dim, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, sequence, kv_heads, dim, generator=generator, dtype=torch.float64)
    return (2 * q).to(dtype), k.to(dtype)


def by_definition(q, k, block_size, num_groups):
    """One softmax per row, head by head, with plain loops."""
    batch, sequence, query_heads, dim = q.shape
    blocks = math.ceil(sequence / block_size)
    mass = torch.zeros(batch, num_groups, sequence, blocks, dtype=torch.float64)
    for b in range(batch):
        for h in range(query_heads):
            keys = k[b, :, h // (query_heads // k.shape[2])]
            for i in range(sequence):
                share = torch.softmax(keys[: i + 1] @ q[b, i, h] / dim**0.5, 0)
                for j, p in enumerate(share):
                    group = h // (query_heads // num_groups)
                    mass[b, group, i, j // block_size] += p * num_groups / query_heads
    return mass


@pytest.mark.parametrize("sequence", [1, 15, 16, 17, 40])
@pytest.mark.parametrize(("kv_heads", "num_groups"), [(2, 2), (4, 1), (1, 4), (2, 4)])
def test_mass_is_the_group_mean_of_dense_softmax(sequence, kv_heads, num_groups):
    q, k = heads(2, sequence, 4, kv_heads)
    mass = block_mass(q, k, block_size=16, num_groups=num_groups)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), by_definition(q, k, 16, num_groups), rtol=0, atol=1e-6)
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, num_groups, sequence))


def test_tiles_and_query_ranges_do_not_change_the_mass(monkeypatch):
    q, k = heads(2, 50, 4, 2)
    whole = block_mass(q, k, block_size=8, num_groups=2)
    monkeypatch.setitem(teacher.TILE_SCORES, "cpu", 4 * 50 * 7)
    torch.testing.assert_close(block_mass(q, k, block_size=8, num_groups=2), whole)
    torch.testing.assert_close(block_mass(q, k, block_size=8, num_groups=2, queries=(11, 43)), whole[:, :, 11:43])


@pytest.mark.parametrize(("queries", "stride"), [(None, 3), ((11, 43), 5), ((8, 9), 4), ((0, 50), 64)])
def test_a_stride_takes_every_nth_query_of_the_range(monkeypatch, queries, stride):
    q, k = heads(2, 50, 4, 2)
    rules = {"top_k_blocks": 3, "block_size": 8, "num_sink_blocks": 1}
    counted = slice(*(queries or (0, 50)), stride)
    whole = block_mass(q, k, block_size=8, num_groups=2)
    monkeypatch.setitem(teacher.TILE_SCORES, "cpu", 4 * 50 * 4)
    monkeypatch.setattr(teacher, "LARGEST_CHUNK", 2 * 2 * 7 * 3)
    mass = block_mass(q, k, block_size=8, num_groups=2, queries=queries, stride=stride)
    torch.testing.assert_close(mass, whole[:, :, counted])
    chosen = top_blocks(mass, **rules, queries=queries or (0, 50), stride=stride).blocks
    assert torch.equal(chosen, select_from_scores(whole, **rules).blocks[:, :, counted])
    offsets = torch.tensor([0, 21, 50, 87, 100], dtype=torch.int32)
    packed = block_mass(q, k, block_size=8, num_groups=2, cu_seqlens=offsets)
    part = block_mass(q, k, block_size=8, num_groups=2, cu_seqlens=offsets, queries=queries, stride=stride)
    torch.testing.assert_close(part, packed[:, :, counted])


def test_packed_documents_have_the_mass_they_have_alone():
    q, k = heads(2, 48, 4, 2)
    offsets = torch.tensor([0, 21, 48, 48, 85, 96, 96], dtype=torch.int32)
    packed = block_mass(q, k, block_size=8, num_groups=2, cu_seqlens=offsets)
    for row, start, stop in [(0, 0, 21), (0, 21, 48), (1, 0, 37), (1, 37, 48)]:
        alone = block_mass(q[row : row + 1, start:stop], k[row : row + 1, start:stop], block_size=8, num_groups=2)
        found = packed[row : row + 1, :, start:stop]
        torch.testing.assert_close(found[..., : alone.shape[-1]], alone)
        assert not found[..., alone.shape[-1] :].any()
    part = block_mass(q, k, block_size=8, num_groups=2, cu_seqlens=offsets, queries=(13, 30))
    torch.testing.assert_close(part, packed[:, :, 13:30])


def test_future_keys_have_no_mass():
    q, k = heads(1, 40, 4, 2)
    changed = k.clone()
    changed[:, 20:] += 5.0
    before, after = (block_mass(q, keys, block_size=16, num_groups=2) for keys in (k, changed))
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    assert not torch.equal(before[:, :, 20:], after[:, :, 20:])


def test_autocast_does_not_round_the_mass():
    q, k = heads(1, 64, 4, 2, dtype=torch.float32)
    plain = block_mass(q, k, block_size=16, num_groups=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block_mass(q, k, block_size=16, num_groups=2), plain)
    half = block_mass(q.bfloat16(), k.bfloat16(), block_size=16, num_groups=2)
    exact = block_mass(q.bfloat16().float(), k.bfloat16().float(), block_size=16, num_groups=2)
    assert torch.equal(half, exact)


def test_mass_carries_no_gradient():
    q, k = heads(1, 16, 2, 2)
    assert not block_mass(q.requires_grad_(), k, block_size=8, num_groups=2).requires_grad


def test_top_blocks_obey_the_forced_rules():
    # The last query's mass by block: most in 1, then 3, then 0; block 4 is its own.
    mass = torch.tensor([0.2, 0.4, 0.05, 0.25, 0.1]).expand(1, 1, 20, 5)
    rules = {"top_k_blocks": 3, "block_size": 4}
    assert top_blocks(mass, **rules).blocks[0, 0, -1].tolist() == [1, 3, 4]
    assert top_blocks(mass, **rules, num_local_blocks=0).blocks[0, 0, -1].tolist() == [0, 1, 3]
    assert top_blocks(mass, **rules, num_sink_blocks=1).blocks[0, 0, -1].tolist() == [0, 1, 4]
    assert top_blocks(mass, **rules, num_local_blocks=2).blocks[0, 0, -1].tolist() == [1, 3, 4]
    assert top_blocks(mass, **rules).blocks[0, 0, 3].tolist() == [0, -1, -1]
    part = top_blocks(mass[:, :, 9:14], **rules, queries=(9, 14)).blocks
    assert torch.equal(part, select_from_scores(mass, **rules).blocks[:, :, 9:14])


def test_values_at_slots_without_a_block_are_nan():
    values = torch.tensor([[[[0.5, 0.25, 0.125]]]])
    found = at_blocks(values, torch.tensor([[[[0, 2, -1]]]], dtype=torch.int32))
    assert found[0, 0, 0, :2].tolist() == [0.5, 0.125]
    assert found[0, 0, 0, 2].isnan()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_groups": 3}, "num_groups=3: must divide the 4"), ({"queries": (0, 17)}, r"queries=\(0, 17\): must lie")],
)
def test_impossible_requests_name_the_field(change, message):
    q, k = heads(1, 16, 4, 2)
    with pytest.raises(ValueError, match=message):
        block_mass(q, k, **{"block_size": 8, "num_groups": 2, **change})


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="k has 3 heads"):
        block_mass(torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 3, 8), block_size=8, num_groups=2)

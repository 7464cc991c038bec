"""The forward over a sample of all combinations, on random shapes, difficult values and far out in memory."""

import itertools
import random

import pytest
import torch
from cute_cases import FLOAT_ERROR, Case, chosen, compare_outputs, finite_error, inputs, random_case
from msa_kernels import cute, reference

LENGTHS = (127, 128, 200, 256, 384, 512, 640, 1000, 4096)
BUDGETS = (1, 2, 4, 16, 0)
"""Blocks a query; 0: as many as there are."""
GROUPS = (1, 4, 8, 16)
CUTS = ((), (1,), (57,), (50, 100, 101))
"""Where documents begin behind the first: none, after one token, within a block, four documents."""
ALL = list(itertools.product(LENGTHS, BUDGETS, GROUPS, (1, 2), (False, True), CUTS, (64, 128)))
SAMPLE = random.Random(0).sample(ALL, 160)


def combined(length: int, budget: int, group: int, times: int, own_keys: bool, cuts: tuple[int, ...], dim: int) -> Case:
    kv_heads = 1 if length == 4096 else 2
    proxies = times * kv_heads
    return Case(
        sequence=length,
        heads=group * proxies,
        kv_heads=kv_heads,
        proxies=proxies,
        proxy_kv_heads=proxies if own_keys else 1,
        dim=dim,
        top_k_blocks=budget or min(-(-length // 128), 32),
        documents=(0, *cuts, length) if cuts else None,
    )


@pytest.mark.parametrize("parts", SAMPLE, ids=str)
def test_a_sample_of_all_combinations(parts: tuple):
    check(combined(*parts))


@pytest.mark.parametrize("seed", range(30))
def test_random_shapes(seed: int):
    case = random_case(seed)
    check(case._replace(block_size=64 if seed % 3 == 0 else 128))


def check(case: Case) -> None:
    """The selection against the reference's but for ties to rounding; output and log-sum-exp against fp64."""
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    limits = {"block_size": case.block_size, "cu_seqlens": offsets}
    exact = reference.block_scores(*[tensor.double() for tensor in tensors[:2]], **limits)
    best = reference.select_from_scores(
        exact, top_k_blocks=case.top_k_blocks, num_local_blocks=case.local, num_sink_blocks=case.sinks, **limits
    )
    assert torch.equal((selection.blocks >= 0).sum(-1), (best.blocks >= 0).sum(-1))
    ours, theirs = (
        exact.gather(-1, blocks.clamp(min=0).long()).masked_fill(blocks < 0, 0).sort(-1).values
        for blocks in (selection.blocks, best.blocks)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    compare_outputs(str(case), tensors, selection)


@pytest.mark.parametrize("kind", ["duplicated_rows", "one_huge_score", "one_hot", "equal_scores", "zero_values"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_difficult_values(kind: str, dtype: torch.dtype):
    case = Case(dtype=dtype, sequence=1100)
    tensors, offsets = inputs(case)
    q_proxy, k_proxy, q, k, v = tensors
    if kind == "duplicated_rows":
        for tensor in tensors:
            tensor[:, 1::2] = tensor[:, :-1:2]
    elif kind == "one_huge_score":
        q[:, 700], k[:, 5] = 3 * k[:, 5].repeat_interleave(8, 1), 10 * k[:, 5]
    elif kind == "one_hot":
        q *= 16
    elif kind == "equal_scores":
        q.zero_(), q_proxy.zero_()
    elif kind == "zero_values":
        v.zero_()
    selection = chosen(case, tensors, offsets)
    if kind in ("duplicated_rows", "equal_scores"):
        assert torch.equal(selection.blocks, reference.select_blocks(q_proxy, k_proxy, top_k_blocks=4).blocks)
    compare_outputs(f"{kind}, {dtype}", tensors, selection)


def test_what_comes_later_changes_no_bit_of_what_was_before():
    case = Case(sequence=900)
    tensors, _ = inputs(case)
    other, _ = inputs(case, seed=1)
    found = []
    for changed in (False, True):
        if changed:
            for tensor, new in zip(tensors, other, strict=True):
                tensor[:, 450:] = 100 * new[:, 450:]
        selection = chosen(case, tensors, None)
        with torch.no_grad():
            out, lse = cute.sparse_attention(*tensors[2:], selection)
        found.append((selection.blocks[:, :, :450], out[:, :450], lse[:, :450], out[:, 450:]))
    assert [torch.equal(*pair) for pair in zip(*found, strict=True)] == [True, True, True, False]


def test_the_last_queries_beyond_two_to_the_31_elements():
    case = Case(sequence=2**19 + 300, heads=32)
    tensors, _ = inputs(case)
    assert tensors[2].numel() > 2**31
    selection = chosen(case, tensors, None)
    with torch.no_grad():
        out, lse = cute.sparse_attention(*tensors[2:], selection)
    rows = torch.arange(case.sequence - 60, case.sequence, device="cuda")
    q_proxy, k_proxy, q, k, v = tensors
    blocks = selection.blocks[0, :, rows].long()

    own = rows // 128
    last = (rows[0].item(), case.sequence)
    scores = reference.block_scores(q_proxy.double(), k_proxy.double(), queries=last)[0]
    assert (blocks == own[None, :, None]).any(-1).all()
    scores.scatter_(-1, own.expand(case.proxies, -1)[..., None], float("inf"))
    ours = scores.gather(-1, blocks).sort(-1).values
    torch.testing.assert_close(ours, scores.topk(case.top_k_blocks).values.sort(-1).values, rtol=1e-5, atol=1e-5)

    keys = (blocks[..., None] * 128 + torch.arange(128, device="cuda")).flatten(2)
    hidden = (keys > rows[None, :, None]).repeat_interleave(case.heads // case.proxies, 0)
    # Four proxies over two key heads: a head's keys are those of half of the heads, its blocks those of a quarter.
    head = torch.arange(case.heads, device="cuda")[:, None, None]
    keys = keys.clamp(max=case.sequence - 1).repeat_interleave(case.heads // case.proxies, 0)
    of_keys = head // (case.heads // case.kv_heads)
    weights = torch.einsum("rhd,hrkd->hrk", q[0, rows].double(), k[0, keys, of_keys].double()) / case.dim**0.5
    weights.masked_fill_(hidden, float("-inf"))
    expected = torch.einsum("hrk,hrkd->rhd", weights.softmax(-1), v[0, keys, of_keys].double())
    assert finite_error(lse[0, rows], weights.logsumexp(-1).T) < FLOAT_ERROR
    assert finite_error(out[0, rows], expected) < 5e-3

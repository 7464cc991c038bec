"""The selection's plain kernels on a GPU: the block grid, the choice by scores, the reverse index.

Each must equal its plain PyTorch counterpart exactly. Buffers that the functions allocate come filled with the largest
integer, so that what a kernel leaves unwritten shows.
"""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from msa_kernels.documents import Layout, layout, num_blocks
from msa_kernels.selection import Selection, select_from_scores

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU (sm_90)", allow_module_level=True)

from msa_kernels.cute.index import build
from msa_kernels.cute.layout import make_layout
from msa_kernels.cute.topk import choose
from plain_index import plain_index, plain_rows

UNWRITTEN = 2**31 - 1
SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45, -1e-45, 3e38)
DOCUMENTS = {
    "rows": (2, 1000, None),
    "one_token": (1, 1, None),
    "short": (3, 37, None),
    "packed": (2, 1500, (0, 700, 701, 1499, 1500, 1500, 1501, 1502, 1502, 2900, 3000)),
    "lengths_one": (1, 70, tuple(range(71))),
    "empty_ends": (1, 513, (0, 0, 0, 128, 256, 320, 513, 513, 513)),
}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filling


def offsets_of(batch: int, sequence: int, documents: tuple[int, ...] | None) -> torch.Tensor:
    bounds = documents or range(0, batch * sequence + 1, sequence)
    return torch.tensor(tuple(bounds), dtype=torch.int32, device="cuda")


def random_documents(seed: int) -> tuple[int, int, tuple[int, ...]]:
    """Documents of all lengths, many of them empty or of one token."""
    rng = random.Random(seed)
    batch, sequence = rng.randint(1, 3), rng.choice([1, 64, 129, 1024, 3001])
    bounds = list(range(0, batch * sequence + 1, sequence))
    cuts = [rng.randint(0, batch * sequence) for _ in range(rng.choice([0, 3, 40]))]
    near = [cut + step for cut in cuts for step in rng.choice([(0,), (0, 1), (0, 0, 1, 2)])]
    return batch, sequence, tuple(sorted(bounds + [min(cut, batch * sequence) for cut in near]))


def grid_of(batch: int, sequence: int, offsets: torch.Tensor, block_size: int) -> Layout:
    return Layout(*(field.flatten().long() for field in layout(batch, sequence, block_size, offsets)))


CASES = {**DOCUMENTS, **{f"random_{seed}": random_documents(seed) for seed in range(12)}}


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_the_grid_is_that_of_the_documents(name: str, block_size: int):
    batch, sequence, documents = CASES[name]
    total, offsets = batch * sequence, offsets_of(batch, sequence, documents)
    first, starts, ends = make_layout(offsets, batch, sequence, block_size, offsets.device)
    grid = grid_of(batch, sequence, offsets, block_size)
    token = torch.arange(total, device="cuda")
    assert torch.equal(starts[first.long()], token - grid.position)
    own = first + grid.block
    assert torch.equal(starts[own], token - grid.position % block_size)
    assert bool((ends[own] > token).all())
    # The blocks cover every token once; the others are empty.
    assert len(starts) == total // block_size + len(offsets) - 1
    assert bool(((starts >= 0) & (ends - starts <= block_size) & (starts <= ends) & (ends <= total)).all())
    assert int((ends - starts).sum()) == total


@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (3, 128), (5, 130), (2, 1000)])
def test_without_offsets_each_row_is_a_document(batch: int, sequence: int):
    offsets = offsets_of(batch, sequence, None)
    for block_size in (64, 128):
        rows = make_layout(None, batch, sequence, block_size, offsets.device)
        for ours, theirs in zip(rows, make_layout(offsets, batch, sequence, block_size, offsets.device), strict=True):
            assert torch.equal(ours, theirs)


def rows_of(scores: torch.Tensor, begin: int, end: int, hidden: torch.Tensor) -> torch.Tensor:
    """Scores as the kernel has them, and a great one, to be chosen if it is read, where there is no visible block."""
    batch, proxies, sequence, count = scores.shape
    scores = scores.masked_fill(hidden, torch.inf)
    by_token = scores.permute(3, 0, 2, 1).reshape(count, batch * sequence, proxies)
    return by_token[:, begin:end].reshape(count, -1).contiguous()


def random_scores(kind: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.randn(shape, device="cuda", generator=generator)
    if kind == "ties":
        return scores.round()
    if kind == "constant":
        return torch.ones_like(scores)
    if kind == "ascending":
        return torch.arange(shape[-1], device="cuda", dtype=torch.float32).expand(shape).contiguous()
    if kind == "special":
        number = torch.randint(len(SPECIAL), shape, device="cuda", generator=generator)
        special = torch.tensor(SPECIAL, device="cuda")[number]
        return torch.where(torch.rand(shape, device="cuda", generator=generator) < 0.5, special, scores)
    return scores


def chosen(scores: torch.Tensor, offsets: torch.Tensor, block_size: int, slots: int, local: int, sink: int, *cuts: int):
    """The kernel's selection, by query ranges between the cuts."""
    batch, proxies, sequence, count = scores.shape
    first, starts, _ = make_layout(offsets, batch, sequence, block_size, offsets.device)
    own = layout(batch, sequence, block_size, offsets).block[:, None, :, None]
    hidden = torch.arange(count, device="cuda") > own
    blocks = torch.empty(batch, proxies, sequence, slots, dtype=torch.int32, device="cuda")
    bounds = sorted({0, *(min(cut, batch * sequence) for cut in cuts), batch * sequence})
    for begin, end in itertools.pairwise(bounds):
        rows = rows_of(scores, begin, end, hidden)
        choose(
            rows,
            first,
            starts,
            blocks,
            begin,
            end,
            block_size=block_size,
            num_local_blocks=local,
            num_sink_blocks=sink,
        )
    return blocks


@pytest.mark.parametrize("kind", ["random", "ties", "constant", "ascending", "special"])
@pytest.mark.parametrize("name", ["packed", "short", "lengths_one", "empty_ends", "random_3", "random_5"])
def test_the_choice_equals_the_plain_one(name: str, kind: str):
    batch, sequence, documents = CASES[name]
    offsets = offsets_of(batch, sequence, documents)
    scores = random_scores(kind, (batch, 4, sequence, num_blocks(sequence, 64)))
    for slots, local, sink in ((16, 1, 0), (5, 2, 1), (4, 0, 0), (4, 1, 3)):
        rule = {"top_k_blocks": slots, "num_local_blocks": local, "num_sink_blocks": sink}
        expected = select_from_scores(scores, block_size=64, cu_seqlens=offsets, **rule).blocks
        assert torch.equal(chosen(scores, offsets, 64, slots, local, sink, 33, 100), expected), (slots, local, sink)


@pytest.mark.parametrize("slots", range(1, 33))
def test_every_number_of_slots_over_many_blocks(slots: int):
    # Some rows see fewer blocks than slots, others so many that the chunks of scores come round several times.
    offsets = offsets_of(1, 64 * 150, None)
    scores = random_scores("special" if slots % 2 else "ties", (1, 2, 64 * 150, 150), slots)
    rules = [(1, 0), (slots // 3, slots // 4)] if slots % 5 == 0 else [(1, 0)]
    for local, sink in [*rules, (slots // 2, slots - slots // 2)] if slots in (1, 7, 32) else rules:
        expected = select_from_scores(
            scores, top_k_blocks=slots, block_size=64, num_local_blocks=local, num_sink_blocks=sink
        ).blocks
        assert torch.equal(chosen(scores, offsets, 64, slots, local, sink, 5000), expected), (local, sink)


def test_a_negative_zero_ties_with_zero_and_the_lower_block_wins():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 1.0]], device="cuda").expand(1, 1, 640, 5)
    blocks = chosen(scores, offsets_of(1, 640, None), 128, 3, 1, 0)
    assert blocks[0, 0, -1].tolist() == [0, 1, 4]


def test_a_nan_or_infinity_marks_a_block_as_absent_unless_forced():
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[nan, -inf, nan, inf, nan]], device="cuda").expand(1, 1, 640, 5)
    blocks = chosen(scores, offsets_of(1, 640, None), 128, 5, 1, 1)
    assert blocks[0, 0, -1].tolist() == [0, 3, 4, -1, -1]


def random_choice(kind: str, batch: int, sequence: int, proxies: int, slots: int, offsets, block_size: int):
    """`sink`: every query reads block 0; `few`: slots are empty; `stray`: so they are, or hold ids of later blocks."""
    scores = random_scores("random", (batch, proxies, sequence, num_blocks(sequence, block_size)), slots)
    rule = {"num_local_blocks": 0 if kind == "few" else 1, "num_sink_blocks": int(kind == "sink" and slots > 1)}
    if kind in ("few", "stray"):
        scores = scores.masked_fill(scores < 0.5, -torch.inf)
    blocks = select_from_scores(scores, top_k_blocks=slots, block_size=block_size, cu_seqlens=offsets, **rule).blocks
    if kind == "stray":
        later = layout(batch, sequence, block_size, offsets).block[:, None, :] + 1
        blocks[..., -1] = torch.where(blocks[..., -1] < 0, later, blocks[..., -1])
    return blocks


def check_index(blocks: torch.Tensor, offsets: torch.Tensor, block_size: int, window: int) -> None:
    batch, _, sequence, _ = blocks.shape
    first, starts, _ = make_layout(offsets, batch, sequence, block_size, offsets.device)
    index, rows = build(blocks, first, starts, window, block_size=block_size)
    own = grid_of(batch, sequence, offsets, block_size).block
    expected = plain_index(blocks, first, own, len(starts), window)
    assert torch.equal(index.task_ptr, expected.task_ptr)
    assert torch.equal(index.claims, expected.claims)
    edges, tasks = len(expected.edges), len(expected.tasks)
    assert torch.equal(index.edges[:edges], expected.edges)
    assert torch.equal(index.tasks[:tasks], expected.tasks)
    assert bool((index.edges[edges:] == UNWRITTEN).all())
    assert bool((index.tasks[tasks:] == UNWRITTEN).all())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rows, plain_rows(blocks, own), strict=True))


@pytest.mark.parametrize("kind", ["random", "sink", "few", "stray"])
@pytest.mark.parametrize("name", CASES)
def test_the_index_holds_every_remote_edge_once_and_in_order(name: str, kind: str):
    batch, sequence, documents = CASES[name]
    offsets = offsets_of(batch, sequence, documents)
    for proxies, slots, block_size, window in (
        (4, 16, 64, 1024),
        (2, 5, 128, 2048),
        (1, 32, 64, 4096),
        (16, 1, 64, 1024),
    ):
        check_index(
            random_choice(kind, batch, sequence, proxies, slots, offsets, block_size), offsets, block_size, window
        )


@pytest.mark.parametrize("window", [4096, 16384])
@pytest.mark.parametrize("kind", ["random", "sink"])
def test_the_index_at_16k_tokens(kind: str, window: int):
    offsets = offsets_of(1, 16384, None)
    check_index(random_choice(kind, 1, 16384, 4, 16, offsets, 128), offsets, 128, window)


def test_the_index_at_a_million_tokens():
    # Blocks of 64: counters and bits for 16385 of them, far beyond the shared memory that a kernel has unasked.
    total = 2**20
    offsets = offsets_of(1, total, None)
    own = torch.arange(total, dtype=torch.int32, device="cuda") // 64
    blocks = torch.stack([own * part // 5 for part in (1, 2, 3, 5)], -1)
    repeated = torch.zeros_like(blocks, dtype=torch.bool)
    repeated[:, 1:] = blocks[:, 1:] == blocks[:, :-1]
    blocks = blocks.masked_fill(repeated, UNWRITTEN).sort(-1).values
    blocks = blocks.masked_fill(blocks == UNWRITTEN, -1)[None, None].contiguous()
    check_index(blocks, offsets, 64, 65536)


def test_the_index_repeats_bit_for_bit_behind_other_work():
    offsets = offsets_of(1, 8192, None)
    blocks = random_choice("sink", 1, 8192, 4, 16, offsets, 128)
    first, starts, _ = make_layout(offsets, 1, 8192, 128, offsets.device)
    noise = torch.randn(2048, 2048, device="cuda")
    expected = [x for part in build(blocks, first, starts, 2048, block_size=128) for x in part]
    for repeat in range(50):
        for _ in range(repeat % 4):
            noise = (noise @ noise).clamp(-1, 1)
        again = [x for part in build(blocks, first, starts, 2048, block_size=128) for x in part]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, expected, strict=True))


def test_nothing_waits_for_the_device():
    offsets = offsets_of(2, 1024, None)
    rows = torch.randn(16, 2048 * 4, device="cuda")
    blocks = torch.empty(2, 4, 1024, 8, dtype=torch.int32, device="cuda")
    for repeat in range(2):  # the first time compiles
        torch.cuda.set_sync_debug_mode("error" if repeat else "default")
        try:
            first, starts, _ = make_layout(offsets, 1, 2048, 64, offsets.device)
            choose(rows, first, starts, blocks, 0, 2048, block_size=64)
            build(blocks, first, starts, 1024, block_size=64)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert Selection(blocks, 64).blocks.max() < 16

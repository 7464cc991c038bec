"""What the selection's plain kernels share with the host: the sorting network, and what is refused before a launch."""

import itertools
import random
import re

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from msa_kernels import cute, dispatch, msa_attention, reference, window_selection
from msa_kernels.cute.index import MOST_BLOCKS, build
from msa_kernels.cute.layout import row_alignment
from msa_kernels.cute.topk import choose, comparators
from msa_kernels.cute.windows import TILE, task_length


@pytest.mark.parametrize("count", range(1, 33))
def test_the_network_sorts(count: int):
    # A network that sorts all zeros and ones sorts everything.
    rng = random.Random(count)
    lists = (
        [list(values) for values in itertools.product((0, 1), repeat=count)]
        if count <= 10
        else [rng.choices((0, 1), weights=(share, 1 - share), k=count) for share in (0.1, 0.5, 0.9) for _ in range(300)]
    )
    pairs = comparators(count)
    assert all(low < high < count for low, high in pairs)
    for values in lists:
        expected = sorted(values)
        for low, high in pairs:
            values[low], values[high] = min(values[low], values[high]), max(values[low], values[high])
        assert values == expected


def test_lists_of_blocks_are_as_aligned_as_is_said():
    for slots in range(1, 33):
        assert slots * 4 % row_alignment(slots) == 0


def build_shapes(
    batch: int = 1, sequence: int = 2048, proxies: int = 4, slots: int = 16, size: int = 17, window: int = 1024
) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    build(empty(batch, proxies, sequence, slots), empty(batch * sequence), empty(size), window, block_size=128)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"window": 1000}, f"window=1000 must be a multiple of {TILE}, such as {1000 // TILE * TILE}"),
        ({"window": 5000}, f"window=5000 must be a multiple of {TILE}, such as {5000 // TILE * TILE}"),
        ({"window": 0}, f"window=0 must be a multiple of {TILE}, such as {TILE}"),
        ({"slots": 33}, "top_k_blocks=33 must be at most 32 here; use 32 or MSA_KERNELS=flex"),
        ({"size": MOST_BLOCKS + 1}, f"it must be at most {MOST_BLOCKS}"),
        ({"batch": 64, "sequence": 2**20}, "batch x sequence=67108864 must be below 67108864"),
        ({"batch": 32, "sequence": 2**20, "window": 2**20}, f"top_k_blocks=16 below {2**31}"),
        ({"sequence": 2**20, "size": 20000, "proxies": 16}, f"use {2**20}"),
        (
            {"batch": 3, "sequence": 2**20, "proxies": 32, "size": 24579, "window": 3 * 2**20},
            f"{3 * 2**20 // TILE * 32 * 24579} counts, one for {TILE} tokens, a proxy and a block; it must be below",
        ),
    ],
)
def test_an_index_that_cannot_be_built_is_refused(shapes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_shapes(**shapes)


def test_tasks_are_longer_where_there_are_enough_of_them():
    lengths = {tokens: task_length(tokens * 2**10 * 4 * 16) for tokens in (1, 4, 8, 12, 16, 32, 1024)}
    assert lengths == {1: 512, 4: 512, 8: 1088, 12: 1600, 16: 2048, 32: 2048, 1024: 2048}


def test_too_many_slots_are_refused():
    blocks = torch.empty(1, 4, 64, 33, dtype=torch.int32)
    first = starts = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="top_k_blocks=33 must be at most 32 here; use 32 or MSA_KERNELS=flex"):
        choose(torch.zeros(1, 256), first, starts, blocks, 0, 64, block_size=64)


def test_no_query_is_no_launch():
    blocks = torch.empty(1, 4, 64, 8, dtype=torch.int32)
    first = starts = torch.zeros(1, dtype=torch.int32)
    choose(torch.zeros(1, 0), first, starts, blocks, 7, 7, block_size=64)


def inputs(device: str = "cpu") -> list[torch.Tensor]:
    """q_proxy, k_proxy, q, k, v and the log-sum-exp of 256 tokens."""
    leaves = [torch.zeros(1, 256, n, 64, device=device) for n in (4, 1, 4, 2, 2)]
    return [*leaves, torch.zeros(1, 256, 4, device=device)]


WITH_OFFSETS = {
    "select_blocks": lambda x, cu: cute.select_blocks(*x[:2], top_k_blocks=2, cu_seqlens=cu),
    "sparse_attention": lambda x, cu: cute.sparse_attention(*x[2:5], chosen(x, cu)),
    "attention_and_kl": lambda x, cu: cute.attention_and_kl(*x[:5], chosen(x, cu)),
    "proxy_kl": lambda x, cu: cute.proxy_kl(*x[:4], x[5], chosen(x, cu)),
    "dense_attention": lambda x, cu: cute.dense_attention(*x[2:5], cu_seqlens=cu),
    "dense_attention without lse": lambda x, cu: cute.dense_attention(*x[2:5], cu_seqlens=cu, return_lse=False),
    "dense_proxy_kl": lambda x, cu: cute.dense_proxy_kl(*x[:4], x[5], cu_seqlens=cu),
    "msa_attention": lambda x, cu: msa_attention(*x[:5], top_k_blocks=2, cu_seqlens=cu, backend="cute"),
}


def chosen(given: list[torch.Tensor], cu_seqlens: torch.Tensor):
    selection = window_selection(1, 256, top_k_blocks=2, device=given[0].device)
    return selection._replace(cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("operation", WITH_OFFSETS)
@pytest.mark.parametrize("offsets", [[0, 300], [0, 128], [0, 128, 100, 256], [1, 256], []])
def test_offsets_of_no_documents_are_refused_as_by_the_reference(operation: str, offsets: list[int], monkeypatch):
    monkeypatch.setattr(dispatch, "_cute_obstacle", lambda *_: None)
    given, wrong = inputs(), torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens") as expected:
        reference.select_blocks(*given[:2], top_k_blocks=2, cu_seqlens=wrong)
    with pytest.raises(ValueError, match=re.escape(str(expected.value))):
        WITH_OFFSETS[operation](given, wrong)


@pytest.mark.parametrize("operation", WITH_OFFSETS)
def test_offsets_on_a_device_are_not_waited_for(operation: str, monkeypatch):
    monkeypatch.setattr(dispatch, "_cute_obstacle", lambda *_: None)
    monkeypatch.setattr(cute.library, "log_sum_exp", lambda q, *_: q[..., 0])
    for module, name in ((cute.library, "attend"), (cute.flex, "dense_attention")):
        monkeypatch.setattr(module, name, lambda q, *_, **__: (q, q[..., 0]))
    # Tensors without values: looking at one raises an error.
    given, wrong = inputs("meta"), torch.zeros(2, dtype=torch.int32, device="meta")
    WITH_OFFSETS[operation](given, wrong)
    with pytest.raises(ValueError, match=r"int64 .*must be int32"):
        WITH_OFFSETS[operation](given, wrong.long())

"""FLOPs that PyTorch's counter sees of the operations on Hopper, from shapes alone; no kernel runs."""

import pytest
import torch
from msa_kernels import window_selection
from msa_kernels.cute import ops
from torch.utils.flop_counter import FlopCounterMode

from msa_lab.budget import flops_per_token
from msa_lab.config_model import ModelConfig

HEADS, KV_HEADS, PROXIES, DIM, PROXY_DIM = 16, 2, 4, 128, 64


def counted(sequence: int, slots: int, block_size: int, batch: int = 1, documents: int = 0) -> dict[str, int]:
    """FLOPs of each operation."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device="meta")

    numbers = ((HEADS, DIM), (KV_HEADS, DIM), (PROXIES, PROXY_DIM), (1, PROXY_DIM))
    q, k, q_proxy, k_proxy = (empty(sequence, *number) for number in numbers)
    blocks = empty(PROXIES, sequence, slots, dtype=torch.int32)
    offsets = torch.empty(documents + 1, dtype=torch.int32, device="meta") if documents else None
    lse, student_lse = empty(sequence, HEADS), empty(sequence, PROXIES)
    proxies, main, about = (q_proxy, k_proxy), (q, k, k), (blocks, offsets, block_size)
    found = {}

    def count(name: str, operation, *given):
        with FlopCounterMode(display=False) as counter:
            result = operation(*given)
        found[name] = counter.get_total_flops()
        return result

    count("selection", ops.select_blocks, *proxies, offsets, slots, block_size, 1, 0)
    count("attention", ops.sparse_attention, *main, *about, None)
    count("lse", ops.selected_lse, q, k, *about)
    count("kl", ops.proxy_kl, *proxies, q, k, lse, *about, True)
    count("kl alone", ops.proxy_kl, *proxies, q, k, lse, *about, False)
    count("dense kl", ops.dense_proxy_kl, *proxies, q, k, lse, student_lse, offsets, True)
    out, _, *_, kept = count("step", ops.attention_and_kl, *proxies, *main, *about, 1024, True)
    count("gradients", ops.attention_gradients, *main, blocks, block_size, 1024, out, lse, out, kept)
    return found


def visible(sequence: int, slots: int, block_size: int) -> int:
    """Pairs of queries and keys, counted on a selection that lacks no block it has room for."""
    blocks = window_selection(1, sequence, top_k_blocks=slots, block_size=block_size).blocks
    keys = torch.minimum((blocks + 1) * block_size, torch.arange(1, sequence + 1)[:, None]) - blocks * block_size
    return int(keys[blocks >= 0].sum())


@pytest.mark.parametrize(("sequence", "pairs"), [(4096, 6_162_432), (8192, 14_290_944)])
def test_pairs_are_those_that_queries_see(sequence: int, pairs: int):
    assert counted(sequence, 16, 128)["attention"] == 4 * HEADS * DIM * pairs


@pytest.mark.parametrize("sequence", [1, 63, 64, 65, 300, 1000, 1024])
@pytest.mark.parametrize(("slots", "block_size"), [(1, 64), (3, 64), (4, 128), (7, 128), (8, 128), (9, 128), (32, 64)])
def test_pairs_are_counted_for_any_length_and_budget(sequence: int, slots: int, block_size: int):
    pairs = visible(sequence, slots, block_size)
    found = counted(sequence, slots, block_size, batch=3)
    assert found["attention"] == 3 * 4 * HEADS * DIM * pairs
    assert found["lse"] == 3 * 2 * HEADS * DIM * pairs
    assert found["gradients"] == 3 * 10 * HEADS * DIM * pairs
    assert found["kl"] == 3 * 2 * (HEADS * DIM + 3 * PROXIES * PROXY_DIM) * pairs
    assert found["kl alone"] == 3 * 2 * (HEADS * DIM + PROXIES * PROXY_DIM) * pairs
    assert found["step"] == found["attention"] + found["kl"]


def test_packed_documents_are_counted_as_whole_rows():
    assert counted(1000, 3, 128, batch=2, documents=5) == counted(1000, 3, 128, batch=2)


@pytest.mark.parametrize(("sequence", "slots"), [(4096, 16), (5000, 16), (1000, 32)])
def test_the_lab_counts_the_same_before_a_run(sequence: int, slots: int):
    config = ModelConfig(
        num_layers=1,
        num_query_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        num_proxies=PROXIES,
        proxy_dim=PROXY_DIM,
        top_k_blocks=slots,
    )
    sparse, warmup = (flops_per_token(config, sequence, phase=phase) for phase in ("sparse", "warmup"))
    found = counted(sequence, slots, config.block_size)
    for name, told in (
        ("selection", sparse.training.proxy_scoring),
        ("attention", sparse.forward.attention),
        ("kl", sparse.training.kl),
        ("dense kl", warmup.training.kl),
    ):
        assert found[name] == pytest.approx(told * sequence, rel=1e-12), name

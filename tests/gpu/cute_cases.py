"""Problems for the Hopper kernels on a GPU, and what their tests measure of a result.

The measure is the relative L2 error of each tensor: at most twice that of the reference in the same rounded inputs.
Random shapes have odd sizes, documents shorter than a block, and every grouping of heads, proxies and keys.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from msa_kernels.selection import Selection, random_selection, window_selection

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from msa_kernels import cute, reference
from msa_kernels.cute import dense, ops, windows

FLOAT_ERROR = 1e-5


class Case(NamedTuple):
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    sequence: int = 1024
    heads: int = 16
    kv_heads: int = 2
    proxies: int = 4
    proxy_kv_heads: int = 1
    dim: int = 128
    proxy_dim: int = 128
    block_size: int = 128
    top_k_blocks: int = 4
    local: int = 1
    sinks: int = 0
    documents: tuple[int, ...] | None = None


CASES = {
    "the_published_shape": Case(batch=2),
    "odd_length": Case(sequence=1003, heads=8),
    "one_token": Case(sequence=1),
    "shorter_than_a_block": Case(batch=3, sequence=100, top_k_blocks=1),
    "one_more_than_a_block": Case(sequence=129),
    "small_model": Case(batch=2, sequence=700, heads=8, dim=64, proxy_dim=64),
    "blocks_of_64": Case(batch=2, sequence=777, block_size=64, top_k_blocks=6),
    "blocks_of_64_and_dim_64": Case(sequence=777, block_size=64, dim=64, proxy_dim=64, heads=4),
    "fp16": Case(dtype=torch.float16, sequence=900),
    "group_1": Case(heads=4, kv_heads=4, proxies=4, proxy_kv_heads=4, sequence=500),
    "group_1_of_four_proxies_a_key_head": Case(heads=4, kv_heads=1, sequence=513),
    "group_2": Case(heads=8, kv_heads=2, proxies=4, proxy_kv_heads=2, sequence=640),
    "group_8": Case(heads=16, kv_heads=2, proxies=2, proxy_kv_heads=2, sequence=640),
    "group_16": Case(heads=16, kv_heads=1, proxies=1, sequence=640),
    "one_proxy_over_four_key_heads": Case(heads=16, kv_heads=4, proxies=1, sequence=700),
    "two_proxies_over_four_key_heads": Case(heads=16, kv_heads=4, proxies=2, proxy_kv_heads=2, sequence=700),
    "three_proxies": Case(heads=12, kv_heads=3, proxies=3, proxy_dim=64, sequence=300),
    "group_6": Case(heads=12, kv_heads=1, proxies=2, sequence=640),
    "k_1": Case(top_k_blocks=1, sequence=600),
    "k_32": Case(top_k_blocks=32, block_size=64, sequence=4000, heads=4, kv_heads=1, proxies=2),
    "k_beyond_the_blocks": Case(top_k_blocks=16, sequence=500),
    "nothing_forced": Case(local=0, sequence=900),
    "sinks_and_window": Case(local=2, sinks=1, top_k_blocks=5, sequence=1500),
    "documents": Case(batch=2, sequence=400, documents=(0, 37, 37, 300, 400, 401, 670, 800)),
    "many_documents": Case(
        batch=2, sequence=1000, block_size=64, documents=(*range(0, 1000, 7), 1000, 1000, 1128, 1129, 1500, 2000)
    ),
    "several_windows": Case(batch=2, sequence=3000, heads=4, kv_heads=2, top_k_blocks=6),
}
LEARNING = {name: case._replace(block_size=128) for name, case in CASES.items()}
"""The kernels of gradients and of the KL are for blocks of 128 tokens."""
TEACHING = {
    name: case for name, case in LEARNING.items() if case.heads // max(case.proxies, case.kv_heads) in cute.GROUPS
}
"""Attention repeats lists for a group that has no kernel of its own; the KL and the step refuse it."""
WRITTEN = ("the_published_shape", "documents", "several_windows", "k_beyond_the_blocks", "one_token", "fp16")
"""Cases that are run on memory that holds something else before."""


def cut(patch: pytest.MonkeyPatch) -> None:
    """From now on, work goes by windows of 1,024 queries, of which a forward pass of few heads takes two at a time."""
    patch.setattr(ops, "SCORE_BYTES", 2**16)
    patch.setattr(windows, "PARTIAL_BYTES", 2**24)
    patch.setattr(windows, "PART_BYTES", 2**16)
    patch.setattr(windows, "PART_SHARE", 0)
    patch.setattr(dense, "PART_BYTES", 2**22)


def cut_if_named(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> None:
    """One case, whatever the test, is cut into windows that are smaller than its rows."""
    if "several_windows" in request.node.name:
        cut(patch)


def poison(patch: pytest.MonkeyPatch) -> None:
    """From now on, memory that is asked for holds NaNs, or a number that is no index."""

    def poisoned(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args, **kwargs) -> torch.Tensor:
            tensor = plain(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

        return make

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, poisoned(getattr(owner, name)))


def inputs(case: Case, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """q_proxy, k_proxy, q, k, v and the documents' offsets."""
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = (case.proxies, case.proxy_kv_heads, case.heads, case.kv_heads, case.kv_heads)
    dims = (case.proxy_dim, case.proxy_dim, case.dim, case.dim, case.dim)
    tensors = [
        torch.randn(case.batch, case.sequence, number, dim, device="cuda", generator=generator).to(case.dtype)
        for number, dim in zip(heads, dims, strict=True)
    ]
    offsets = case.documents and torch.tensor(case.documents, dtype=torch.int32, device="cuda")
    return tensors, offsets


def random_case(seed: int) -> Case:
    """Any shape that has kernels for its gradients."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 1, 2, 3, 4])
    proxies = rng.choice([kv_heads, kv_heads, 2 * kv_heads, 4 * kv_heads, 1])
    batch, sequence = rng.choice([1, 1, 2, 3]), rng.randint(1, 1400)
    documents = None
    if rng.random() < 0.6:
        cuts = [rng.randint(0, batch * sequence) for _ in range(rng.choice([1, 5, 40]))]
        documents = tuple(sorted([*cuts, *range(0, batch * sequence + 1, sequence)]))
    return Case(
        dtype=rng.choice([torch.bfloat16, torch.float16]),
        batch=batch,
        sequence=sequence,
        heads=max(proxies, kv_heads) * rng.choice([1, 2, 4, 8, 16]),
        kv_heads=kv_heads,
        proxies=proxies,
        proxy_kv_heads=rng.choice([1, proxies]),
        dim=rng.choice([64, 128]),
        proxy_dim=rng.choice([64, 128]),
        top_k_blocks=rng.choice([1, 2, 3, 5, 8, 16, 31]),
        local=rng.choice([0, 1]),
        documents=documents,
    )


def rule(case: Case, offsets: torch.Tensor | None) -> dict:
    return {
        "top_k_blocks": case.top_k_blocks,
        "block_size": case.block_size,
        "cu_seqlens": offsets,
        "num_local_blocks": case.local,
        "num_sink_blocks": case.sinks,
    }


def chosen(case: Case, tensors: list[torch.Tensor], offsets: torch.Tensor | None) -> Selection:
    return cute.select_blocks(*tensors[:2], **rule(case, offsets))


KINDS = ("random", "window", "rows_without_blocks", "only_earlier_blocks")


def selection_of(kind: str, case: Case) -> Selection:
    """One that no proxy has chosen: of KINDS, or "nothing"."""
    keys = torch.arange(case.batch, device="cuda")
    selection = random_selection(case.batch, case.sequence, case.proxies, top_k_blocks=4, keys=keys)
    if kind == "window":  # one selection that all proxies share
        selection = window_selection(case.batch, case.sequence, top_k_blocks=4, device="cuda")
    elif kind == "rows_without_blocks":
        selection.blocks[:, 1, 100:400] = -1
    elif kind == "only_earlier_blocks":
        own = torch.arange(case.sequence, device="cuda", dtype=torch.int32)[:, None] // 128
        blocks = selection.blocks.masked_fill(selection.blocks == own, -1)
        selection = selection._replace(blocks=blocks.masked_fill(blocks < 0, 99).sort(-1).values)
        selection.blocks[selection.blocks == 99] = -1
    elif kind == "nothing":
        selection.blocks.fill_(-1)
    return selection


def upstream_of(q: torch.Tensor) -> torch.Tensor:
    """Random, and exact in every type that is tested."""
    generator = torch.Generator("cuda").manual_seed(9)
    return torch.randn(q.shape, device="cuda", generator=generator).bfloat16().half().to(q.dtype)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2, infinite if anything is not finite; where nothing but zeros is expected, relative to ones."""
    if not actual.isfinite().all():
        return float("inf")
    size = expected.norm() if expected.any() else actual.new_tensor(actual.numel(), dtype=torch.float64).sqrt()
    return ((actual.double() - expected).norm() / size.clamp(min=1e-30)).item()


def judge(name: str, errors: dict[str, tuple[float, float]]) -> None:
    """Print a case's errors, the reference's in brackets, and hold them to the measure."""
    print(f"\n{name}: " + ", ".join(f"{part} {a:.1e} ({b:.1e})" for part, (a, b) in errors.items()))
    wrong = {part: pair for part, pair in errors.items() if not pair[0] <= 2 * pair[1] + FLOAT_ERROR}
    assert not wrong, f"error and the reference's: {wrong}"


def finite_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 over what is finite; what is not must be equal."""
    finite = expected.isfinite()
    assert torch.equal(actual.double()[~finite], expected[~finite])
    return ((actual.double() - expected)[finite].norm() / expected[finite].norm().clamp(min=1e-30)).item()


def compare_outputs(name: str, tensors: list[torch.Tensor], selection: Selection) -> None:
    """Output and log-sum-exp of the kernels and of the reference, both against fp64."""
    truth = reference.sparse_attention(*[tensor.double() for tensor in tensors[2:]], selection)
    plain = reference.sparse_attention(*tensors[2:], selection)
    with torch.no_grad():
        ours = cute.sparse_attention(*tensors[2:], selection)
    assert ours[0].dtype == tensors[2].dtype
    assert ours[1].dtype == torch.float32
    parts = zip(("out", "lse"), ours, plain, truth, strict=True)
    judge(name, {part: (finite_error(a, t), finite_error(p, t)) for part, a, p, t in parts})


def repeat(times: int, run: Callable[[], list[torch.Tensor]]) -> None:
    """The same bits every time, with other work before."""
    noise = torch.randn(4096, 4096, device="cuda")
    first = None
    for i in range(times):
        if i % 3:
            noise = (noise @ noise).tanh()
        now = run()
        first = first or now
        assert [i for i, (a, b) in enumerate(zip(now, first, strict=True)) if not torch.equal(a, b)] == []


def never_waits_or_compiles(run: Callable[[list[torch.Tensor]], object]) -> None:
    """After the first shape, others are computed without waiting for the device, by the kernels that are there."""
    from msa_kernels.cute import compile as compiling

    known = 0
    for i, (batch, sequence) in enumerate([(1, 1024), (2, 700), (3, 1301)]):
        tensors, _ = inputs(Case(batch=batch, sequence=sequence))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if i else "default")
        try:
            run(tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        known = known if i else len(compiling._loaded)
        assert len(compiling._loaded) == known


def launches(run: Callable[[], object]) -> int:
    """What a call launches once it is warm."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def peak(run: Callable[[], object]) -> float:
    """GiB that a call takes above what is held before, once it is warm."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30

"""The Hopper kernels on a GPU: selection and sparse attention against the reference in fp64.

The measure is the relative L2 error of each tensor: at most twice that of the reference in the same rounded inputs.
Random shapes have odd sizes, documents shorter than a block, and every grouping of heads, proxies and keys.
"""

from typing import NamedTuple

import pytest
import torch
from msa_kernels import reference
from msa_kernels.selection import Selection, random_selection, window_selection

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from msa_kernels import cute
from msa_kernels.cute import ops

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


def rule(case: Case, offsets: torch.Tensor | None) -> dict:
    return {
        "top_k_blocks": case.top_k_blocks,
        "block_size": case.block_size,
        "cu_seqlens": offsets,
        "num_local_blocks": case.local,
        "num_sink_blocks": case.sinks,
    }


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 over what is finite; what is not must be equal."""
    finite = expected.isfinite()
    assert torch.equal(actual.double()[~finite], expected[~finite])
    return ((actual.double() - expected)[finite].norm() / expected[finite].norm().clamp(min=1e-30)).item()


@pytest.fixture(autouse=True)
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case, whatever the test, is cut into windows that are smaller than its rows."""
    if "several_windows" in request.node.name:
        monkeypatch.setattr(ops, "SCORE_BYTES", 2**16)
        monkeypatch.setattr(ops, "PARTIAL_BYTES", 2**16)


@pytest.mark.parametrize("name", CASES)
def test_selections_equal_the_reference_except_where_scores_tie_to_rounding(name: str):
    case = CASES[name]
    (q_proxy, k_proxy, *_), offsets = inputs(case)
    exact = reference.block_scores(
        q_proxy.double(), k_proxy.double(), block_size=case.block_size, cu_seqlens=offsets
    ).double()
    expected = reference.select_blocks(q_proxy, k_proxy, **rule(case, offsets)).blocks
    actual = cute.select_blocks(q_proxy, k_proxy, **rule(case, offsets)).blocks
    assert actual.shape == expected.shape
    assert actual.dtype == torch.int32
    assert torch.equal((actual >= 0).sum(-1), (expected >= 0).sum(-1))

    def chosen(blocks: torch.Tensor) -> torch.Tensor:
        return exact.gather(-1, blocks.clamp(min=0).long()).masked_fill(blocks < 0, 0).sort(-1).values

    torch.testing.assert_close(chosen(actual), chosen(expected), rtol=1e-5, atol=1e-5)
    different = (actual != expected).any(-1)
    print(f"\n{name}: {different.sum().item()} of {different.numel()} lists differ by a tie to rounding")
    assert different.double().mean() < 1e-3


@pytest.mark.parametrize("name", CASES)
def test_outputs(name: str):
    case = CASES[name]
    tensors, offsets = inputs(case)
    selection = cute.select_blocks(*tensors[:2], **rule(case, offsets))
    compare(name, tensors, selection)


def compare(name: str, tensors: list[torch.Tensor], selection: Selection) -> None:
    exact = [tensor.double() for tensor in tensors]
    truth = reference.sparse_attention(*exact[2:], selection)
    plain = reference.sparse_attention(*tensors[2:], selection)
    with torch.no_grad():
        ours = cute.sparse_attention(*tensors[2:], selection)
    errors = {
        part: (error(a, t), error(p, t)) for part, a, p, t in zip(("out", "lse"), ours, plain, truth, strict=True)
    }
    print(f"\n{name}: " + ", ".join(f"{part} {a:.1e} ({b:.1e})" for part, (a, b) in errors.items()))
    assert ours[0].dtype == tensors[2].dtype
    assert ours[1].dtype == torch.float32
    wrong = {part: pair for part, pair in errors.items() if not pair[0] <= 2 * pair[1] + FLOAT_ERROR}
    assert not wrong, f"error and the reference's: {wrong}"


@pytest.mark.parametrize("name", CASES)
def test_log_sum_exps_of_the_proxies_on_their_selection(name: str):
    case = CASES[name]
    (q_proxy, k_proxy, *_), offsets = inputs(case)
    selection = cute.select_blocks(q_proxy, k_proxy, **rule(case, offsets))
    ours = ops.selected_lse(q_proxy, k_proxy, selection.blocks, offsets, case.block_size)
    keys = k_proxy.double()
    _, truth = reference.sparse_attention(q_proxy.double(), keys, keys, selection)
    assert error(ours, truth) < FLOAT_ERROR


@pytest.mark.parametrize("kind", ["random", "window", "rows_without_blocks", "only_earlier_blocks"])
def test_any_selection_runs(kind: str):
    case = CASES["the_published_shape"]
    tensors, _ = inputs(case)
    keys = torch.arange(case.batch, device="cuda")
    selection = random_selection(case.batch, case.sequence, case.proxies, top_k_blocks=4, keys=keys)
    if kind == "window":
        selection = window_selection(case.batch, case.sequence, top_k_blocks=4, device="cuda")
    elif kind == "rows_without_blocks":
        selection.blocks[:, 1, 100:400] = -1
    elif kind == "only_earlier_blocks":
        own = torch.arange(case.sequence, device="cuda", dtype=torch.int32)[:, None] // 128
        blocks = selection.blocks.masked_fill(selection.blocks == own, -1)
        selection = selection._replace(blocks=blocks.masked_fill(blocks < 0, 99).sort(-1).values)
        selection.blocks[selection.blocks == 99] = -1
    compare(kind, tensors, selection)


def test_a_sink_that_every_query_chooses_is_cut_into_tasks():
    case = Case(sequence=8192, heads=8, kv_heads=1, proxies=1, top_k_blocks=3, sinks=1)
    tensors, offsets = inputs(case)
    compare("sink", tensors, cute.select_blocks(*tensors[:2], **rule(case, offsets)))


def test_scores_rank_infinite_and_absent_blocks_as_the_reference():
    case = Case(batch=2, sequence=900, top_k_blocks=3)
    (q_proxy, k_proxy, *_), _ = inputs(case)
    k_proxy[0, 130] = float("nan")
    k_proxy[1, 300, 0, 0] = float("inf")
    q_proxy[1, 700:, 2] = 0.0  # all scores tie
    expected = reference.select_blocks(q_proxy, k_proxy, **rule(case, None)).blocks
    actual = cute.select_blocks(q_proxy, k_proxy, **rule(case, None)).blocks
    assert not ((actual[0, :, 256:] == 1).any())
    assert torch.equal(actual[1, 2, 700:], expected[1, 2, 700:])
    assert (actual != expected).any(-1).double().mean() < 1e-3


def test_a_packed_document_gives_what_it_gives_alone_whatever_its_neighbours_hold():
    case = Case(sequence=900, documents=(0, 130, 517, 900))
    tensors, offsets = inputs(case)
    selection = cute.select_blocks(*tensors[:2], **rule(case, offsets))
    with torch.no_grad():
        out, lse = cute.sparse_attention(*tensors[2:], selection)
        alone = [tensor[:, 130:517].contiguous() for tensor in tensors]
        own = cute.select_blocks(*alone[:2], top_k_blocks=case.top_k_blocks)
        out_alone, lse_alone = cute.sparse_attention(*alone[2:], own)
    assert torch.equal(selection.blocks[:, :, 130:517], own.blocks)
    assert torch.equal(out[:, 130:517], out_alone)
    assert torch.equal(lse[:, 130:517], lse_alone)
    for tensor in tensors:
        tensor[:, 517:] = float("nan")
        tensor[:, :130] = float("nan")
    again = cute.select_blocks(*tensors[:2], **rule(case, offsets))
    with torch.no_grad():
        out, lse = cute.sparse_attention(*tensors[2:], again)
    assert torch.equal(again.blocks[:, :, 130:517], own.blocks)
    assert torch.equal(out[:, 130:517], out_alone)
    assert torch.equal(lse[:, 130:517], lse_alone)


@pytest.mark.parametrize("name", ["the_published_shape", "documents", "several_windows", "k_beyond_the_blocks"])
def test_every_element_is_written_whatever_memory_held_before(name: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    tensors, offsets = inputs(case)

    def run() -> list[torch.Tensor]:
        selection = cute.select_blocks(*tensors[:2], **rule(case, offsets))
        with torch.no_grad():
            return [selection.blocks, *cute.sparse_attention(*tensors[2:], selection)]

    plain = run()
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)
    for ours, theirs in zip(run(), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_500_repeats_are_bitwise_equal_with_other_work_before():
    case = Case(sequence=4096, top_k_blocks=8)
    tensors, offsets = inputs(case)
    noise = torch.randn(4096, 4096, device="cuda")
    first = None
    for i in range(500):
        if i % 3:
            noise = (noise @ noise).tanh()
        selection = cute.select_blocks(*tensors[:2], **rule(case, offsets))
        with torch.no_grad():
            now = [selection.blocks, *cute.sparse_attention(*tensors[2:], selection)]
        first = first or now
        assert [i for i, (a, b) in enumerate(zip(now, first, strict=True)) if not torch.equal(a, b)] == []


def test_a_step_never_waits_for_the_device_and_a_new_shape_never_compiles():
    from msa_kernels.cute import compile as compiling

    for i, (batch, sequence) in enumerate([(1, 1024), (2, 700), (3, 1301)]):
        case = Case(batch=batch, sequence=sequence)
        tensors, offsets = inputs(case)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if i else "default")
        try:
            selection = cute.select_blocks(*tensors[:2], **rule(case, offsets))
            with torch.no_grad():
                cute.sparse_attention(*tensors[2:], selection)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        known = known if i else len(compiling._loaded)
        assert len(compiling._loaded) == known


def test_select_and_attend_compile_into_one_graph():
    case = CASES["small_model"]
    tensors, _ = inputs(case)

    def step(q_proxy, k_proxy, q, k, v):
        selection = cute.select_blocks(q_proxy, k_proxy, top_k_blocks=4)
        return cute.sparse_attention(q, k, v, selection)

    with torch.no_grad():
        for ours, theirs in zip(torch.compile(step, fullgraph=True)(*tensors), step(*tensors), strict=True):
            assert torch.equal(ours, theirs)


def test_memory_and_launches_at_16k_tokens():
    case = Case(sequence=16384, top_k_blocks=16)
    tensors, offsets = inputs(case)

    def forward() -> None:
        selection = cute.select_blocks(*tensors[:2], **rule(case, offsets))
        with torch.no_grad():
            cute.sparse_attention(*tensors[2:], selection)

    forward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward()
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"\n16384 tokens: {len(launches)} launches, {peak:.2f} GiB above the inputs")
    assert len(launches) <= 20
    assert peak <= 1.2

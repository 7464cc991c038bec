"""The Hopper kernels on a GPU: selection and sparse attention against the reference in fp64."""

import pytest
import torch
from cute_cases import (
    CASES,
    FLOAT_ERROR,
    KINDS,
    Case,
    chosen,
    compare_outputs,
    cut_if_named,
    finite_error,
    inputs,
    launches,
    never_waits_or_compiles,
    peak,
    poison,
    repeat,
    rule,
    selection_of,
)
from msa_kernels import cute, reference
from msa_kernels.cute import ops


@pytest.fixture(autouse=True)
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_if_named(request, monkeypatch)


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
    selection = chosen(case, tensors, offsets)
    compare_outputs(name, tensors, selection)


@pytest.mark.parametrize("name", CASES)
def test_log_sum_exps_of_the_proxies_on_their_selection(name: str):
    case = CASES[name]
    (q_proxy, k_proxy, *_), offsets = inputs(case)
    selection = cute.select_blocks(q_proxy, k_proxy, **rule(case, offsets))
    ours = ops.selected_lse(q_proxy, k_proxy, selection.blocks, offsets, case.block_size)
    keys = k_proxy.double()
    _, truth = reference.sparse_attention(q_proxy.double(), keys, keys, selection)
    assert finite_error(ours, truth) < FLOAT_ERROR


@pytest.mark.parametrize("kind", KINDS)
def test_any_selection_runs(kind: str):
    case = CASES["the_published_shape"]
    tensors, _ = inputs(case)
    compare_outputs(kind, tensors, selection_of(kind, case))


def test_a_sink_that_every_query_chooses_is_cut_into_tasks():
    case = Case(sequence=8192, heads=8, kv_heads=1, proxies=1, top_k_blocks=3, sinks=1)
    tensors, offsets = inputs(case)
    compare_outputs("sink", tensors, chosen(case, tensors, offsets))


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
    selection = chosen(case, tensors, offsets)
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
    again = chosen(case, tensors, offsets)
    with torch.no_grad():
        out, lse = cute.sparse_attention(*tensors[2:], again)
    assert torch.equal(again.blocks[:, :, 130:517], own.blocks)
    assert torch.equal(out[:, 130:517], out_alone)
    assert torch.equal(lse[:, 130:517], lse_alone)


@pytest.mark.parametrize("name", CASES)
def test_every_element_is_written_whatever_memory_held_before(name: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    tensors, offsets = inputs(case)

    def run() -> list[torch.Tensor]:
        selection = chosen(case, tensors, offsets)
        with torch.no_grad():
            return [selection.blocks, *cute.sparse_attention(*tensors[2:], selection)]

    plain = run()
    poison(monkeypatch)
    for ours, theirs in zip(run(), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_500_repeats_are_bitwise_equal_with_other_work_before():
    case = Case(sequence=4096, top_k_blocks=8)
    tensors, offsets = inputs(case)

    def run() -> list[torch.Tensor]:
        selection = chosen(case, tensors, offsets)
        with torch.no_grad():
            return [selection.blocks, *cute.sparse_attention(*tensors[2:], selection)]

    repeat(500, run)


def test_a_forward_never_waits_for_the_device_and_a_new_shape_never_compiles():
    def run(tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            cute.sparse_attention(*tensors[2:], chosen(Case(), tensors, None))

    never_waits_or_compiles(run)


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
        selection = chosen(case, tensors, offsets)
        with torch.no_grad():
            cute.sparse_attention(*tensors[2:], selection)

    number, size = launches(forward), peak(forward)
    print(f"\n16384 tokens: {number} launches, {size:.2f} GiB above the inputs")
    assert number <= 20
    assert size <= 1.2

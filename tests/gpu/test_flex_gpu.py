"""The FlexAttention path on a GPU: against the reference in fp64, its memory, and that it repeats itself."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from flex_cases import CASES, FLOAT_ERROR, NAMES, Case, error, inputs, results
from msa_kernels import flex, msa_attention, reference
from msa_kernels.selection import Selection


@pytest.mark.parametrize("support", ["sparse", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, support: str):
    case = CASES[name]
    tensors, offsets = inputs(case)
    exact = [tensor.double() for tensor in tensors]
    selection = None
    if support == "sparse":
        selection = reference.select_blocks(
            *exact[:2], top_k_blocks=case.top_k_blocks, block_size=case.block_size, cu_seqlens=offsets
        )
    truth = results(reference, exact, selection, offsets)
    plain = results(reference, tensors, selection, offsets)
    ours = results(flex, tensors, selection, offsets)
    errors = {key: (error(ours[key], truth[key]), error(plain[key], truth[key])) for key in NAMES}
    print(f"\n{name} {support}: " + ", ".join(f"{key} {a:.1e} ({b:.1e})" for key, (a, b) in errors.items()))
    assert {key: ours[key].dtype for key in NAMES} == {key: plain[key].dtype for key in NAMES}
    # A NaN must fail, hence "not <=".
    wrong = {key: pair for key, pair in errors.items() if not pair[0] <= 2 * pair[1] + FLOAT_ERROR}
    assert not wrong, f"error and the reference's: {wrong}"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_without_gradients_the_outputs_are_the_same(name: str, compiled: bool):
    # Then nothing is kept for a backward pass, and the compiler may fuse what it otherwise has to store.
    case = CASES[name]
    tensors, offsets = inputs(case)
    options = {"top_k_blocks": case.top_k_blocks, "block_size": case.block_size, "cu_seqlens": offsets}

    def step(q_proxy, k_proxy, q, k, v):
        selection = flex.select_blocks(q_proxy, k_proxy, **options)
        out, lse = flex.sparse_attention(q, k, v, selection)
        return out, lse, flex.proxy_kl(q_proxy, k_proxy, q, k, lse, selection), selection.blocks

    with torch.no_grad():
        *ours, blocks = (torch.compile(step, fullgraph=True, dynamic=False) if compiled else step)(*tensors)
    with_gradients = results(flex, tensors, Selection(blocks, case.block_size, offsets), offsets)
    for name_, value in zip(NAMES, ours, strict=False):
        torch.testing.assert_close(value, with_gradients[name_], msg=name_)


@pytest.mark.parametrize("name", CASES)
def test_selections_equal_the_reference_except_where_scores_tie_to_rounding(name: str):
    case = CASES[name]
    (q_proxy, k_proxy, *_), offsets = inputs(case)
    options = {"block_size": case.block_size, "cu_seqlens": offsets}
    exact = reference.block_scores(q_proxy.double(), k_proxy.double(), **options)
    expected = reference.select_blocks(q_proxy, k_proxy, top_k_blocks=case.top_k_blocks, **options).blocks
    actual = flex.select_blocks(q_proxy, k_proxy, top_k_blocks=case.top_k_blocks, **options).blocks
    assert actual.dtype == torch.int32
    scores = flex.block_scores(q_proxy, k_proxy, **options)
    assert torch.equal(scores.isneginf(), exact.isneginf())
    finite = ~exact.isneginf()
    torch.testing.assert_close(scores[finite].double(), exact[finite].double(), rtol=1e-5, atol=1e-5)
    part = flex.block_scores(q_proxy, k_proxy, queries=(case.sequence // 3, case.sequence // 2), **options)
    torch.testing.assert_close(part, scores[:, :, case.sequence // 3 : case.sequence // 2], rtol=1e-5, atol=1e-5)

    assert torch.equal((actual >= 0).sum(-1), (expected >= 0).sum(-1))

    def chosen_scores(blocks):
        return exact.double().gather(-1, blocks.clamp(min=0).long()).masked_fill(blocks < 0, 0).sort(-1).values

    torch.testing.assert_close(chosen_scores(actual), chosen_scores(expected), rtol=1e-5, atol=1e-5)
    assert (actual != expected).any(-1).double().mean() < 1e-3


def test_rows_without_blocks_give_zero_and_count_in_no_mean():
    case = CASES["paper_like"]
    tensors, _ = inputs(case)
    blocks = flex.select_blocks(*tensors[:2], top_k_blocks=case.top_k_blocks).blocks
    blocks[:, 1, 100:400] = -1
    selection = Selection(blocks, 128)
    ours = results(flex, tensors, selection, None)
    truth = results(reference, [tensor.double() for tensor in tensors], selection, None)
    assert not ours["out"][:, 100:400, 2:4].any()
    assert not ours["dq"][:, 100:400, 2:4].any()
    assert error(ours["kl"], truth["kl"]) < FLOAT_ERROR
    assert all(error(ours[key], truth[key]) < 5e-3 for key in NAMES if key != "lse")


@pytest.fixture
def as_training_runs() -> Iterator[None]:
    """Deterministic mode as training sets it: no kernel is chosen by timing, nothing is filled before it is written."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with torch._inductor.config.patch(deterministic=True):
        yield
    torch.utils.deterministic.fill_uninitialized_memory = filling
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("support", ["sparse", "dense"])
def test_a_layer_of_a_30m_model_as_training_runs_it(support: str, as_training_runs: None):
    case = Case(torch.bfloat16, 2, 4096, 8, 2, 4, 1, 64, 64, 128, 4)
    tensors, _ = inputs(case)
    assert len({keys for _, _, keys in flex._chunks(0, 4096, 4096, 16, 2**28)}) == flex.KEY_LENGTHS
    selection = flex.select_blocks(*tensors[:2], top_k_blocks=4) if support == "sparse" else None
    if selection is not None:
        expected = reference.select_blocks(*tensors[:2], top_k_blocks=4).blocks
        assert (selection.blocks != expected).any(-1).double().mean() < 1e-3
    torch.use_deterministic_algorithms(False)  # which the reference's scatter_add does not do on a GPU
    truth = results(reference, [tensor.double() for tensor in tensors], selection, None)
    plain = results(reference, tensors, selection, None)
    torch.use_deterministic_algorithms(True)
    ours = results(flex, tensors, selection, None)
    again = results(flex, tensors, selection, None)
    assert [key for key in NAMES if not torch.equal(ours[key], again[key])] == []
    errors = {key: (error(ours[key], truth[key]), error(plain[key], truth[key])) for key in NAMES}
    wrong = {key: pair for key, pair in errors.items() if not pair[0] <= 2 * pair[1] + FLOAT_ERROR}
    assert not wrong, f"error and the reference's: {wrong}"


@pytest.mark.parametrize("support", ["sparse", "dense"])
def test_a_kl_near_zero_is_not_negative_beyond_rounding(support: str):
    # Teacher and student alike: each proxy serves one head and has its queries and keys.
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 1024, 4, 64, device="cuda", generator=generator).bfloat16()
    k, v = (torch.randn(2, 1024, 1, 64, device="cuda", generator=generator).bfloat16() for _ in range(2))
    if support == "sparse":
        selection = flex.select_blocks(q, k, top_k_blocks=4)
        kl = flex.proxy_kl(q, k, q, k, flex.sparse_attention(q, k, v, selection)[1], selection)
    else:
        kl = flex.dense_proxy_kl(q, k, q, k, flex.dense_attention(q, k, v)[1])
    assert kl.abs().max() < FLOAT_ERROR


def test_everything_repeats_bit_for_bit_and_is_allowed_where_only_deterministic_kernels_are():
    case = CASES["paper_like"]
    tensors, _ = inputs(case)
    torch.use_deterministic_algorithms(True)
    try:
        selection = flex.select_blocks(*tensors[:2], top_k_blocks=case.top_k_blocks)
        for _ in range(3):
            assert torch.equal(flex.select_blocks(*tensors[:2], top_k_blocks=4).blocks, selection.blocks)
        for chosen in (selection, None):
            first = results(flex, tensors, chosen, None)
            for _ in range(3):
                again = results(flex, tensors, chosen, None)
                assert [key for key in NAMES if not torch.equal(first[key], again[key])] == []
        q, k, v = tensors[2:]
        assert torch.equal(flex.dense_attention(q, k, v, return_lse=False)[0], flex.dense_attention(q, k, v)[0])
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_does_not_grow_with_the_square_of_the_length(monkeypatch: pytest.MonkeyPatch):
    # A chunk's share of the device is room for the square of a shorter sequence: here, only the fixed part of it.
    monkeypatch.setattr(flex, "CHUNK_SHARE", 0.0)
    case = CASES["paper_like"]._replace(batch=1, sequence=32768)
    tensors, _ = inputs(case)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    selection = flex.select_blocks(*tensors[:2], top_k_blocks=case.top_k_blocks)
    results(flex, tensors, selection, None)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"\npeak at 32768 tokens, 8 heads: {peak:.2f} GiB")
    # One mask of bytes is 1 GiB by itself; the chunks of the KL take 0.6.
    assert peak < 1.5


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.main = torch.nn.Linear(64, 256 + 128 + 128)
        self.proxy = torch.nn.Linear(64, 64 + 32)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 64)) for part in self.main(x).split([256, 128, 128], -1))
        q_proxy, k_proxy = (part.unflatten(-1, (-1, 32)) for part in self.proxy(x.detach()).split([64, 32], -1))
        out, kl, _ = msa_attention(
            q_proxy, k_proxy, q, k, v, top_k_blocks=3, block_size=64, cu_seqlens=offsets, backend="flex"
        )
        warm, lse = flex.dense_attention(q, k, v, cu_seqlens=offsets)
        warm_kl = flex.dense_proxy_kl(q_proxy, k_proxy, q, k, lse, cu_seqlens=offsets)
        return (out + warm).float().square().mean() + (kl + warm_kl).sum()


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_compiles_into_one_graph(packed: bool):
    torch.manual_seed(0)
    layer = Layer().cuda().bfloat16()
    parameters = tuple(layer.parameters())
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    for batch in (2, 1) if packed else (2,):
        x = torch.randn(batch, 300, 64, device="cuda", dtype=torch.bfloat16)
        offsets = torch.tensor([0, 70, 70, 300, 430, 600], dtype=torch.int32, device="cuda") if packed else None
        if batch == 1 and offsets is not None:
            offsets = offsets.clamp(max=300)
        expected = torch.autograd.grad(layer(x, offsets), parameters)
        actual = torch.autograd.grad(compiled(x, offsets), parameters)
        for ours, theirs in zip(actual, expected, strict=True):
            assert error(ours, theirs.double()) < 2e-2


FINGERPRINT = """
import hashlib
import torch, torch._inductor.config
torch.use_deterministic_algorithms(True)
torch._inductor.config.deterministic = True
from flex_cases import CASES, NAMES, inputs, results
from msa_kernels import flex
tensors, _ = inputs(CASES["paper_like"])
selection = flex.select_blocks(*tensors[:2], top_k_blocks=4)
digest = hashlib.sha256()
for chosen in (selection, None):
    values = results(flex, tensors, chosen, None)
    for name in NAMES:
        digest.update(values[name].contiguous().view(torch.uint8).cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def test_two_processes_with_cold_compile_caches_agree_bit_for_bit(tmp_path):
    processes = []
    for name in ("one", "two"):
        cache = str(tmp_path / name)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        }
        command = [sys.executable, "-c", FINGERPRINT]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [text[1][-1500:] for text in said]
    assert said[0][0].strip()
    assert said[0][0] == said[1][0]

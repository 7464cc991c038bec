"""Dense attention of the libraries: which one is taken, and what FlashAttention-4 is given and gives, by a stand-in."""

import contextlib
import itertools
import sys
import types

import pytest
import torch
from msa_kernels import cute, flex, reference
from msa_kernels.cute import library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

calls: list[bool] = []


def rows(cu_seqlens: torch.Tensor | None, tensors: tuple[torch.Tensor, ...], longest: int | None) -> list[tuple]:
    """The tensors of each document as (1, tokens, head, dim)."""
    for x in tensors:
        assert not x.requires_grad
    if cu_seqlens is None:
        assert {x.ndim for x in tensors} == {4}
        return [tuple(x[i : i + 1] for x in tensors) for i in range(len(tensors[0]))]
    assert {x.ndim for x in tensors} == {3}
    assert cu_seqlens.dtype == torch.int32
    assert longest is not None
    assert cu_seqlens.diff().max() <= longest
    ends = cu_seqlens.tolist()
    return [tuple(x[None, a:b] for x in tensors) for a, b in itertools.pairwise(ends) if a < b]


def forward(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, **named):
    """`_flash_attn_fwd` of flash_attn.cute 4.0.0b36, its layouts and its argument names, by the reference."""
    assert named.pop("causal") is True
    out, lse = named.pop("out"), named.pop("lse")
    assert not named
    assert cu_seqlens_k is cu_seqlens_q
    assert max_seqlen_k == max_seqlen_q
    assert lse.shape == ((q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1]))
    assert (out.shape, out.dtype, lse.dtype) == (q.shape, q.dtype, torch.float32)
    found = [reference.dense_attention(*x) for x in rows(cu_seqlens_q, (q, k, v), max_seqlen_q)]
    out.copy_(torch.cat([x for x, _ in found], int(q.ndim == 3)).view(out.shape))
    lses = [x.transpose(1, 2) for _, x in found]
    lse.copy_(torch.cat(lses, 2)[0] if q.ndim == 3 else torch.cat(lses))
    return out, lse


def gradients(q, k, v, dout) -> tuple[torch.Tensor, ...]:
    """Of attention in one row; autograd does not work inside of an operation."""
    share, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    by_head = [x.double().transpose(1, 2) for x in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2))]
    (q, k, v), do = by_head, dout.double().transpose(1, 2)
    scores = q @ k.mT * scale
    weights = torch.where(torch.ones_like(scores).tril().bool(), scores, -torch.inf).softmax(-1)
    dweights = do @ v.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale
    of_heads = [x.transpose(1, 2) for x in (dscores @ k, dscores.mT @ q, weights.mT @ do)]
    return of_heads[0], *(x.unflatten(2, (-1, share)).sum(3) for x in of_heads[1:])


def backward(q, k, v, out, dout, lse, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, **n):
    """`_flash_attn_bwd`, likewise."""
    assert n.pop("causal") is True
    calls.append(n.pop("deterministic"))
    again, exact = torch.empty_like(out), torch.empty_like(lse)
    documents = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    forward(q, k, v, causal=True, out=again, lse=exact, **documents, **lengths)
    assert torch.equal(again, out)
    assert torch.equal(exact, lse)
    assert dout.is_contiguous()
    parts = [gradients(*x) for x in rows(cu_seqlens_q, (q, k, v, dout), max_seqlen_q)]
    for name, *found in zip(("dq", "dk", "dv"), *parts, strict=True):
        n.pop(name).copy_(torch.cat(found, 1)[0] if q.ndim == 3 else torch.cat(found))
    assert not n


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FlashAttention-4 that runs on the CPU, and takes all that lies there."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    stand_in = types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(library, "_flash", lambda: stand_in)
    monkeypatch.setattr(library, "chosen", lambda *_: library.FLASH)
    calls.clear()


DOCUMENTS = (None, (0, 5, 5, 17, 34))


def tensors(*, requires_grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 17, heads, 64) for heads in (6, 2, 2)]
    return [torch.randn(x, generator=generator).bfloat16().requires_grad_(requires_grad) for x in shapes]


def offsets_of(documents: tuple[int, ...] | None) -> torch.Tensor | None:
    return None if documents is None else torch.tensor(documents, dtype=torch.int32)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_gets_and_gives_every_tensor_in_its_place(flash, documents, deterministic: bool):
    offsets, leaves = offsets_of(documents), tensors(requires_grad=True)
    torch.use_deterministic_algorithms(deterministic)
    try:
        out, lse = cute.dense_attention(*leaves, cu_seqlens=offsets)
    finally:
        torch.use_deterministic_algorithms(False)
    upstream = torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2)
    found = torch.autograd.grad(out, leaves, upstream)
    assert calls == [deterministic]
    expected, expected_lse = reference.dense_attention(*leaves, cu_seqlens=offsets)
    assert not lse.requires_grad
    assert (out.shape, lse.shape) == (expected.shape, expected_lse.shape)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_the_students_log_sum_exp(flash, documents):
    q, k, _ = tensors(requires_grad=True)
    offsets = offsets_of(documents)
    lse = library.log_sum_exp(q, k, offsets)
    assert not lse.requires_grad
    torch.testing.assert_close(lse, reference.dense_attention(q, k, k, cu_seqlens=offsets)[1].detach())


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_the_operation_keeps_what_operations_promise(flash, documents):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    given = *tensors(requires_grad=True), offsets_of(documents), True
    torch.library.opcheck(library.flash_attention, given, test_utils=checks)


def test_it_compiles_into_one_graph(flash):
    def step(q, k, v):
        out, lse = cute.dense_attention(q, k, v)
        return out.float().square().sum() + lse.sum(), lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        leaves = tensors(requires_grad=True)
        loss, lse = function(*leaves)
        results.append((loss, lse, *torch.autograd.grad(loss, leaves)))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


def test_flops_are_those_of_the_causal_half(flash):
    leaves = tensors(requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        cute.dense_attention(*leaves)[0].float().sum().backward()
    products = 2 * 2 * 6 * 17 * 17 * 64 // 2  # a multiply-add of a pair of tokens for every one of the causal half
    assert counter.get_total_flops() == products * (2 + 5)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Says what is installed."""

    def say(*, flash: bool, cudnn: bool) -> None:
        monkeypatch.setattr(library, "_flash", lambda: types.ModuleType("flash") if flash else "it is absent")
        monkeypatch.setattr(library, "_cudnn", lambda: None if cudnn else "it is old")

    return say


def choice(sequence: int = 1000, dtype=torch.bfloat16, dim: int = 128, value_dim: int = 128, documents=None) -> str:
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, sequence, n, d, dtype=dtype, device="cuda") for n, d in ((8, dim), (2, dim), (2, value_dim))
        )
        offsets = None if documents is None else torch.empty(documents + 1, dtype=torch.int32, device="cuda")
        return library.chosen(q, k, v, offsets)


def test_the_fastest_library_that_serves_is_chosen(installed):
    installed(flash=True, cudnn=True)
    assert choice() == choice(documents=125) == choice(sequence=1) == choice(sequence=1, documents=2) == library.FLASH
    assert choice(documents=126) == choice(sequence=1, documents=3) == library.FLEX
    installed(flash=False, cudnn=True)
    assert choice() == choice(dim=64, value_dim=64) == choice(dtype=torch.float16) == library.CUDNN
    assert choice(documents=2) == choice(sequence=1) == library.FLEX
    for flash in (False, True):
        installed(flash=flash, cudnn=True)
        assert choice(value_dim=64) == choice(dtype=torch.float32) == choice(dim=96, value_dim=96) == library.FLEX
        assert library.chosen(*tensors(), None) == library.FLEX
    installed(flash=False, cudnn=False)
    assert choice() == library.FLEX


def test_only_what_can_be_repeated_is_chosen_where_only_that_is_allowed(installed):
    torch.use_deterministic_algorithms(True)
    try:
        installed(flash=False, cudnn=True)
        assert choice() == library.FLEX
        assert "only deterministic algorithms are allowed" in library.describe()
        installed(flash=True, cudnn=True)
        assert choice() == library.FLASH
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_choice_is_part_of_a_compiled_graph_and_follows_the_mode(installed):
    installed(flash=False, cudnn=True)

    @torch.compile(fullgraph=True, backend="eager")
    def taken(x: torch.Tensor) -> torch.Tensor:
        return x + (library.flash_obstacle() is None) + 10 * (library.cudnn_obstacle() is None)

    assert taken(torch.zeros(1)) == 10
    torch.use_deterministic_algorithms(True)
    try:
        assert taken(torch.zeros(1)) == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_description_names_the_library_and_why_no_faster_one(installed):
    installed(flash=True, cudnn=True)
    assert library.describe() == "dense attention by FlashAttention-4"
    installed(flash=False, cudnn=True)
    start = "dense attention by "
    why = "; FlashAttention-4 does not serve: it is absent"
    assert library.describe() == f"{start}cuDNN, packed documents by flex{why}"
    installed(flash=False, cudnn=False)
    assert library.describe() == f"{start}flex{why}; cuDNN does not serve: it is old"


def test_a_library_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch):
    def found(**module: object) -> object:
        package = types.ModuleType("flash_attn.cute")
        package.interface = types.SimpleNamespace(**module)
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
        return library._flash.__wrapped__()

    working = found(_flash_attn_fwd=_like("_flash_attn_fwd"), _flash_attn_bwd=_like("_flash_attn_bwd"))
    assert isinstance(working, types.SimpleNamespace)
    assert "its _flash_attn_fwd has no cu_seqlens_q: another version" in found()
    older = found(_flash_attn_fwd=_like("_flash_attn_fwd"), _flash_attn_bwd=lambda q, causal: None)
    assert "its _flash_attn_bwd has no cu_seqlens_q: another version" in older
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert "flash_attn.cute cannot be imported (ModuleNotFoundError" in library._flash.__wrapped__()


def _like(function: str) -> object:
    names = ", ".join(library.ASKED[function])
    return eval(f"lambda {names}: None")


@pytest.mark.parametrize("shape", [(2, 6, 17), (2, 6, 17, 1)])
def test_cudnn_gets_and_gives_every_tensor_in_its_place(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    # PyTorch's versions differ in the log-sum-exp's last dimension.
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out: torch.Tensor) -> torch.Tensor:
            return out.clone()

        @staticmethod
        def backward(ctx, upstream: torch.Tensor) -> torch.Tensor:
            assert upstream.transpose(1, 2).is_contiguous()
            return upstream

    def forward(q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal):
        assert (attn_bias, compute_log_sumexp, dropout_p, is_causal) == (None, True, 0.0, True)
        out, lse = reference.dense_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return Backward.apply(out.transpose(1, 2)), lse.transpose(1, 2).contiguous().view(shape), None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", forward)
    monkeypatch.setattr(library, "chosen", lambda *_: library.CUDNN)
    leaves = tensors(requires_grad=True)
    found, expected = cute.dense_attention(*leaves), reference.dense_attention(*leaves)
    upstream = torch.randn_like(found[0]).transpose(1, 2).contiguous().transpose(1, 2)
    gradients = [torch.autograd.grad(out, leaves, upstream) for out, _ in (found, expected)]
    assert not found[1].requires_grad
    for ours, theirs in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(library.log_sum_exp(*leaves[:2], None), reference.dense_attention(*leaves[:2], leaves[1])[1])


def test_without_log_sum_exp_it_is_flash_or_what_pytorch_chooses(flash, monkeypatch: pytest.MonkeyPatch):
    asked, given = [], tensors()
    monkeypatch.setattr(flex, "dense_attention", lambda *_, **named: asked.append(named) or (None, None))
    out, lse = cute.dense_attention(*given, return_lse=False)
    assert lse is None
    assert torch.equal(out, cute.dense_attention(*given)[0])
    assert asked == []
    for name in (library.CUDNN, library.FLEX):
        monkeypatch.setattr(library, "chosen", lambda *_, name=name: name)
        assert cute.dense_attention(*given, return_lse=False) == (None, None)
    assert asked == 2 * [{"cu_seqlens": None, "return_lse": False}]

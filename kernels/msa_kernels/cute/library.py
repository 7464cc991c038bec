"""Dense attention with its log-sum-exp, for the warm-up and what is compared with it, by the fastest library.

That is FlashAttention-4 (`flash_attn.cute`) where it is installed, else cuDNN, else what `msa_kernels.flex` takes. The
choice goes by what is installed and by the inputs, never by trying. Both libraries add gradients in an order that
changes from run to run; where only deterministic algorithms are allowed, FlashAttention-4 keeps to one and cuDNN, which
cannot, is left out.
"""

import functools
import inspect
from types import ModuleType

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from msa_kernels import checks, flex

FLASH = "FlashAttention-4"
CUDNN = "cuDNN"
FLEX = "flex"
DIMS = (64, 128)
"""Of heads: those of the kernels here; the libraries take more."""
SHORTEST = 16
"""FlashAttention-4 pads each document to a tile: those that are shorter in the mean, empty ones at the end counted,
would take too much memory and are left to flex."""
ASKED = {
    "_flash_attn_fwd": ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "out", "lse"),
    "_flash_attn_bwd": ("cu_seqlens_q", "max_seqlen_q", "causal", "deterministic", "dq", "dk", "dv"),
}
"""Arguments of FlashAttention-4 that are passed by name: it is young, and other versions may have others."""


def attend(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    cu_seqlens: Int32[Tensor, "offsets"] | None,
) -> tuple[Float[Tensor, "batch sequence head value_dim"], Float32[Tensor, "batch sequence head"]]:
    """As `msa_kernels.reference.dense_attention`; the offsets lie on the device of q."""
    library = chosen(q, k, v, cu_seqlens)
    if library == FLASH:
        deterministic = torch.are_deterministic_algorithms_enabled()
        out, lse = flash_attention(q, k, v, cu_seqlens, deterministic)
        lse = lse if cu_seqlens is None else lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        return out, lse.transpose(1, 2).detach()
    if library == CUDNN:
        by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(*by_head, None, True, 0.0, True)[:2]
        lse = lse.view(q.shape[0], q.shape[2], q.shape[1])  # some versions of PyTorch have a last dimension of 1
        return _Settled.apply(out.transpose(1, 2)), lse.transpose(1, 2).detach()
    out, lse = flex.dense_attention(q, k, v, cu_seqlens=cu_seqlens)
    assert lse is not None
    return out, lse


def log_sum_exp(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    cu_seqlens: Int32[Tensor, "offsets"] | None,
) -> Float32[Tensor, "batch sequence head"]:
    """The log-sum-exp of `attend`, without gradient."""
    with torch.no_grad():
        if chosen(q, k, k, cu_seqlens) == FLEX:
            return flex.dense_student_lse(q, k, cu_seqlens)
        return attend(q, k, k, cu_seqlens)[1]


def chosen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> str:
    """The library that serves these: FLASH, CUDNN or FLEX."""
    batch, sequence, _, dim = q.shape
    if not (q.is_cuda and q.dtype in checks.HALF and v.shape[3] == dim and dim in DIMS):
        return FLEX
    long = cu_seqlens is None or (len(cu_seqlens) - 1) * SHORTEST <= batch * max(sequence, SHORTEST)
    if long and flash_obstacle() is None:
        return FLASH
    return CUDNN if cu_seqlens is None and sequence > 1 and cudnn_obstacle() is None else FLEX


def describe() -> str:
    """Which library serves dense attention that gives its log-sum-exp, and why no faster one does."""
    flash, cudnn = flash_obstacle(), cudnn_obstacle()
    who = FLASH if flash is None else f"{CUDNN}, packed documents by {FLEX}" if cudnn is None else FLEX
    why = [f"{name} does not serve: {reason}" for name, reason in ((FLASH, flash), (CUDNN, flash and cudnn)) if reason]
    return "; ".join([f"dense attention by {who}", *why])


@torch.compiler.assume_constant_result
def flash_obstacle() -> str | None:
    """Why FlashAttention-4 does not serve on this machine, or None."""
    found = _flash()
    return found if isinstance(found, str) else None


def cudnn_obstacle() -> str | None:
    """Why cuDNN does not serve now, or None."""
    if torch.are_deterministic_algorithms_enabled():  # compiled code notices a change of this
        return "its gradients differ from run to run, and only deterministic algorithms are allowed"
    return _cudnn()


@torch.compiler.assume_constant_result
def _cudnn() -> str | None:
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "torch.backends.cuda.enable_cudnn_sdp(False) switched it off"
    version = torch.backends.cudnn.version()
    if version is None:
        return "this PyTorch has no cuDNN"
    return None if version >= 90000 else f"PyTorch needs version 90000 at least, this is {version}"


class _Settled(torch.autograd.Function):
    """The identity, whose gradient has one layout.

    PyTorch keeps the plans that cuDNN makes for a layout, and looks them up by those of q, k and v alone: with another
    layout of the output's gradient it would take a plan that reads it wrongly.
    """

    @staticmethod
    def forward(ctx, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        return upstream.contiguous()


@functools.cache
def _flash() -> ModuleType | str:
    """FlashAttention-4's module, or why it does not serve."""
    try:
        from flash_attn.cute import interface
    except Exception as error:  # it builds on private parts of other packages, and fails in many ways where they moved
        return f"flash_attn.cute cannot be imported ({type(error).__name__}: {error})"
    for function, names in ASKED.items():
        has = getattr(interface, function, None)
        missing = [name for name in names if has is None or name not in inspect.signature(has).parameters]
        if missing:
            return f"its {function} has no {missing[0]}: another version than the 4.0.0b36 that this is written for"
    return interface


@torch.library.custom_op("msa_kernels::cute_flash_attention", mutates_args=())
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by FlashAttention-4: (batch, head, sequence), with documents (head, batch * sequence)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(_lse_shape(q, cu_seqlens), dtype=torch.float32, device=q.device)
    packed, documents = _packed(cu_seqlens, q, k, v, out)
    with torch.cuda.device(q.device):
        _interface()._flash_attn_fwd(*packed[:3], causal=True, out=packed[3], lse=lse, **documents)
    return out, lse


@flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, deterministic: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(_lse_shape(q, cu_seqlens), dtype=torch.float32)


@torch.library.custom_op("msa_kernels::cute_flash_attention_gradients", mutates_args=())
def flash_gradients(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the output of `flash_attention` to q, k and v."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    given, documents = _packed(cu_seqlens, q, k, v, out, upstream.contiguous())
    results, _ = _packed(cu_seqlens, dq, dk, dv)
    to = dict(zip(("dq", "dk", "dv"), results, strict=True))
    with torch.cuda.device(q.device):
        _interface()._flash_attn_bwd(*given, lse, causal=True, deterministic=deterministic, **to, **documents)
    return dq, dk, dv


@flash_gradients.register_fake
def _(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *given, ctx.deterministic = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given, *output)


def _backward(ctx, upstream: Tensor | None, _: Tensor | None) -> tuple:
    if upstream is None:
        return (None,) * 5
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    return *flash_gradients(upstream, q, k, v, out, lse, cu_seqlens, ctx.deterministic), None, None


flash_attention.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.msa_kernels.cute_flash_attention)
def _forward_flops(q: torch.Size, *_: object, **__: object) -> int:
    """Two for each multiply-add of the causal half: the scores and the weighted sums."""
    batch, sequence, heads, dim = q
    return 2 * batch * heads * sequence * sequence * dim


@register_flop_formula(torch.ops.msa_kernels.cute_flash_attention_gradients)
def _gradient_flops(upstream: torch.Size, *_: object, **__: object) -> int:
    """The same: the scores, the weights' gradients, and those of q, k and v."""
    return 5 * _forward_flops(upstream) // 2


def _interface() -> ModuleType:
    found = _flash()
    if isinstance(found, str):
        raise RuntimeError(f"FlashAttention-4 is asked for but does not serve here: {found}")
    return found


def _lse_shape(q: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    batch, sequence, heads, _ = q.shape
    return (batch, heads, sequence) if cu_seqlens is None else (heads, batch * sequence)


def _packed(cu_seqlens: Tensor | None, *tensors: Tensor) -> tuple[list[Tensor], dict[str, Tensor | int]]:
    """Tensors as FlashAttention-4 takes them, and its arguments for documents; nothing is copied that is contiguous."""
    tensors = tuple(x.detach() for x in tensors)
    if cu_seqlens is None:
        return list(tensors), {}
    offsets, longest = cu_seqlens.contiguous(), tensors[0].shape[1]
    documents = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return [x.flatten(0, 1) for x in tensors], documents

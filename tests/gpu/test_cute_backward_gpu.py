"""The Hopper kernels on a GPU: gradients of sparse attention against the reference in fp64, for one selection."""

import pytest
import torch
from cute_cases import (
    KINDS,
    LEARNING,
    WRITTEN,
    Case,
    chosen,
    cut,
    cut_if_named,
    error,
    inputs,
    judge,
    launches,
    never_waits_or_compiles,
    peak,
    poison,
    random_case,
    selection_of,
    upstream_of,
)
from msa_kernels import cute, flex, reference
from msa_kernels.selection import Selection


@pytest.fixture(autouse=True)
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_if_named(request, monkeypatch)


def gradients_of(path, tensors: list[torch.Tensor], selection: Selection, upstream: torch.Tensor) -> list[torch.Tensor]:
    """Of q, k and v."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out, _ = path.sparse_attention(*leaves, selection)
    return list(torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def error_of_rounding(tensors: list[torch.Tensor], selection: Selection, upstream: torch.Tensor) -> list[float]:
    """What the exact gradients of q and k lose where the method's row sums of `out x upstream` take the rounded output.

    That is the formula of every FlashAttention. The sums' errors e_i reach the gradients as sum_j e_i P_ij k_j and
    sum_i e_i P_ij q_i, so that they count where a row has nearly all weight on one key and its gradient is small.
    """
    q, k, v = (x.double().requires_grad_() for x in tensors)
    out, _ = reference.sparse_attention(q, k, v, selection)
    truth = torch.autograd.grad(out, (q, k), upstream.double(), retain_graph=True)
    sums = ((out - out.to(tensors[0].dtype).double()) * upstream.double()).sum(-1, keepdim=True)
    lost_q = sums * reference.sparse_attention(q, k, k, selection)[0]
    (lost_k,) = torch.autograd.grad(out, v, sums * q)
    lost = (x.norm() * q.shape[-1] ** -0.5 for x in (lost_q, lost_k))
    return [(x / exact.norm()).item() for x, exact in zip(lost, truth, strict=True)]


def compare(
    name: str,
    tensors: list[torch.Tensor],
    selection: Selection,
    upstream: torch.Tensor | None = None,
    *,
    rounded: bool = False,
) -> None:
    """`rounded`: of values on which the output's rounding decides, whose part of the error is allowed then."""
    upstream = upstream_of(tensors[0]) if upstream is None else upstream
    truth = gradients_of(reference, [x.double() for x in tensors], selection, upstream)
    plain = gradients_of(reference, tensors, selection, upstream)
    ours = gradients_of(cute, tensors, selection, upstream)
    assert [x.dtype for x in ours] == [x.dtype for x in tensors]
    assert [x.shape for x in ours] == [x.shape for x in tensors]
    errors = {
        part: (error(a, t), error(p, t)) for part, a, p, t in zip(("dq", "dk", "dv"), ours, plain, truth, strict=True)
    }
    if rounded:
        for part, lost in zip(("dq", "dk"), error_of_rounding(tensors, selection, upstream), strict=True):
            errors[part] = errors[part][0], max(errors[part][1], lost)
    judge(name, errors)


@pytest.mark.parametrize("name", LEARNING)
def test_gradients(name: str):
    case = LEARNING[name]
    tensors, offsets = inputs(case)
    compare(name, tensors[2:], chosen(case, tensors, offsets))


@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_random_shapes(seed: int):
    case = random_case(seed)
    tensors, offsets = inputs(case, seed)
    print(f"\n{case}")
    compare(str(seed), tensors[2:], chosen(case, tensors, offsets))


@pytest.mark.parametrize("kind", KINDS)
def test_any_selection_has_gradients(kind: str):
    case = LEARNING["the_published_shape"]
    tensors, _ = inputs(case)
    compare(kind, tensors[2:], selection_of(kind, case))


def test_a_selection_of_nothing_has_gradients_of_zero():
    case = LEARNING["the_published_shape"]
    tensors, _ = inputs(case)
    found = gradients_of(cute, tensors[2:], selection_of("nothing", case), upstream_of(tensors[2]))
    assert not any(x.any() for x in found)


def test_a_sink_that_every_query_chooses_is_cut_into_tasks():
    case = Case(sequence=8192, heads=8, kv_heads=1, proxies=1, top_k_blocks=3, sinks=1)
    tensors, offsets = inputs(case)
    compare("sink", tensors[2:], chosen(case, tensors, offsets))


def test_one_block_chosen_by_every_query_of_every_selection_and_no_other():
    case = Case(sequence=4096, heads=16, kv_heads=2, proxies=4, top_k_blocks=1)
    tensors, _ = inputs(case)
    blocks = torch.zeros(1, 4, case.sequence, 1, dtype=torch.int32, device="cuda")
    compare("one block", tensors[2:], Selection(blocks, 128))


@pytest.mark.parametrize("kind", ["duplicated_rows", "one_huge_score", "one_hot", "equal_scores", "large_upstream"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_difficult_values(kind: str, dtype: torch.dtype):
    case = Case(dtype=dtype, sequence=1100)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    q, k, v = tensors[2:]
    upstream = upstream_of(q)
    if kind == "duplicated_rows":
        q[:, 1::2], k[:, 1::2] = q[:, :-1:2], k[:, :-1:2]
    elif kind == "one_huge_score":
        q[:, 700], k[:, 5] = 3 * k[:, 5].repeat_interleave(8, 1), 10 * k[:, 5]
    elif kind == "one_hot":
        q *= 16
    elif kind == "equal_scores":
        q.zero_()
    elif kind == "large_upstream":
        upstream *= 128
    compare(f"{kind}, {dtype}", [q, k, v], selection, upstream, rounded=kind in ("one_huge_score", "one_hot"))


def test_documents_of_one_token():
    case = Case(batch=2, sequence=300, documents=(*range(200), 250, 300, *range(300, 601)))
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    compare("one token", tensors[2:], selection)
    dq, dk, _ = gradients_of(cute, tensors[2:], selection, upstream_of(tensors[2]))
    # One key alone has weight 1 whatever its score: what is left is rounding.
    assert dq[0, :199].abs().max() <= 1e-2
    assert dk[0, :199].abs().max() <= 4e-2


def test_a_packed_document_gets_what_it_gets_alone_whatever_its_neighbours_hold():
    case = Case(sequence=900, documents=(0, 130, 517, 900))
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    packed = gradients_of(cute, tensors[2:], selection, upstream)
    alone = [x[:, 130:517].contiguous() for x in tensors]
    own = cute.select_blocks(*alone[:2], top_k_blocks=case.top_k_blocks)
    expected = gradients_of(cute, alone[2:], own, upstream[:, 130:517].contiguous())
    for x in (*tensors[2:], upstream):
        x[:, 517:] = float("nan")
        x[:, :130] = float("nan")
    poisoned = gradients_of(cute, tensors[2:], selection, upstream)
    for a, b, c in zip(packed, expected, poisoned, strict=True):
        assert torch.equal(a[:, 130:517], b)
        assert torch.equal(c[:, 130:517], b)


@pytest.mark.parametrize("name", WRITTEN)
def test_every_element_is_written_whatever_memory_held_before(name: str, monkeypatch: pytest.MonkeyPatch):
    case = LEARNING[name]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    plain = gradients_of(cute, tensors[2:], selection, upstream)
    poison(monkeypatch)
    for ours, theirs in zip(gradients_of(cute, tensors[2:], selection, upstream), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_several_windows_change_nothing_but_roundings(monkeypatch: pytest.MonkeyPatch):
    case = Case(batch=2, sequence=2500, top_k_blocks=6, documents=(0, 900, 2500, 3000, 5000))
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    whole = gradients_of(cute, tensors[2:], selection, upstream)
    cut(monkeypatch)
    parts = gradients_of(cute, tensors[2:], selection, upstream)
    assert torch.equal(parts[0], whole[0])
    for a, b in zip(parts[1:], whole[1:], strict=True):
        assert error(a, b.double()) < 1e-3


def test_a_backward_never_waits_for_the_device_and_a_new_shape_never_compiles():
    def run(tensors: list[torch.Tensor]) -> None:
        leaves = [tensor.requires_grad_() for tensor in tensors[2:]]
        out, _ = cute.sparse_attention(*leaves, chosen(Case(), tensors, None))
        torch.autograd.backward(out, upstream_of(leaves[0]))

    never_waits_or_compiles(run)


def test_strided_inputs_and_upstreams_give_what_contiguous_ones_give():
    case = LEARNING["small_model"]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    plain = gradients_of(cute, tensors[2:], selection, upstream)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*tensors[2:], upstream)]
    leaves = [x.requires_grad_() for x in strided[:3]]
    out, _ = cute.sparse_attention(*leaves, selection)
    for ours, theirs in zip(torch.autograd.grad(out, leaves, strided[3]), plain, strict=True):
        assert torch.equal(ours, theirs)
    out, _ = cute.sparse_attention(*leaves, selection)
    expanded = torch.ones((), dtype=out.dtype, device="cuda").expand(out.shape)
    for gradient in torch.autograd.grad(out, leaves, expanded):
        assert gradient.isfinite().all()


def test_only_what_is_asked_for_is_computed_and_the_lse_has_no_gradient():
    case = LEARNING["small_model"]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    q, k, v = tensors[2:]
    out, lse = cute.sparse_attention(q, k, v, selection)
    assert not out.requires_grad
    out, lse = cute.sparse_attention(q, k.requires_grad_(), v, selection)
    assert out.requires_grad
    assert not lse.requires_grad
    (dk,) = torch.autograd.grad(out, k, upstream_of(q))
    assert torch.equal(dk, gradients_of(cute, tensors[2:], selection, upstream_of(q))[1])


def test_a_layer_compiles_into_one_graph_and_can_be_recomputed():
    case = LEARNING["small_model"]
    tensors, _ = inputs(case)
    selection = chosen(case, tensors, None)
    upstream = upstream_of(tensors[2])

    def step(q, k, v):
        return cute.sparse_attention(q, k, v, selection)[0]

    def recomputed(q, k, v):
        return torch.utils.checkpoint.checkpoint(step, q, k, v, use_reentrant=False)

    plain = gradients_of(cute, tensors[2:], selection, upstream)
    for run in (torch.compile(step, fullgraph=True), recomputed, torch.compile(recomputed)):
        leaves = [x.detach().clone().requires_grad_() for x in tensors[2:]]
        for ours, theirs in zip(torch.autograd.grad(run(*leaves), leaves, upstream), plain, strict=True):
            assert torch.equal(ours, theirs)


def test_blocks_of_64_keep_the_gradients_of_flex():
    case = Case(batch=2, sequence=777, block_size=64, top_k_blocks=6)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    found = [gradients_of(path, tensors[2:], selection, upstream) for path in (cute, flex)]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_memory_and_launches_of_a_backward_at_16k_tokens():
    case = Case(sequence=16384, top_k_blocks=16)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    leaves = [x.requires_grad_() for x in tensors[2:]]
    upstream = upstream_of(leaves[0])

    def step() -> None:
        out, _ = cute.sparse_attention(*leaves, selection)
        torch.autograd.grad(out, leaves, upstream)

    number, size = launches(step), peak(step)
    print(f"\n16384 tokens: {number} launches, {size:.2f} GiB above the inputs")
    assert number <= 24
    assert size <= 1.4

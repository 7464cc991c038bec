"""A whole training step by the op that shares one index, through autograd, against fp64 and against an op each."""

import torch
from cases import DOCUMENTS, Case, Problem, difference, problem, run, small_windows
from msa_kernels import cute, reference
from msa_kernels.selection import Selection
from torch import Tensor

CASES = [
    Case(),
    Case(heads=16, kv_heads=2, selections=4),
    Case(heads=8, kv_heads=4, selections=2, dim=64, proxy_dim=64),
    Case(heads=2, kv_heads=1, selections=2, documents=DOCUMENTS, batch=2, sequence=420, slots=3, proxy_heads=2),
    Case(heads=4, kv_heads=1, selections=2, dtype="float16", dim=64, proxy_dim=64),
    Case(heads=4, kv_heads=1, selections=1, proxies=2, proxy_heads=2, sequence=260),
    # Several tasks a block, and several windows.
    Case(heads=2, kv_heads=1, selections=1, dim=64, proxy_dim=64, sequence=2500, slots=4),
    Case(
        heads=2,
        kv_heads=1,
        selections=2,
        dim=64,
        proxy_dim=64,
        batch=2,
        sequence=1500,
        slots=4,
        documents=(0, 700, 1500, 1530, 3000),
    ),
    # Too many heads share a list: an op each.
    Case(heads=32, kv_heads=1, selections=1, proxies=2, sequence=200),
]
MOST = {"out": 6e-3, "value": 1e-4, "dq_proxy": 8e-3, "dk_proxy": 8e-3, "dq": 6e-3, "dk": 6e-3, "dv": 6e-3}


def results(step, given: Problem, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Output, value and all gradients, each proxy's KL with a weight of its own."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, value = step(*leaves, given.selection)
    weights = torch.arange(1, len(value) + 1, dtype=value.dtype)
    found = torch.autograd.grad((out, value), leaves, (given.upstream.to(out.dtype), weights))
    return dict(zip(MOST, (out.detach(), value.detach(), *found), strict=True))


def apart(q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, selection: Selection, path=cute) -> tuple:
    out, lse = path.sparse_attention(q, k, v, selection)
    return out, path.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)


def check(case: Case, seed: int) -> dict:
    given = problem(case, seed)
    tensors = [given.q_proxy, given.k_proxy, given.q, given.k, given.v]

    def exactly(*leaves) -> tuple:
        return apart(*leaves, path=reference)

    exact = results(exactly, given, [x.double() for x in tensors])
    with small_windows(case):
        ours = results(cute.attention_and_kl, given, tensors)
        others = results(apart, given, tensors)
    found = {name: (difference(ours[name], exact[name]), most) for name, most in MOST.items()}
    # The KL alone may have other windows, and so other orders of sums.
    windows = case.sequence * case.batch > 2600
    same = [name for name in MOST if not (windows and name in ("value", "dq_proxy", "dk_proxy"))]
    found["others"] = float(sum(not torch.equal(ours[name], others[name]) for name in same)), 0.0
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(check, CASES, lambda: CASES)

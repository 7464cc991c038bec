"""The same bits whatever the order of events or comes later, and no NaN from one document in another."""

import sys

import torch
from cases import Case, here, problem
from msa_kernels import reference
from msa_kernels.cute import dense, ops

import emulator

DOCUMENTS = (0, 200, 333, 334, 600)
CASES = [
    Case(heads=4, kv_heads=2, selections=2, sequence=600, slots=3, documents=DOCUMENTS),
    Case(heads=2, kv_heads=2, selections=1, sequence=600, slots=2, documents=DOCUMENTS, dim=64, proxy_dim=64),
    Case(heads=16, kv_heads=1, selections=1, sequence=600, slots=2, documents=DOCUMENTS, dtype="float16"),
]
SEEDS = 4
WINDOW = 1024
POISONED = 1, 3
"""Documents that are NaN."""
LATER = 300
"""The first token of those that change."""


def results(case: Case, seed: int, *, poisoned: bool = False) -> dict[str, torch.Tensor]:
    given = problem(case, 0)
    q, k, v, upstream, q_proxy, k_proxy, selection = given
    exact, lse = reference.sparse_attention(q.double(), k.double(), v.double(), selection)
    _, every = reference.dense_attention(q.double(), k.double(), v.double(), cu_seqlens=selection.cu_seqlens)
    _, student = reference.dense_attention(
        q_proxy.double(), k_proxy.double(), k_proxy.double(), cu_seqlens=selection.cu_seqlens
    )
    out, lse, every, student = exact.to(q.dtype), lse.float(), every.float(), student.float()
    if poisoned:
        for document in POISONED:
            for x in (q, k, v, upstream, q_proxy, k_proxy, out, lse, every, student):
                x[:, case.documents[document] : case.documents[document + 1]] = float("nan")
    about = selection.blocks, selection.cu_seqlens, case.block_size
    with here(), emulator.installed(seed=seed):
        *step, kept = ops.attention_and_kl(q_proxy, k_proxy, q, k, v, *about, WINDOW, True)
        found = dict(zip(("out", "lse", "value", "dq_proxy", "dk_proxy"), step, strict=True))
        main = q, k, v, about[0], case.block_size, WINDOW, out, lse, upstream, kept
        found |= dict(zip(("dq", "dk", "dv"), ops.attention_gradients(*main), strict=True))
        kl = dense.dense_divergence(q_proxy, k_proxy, q, k, every, student, selection.cu_seqlens, with_gradients=True)
        found |= dict(zip(("dense value", "dense dq", "dense dk"), kl, strict=True))
    return found


def forward(case: Case, *, changed: bool) -> dict[str, torch.Tensor]:
    """Results of the tokens before LATER, in a row that is one document."""
    given = problem(case._replace(documents=None), 0)
    q, k, v, _, q_proxy, k_proxy, selection = given
    if changed:
        for x in (q, k, v, q_proxy, k_proxy):
            x[:, LATER:] *= -100
    with here(), emulator.installed(seed=1):
        out, lse = ops.sparse_attention(q, k, v, selection.blocks, None, case.block_size, None)
        # No block is forced: a query's own one has later keys.
        blocks = ops.select_blocks(q_proxy, k_proxy, None, case.slots, case.block_size, 0, 0)
    return {"out": out[:, :LATER], "lse": lse[:, :LATER], "blocks": blocks[:, :, :LATER]}


def main() -> None:
    faults = 0
    for case in CASES:
        first = results(case, 0)
        differ = {
            name
            for seed in range(1, SEEDS)
            for name, x in results(case, seed).items()
            if not torch.equal(x, first[name])
        }
        print(case, "depends on the order of events:", sorted(differ) or "nothing", flush=True)
        clean = [d for d in range(len(DOCUMENTS) - 1) if d not in POISONED]
        poisoned = results(case, 1, poisoned=True)
        leaks = {
            name
            for name, x in poisoned.items()
            if "value" not in name
            for d in clean
            if not torch.equal(x[:, DOCUMENTS[d] : DOCUMENTS[d + 1]], first[name][:, DOCUMENTS[d] : DOCUMENTS[d + 1]])
        }
        print(case, "NaNs of other documents reach:", sorted(leaks) or "nothing", flush=True)
        before, after = (forward(case, changed=changed) for changed in (False, True))
        early = [name for name, x in before.items() if not torch.equal(x, after[name])]
        print(case, "later tokens reach:", early or "nothing", flush=True)
        faults += bool(differ) + bool(leaks) + bool(early)
    print(f"{faults} faults")
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""What the first calls of a process cost, where the kernels are on disk already: run it twice, read the second.

python kernels/benchmarks/first_call.py
"""

import time

import torch
from msa_kernels import msa_attention, select_blocks

SEQUENCE, DIM = 4096, 128


def tensor(heads: int) -> torch.Tensor:
    return torch.randn(1, SEQUENCE, heads, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def seconds(began: float) -> float:
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    q_proxy, k_proxy, q, k, v = (tensor(heads) for heads in (4, 1, 16, 2, 2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    selection = select_blocks(q_proxy, k_proxy, top_k_blocks=16, block_size=128, backend="cute")
    selected = seconds(began)
    step = msa_attention(q_proxy, k_proxy, q, k, v, selection=selection, with_kl=True, backend="cute")
    forward = seconds(began)
    assert step.kl is not None
    (step.out.float().square().sum() + step.kl.sum()).backward()
    total = seconds(began)
    parts = {"select": selected, "forward": forward - selected, "backward": total - forward, "all": total}
    print(", ".join(f"{name} {part:.2f} s" for name, part in parts.items()))


if __name__ == "__main__":
    main()

"""Small problems for the emulator, and how results are compared with those in fp64."""

import argparse
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import NamedTuple
from unittest import mock

import torch
from msa_kernels.cute import windows
from msa_kernels.selection import Selection, random_selection
from torch import Tensor

import emulator


class Case(NamedTuple):
    """A problem: numbers of heads and so on, and documents if there are any (offsets of batch x sequence)."""

    heads: int = 4
    kv_heads: int = 2
    selections: int = 2
    dim: int = 128
    dtype: str = "bfloat16"
    batch: int = 1
    sequence: int = 300
    slots: int = 2
    documents: tuple[int, ...] | None = None
    block_size: int = 128
    proxies: int = 0
    """0: as many as selections."""
    proxy_heads: int = 1
    proxy_dim: int = 128
    local: int = 1
    sinks: int = 0

    def __str__(self) -> str:
        changed = {k: v for k, v in self._asdict().items() if v != Case._field_defaults[k] or k == "heads"}
        return ",".join(f"{k}={v}" for k, v in changed.items()).replace(" ", "")


DOCUMENTS = (0, 1, 1, 140, 420, 421, 500, 840)


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    q_proxy: Tensor
    k_proxy: Tensor
    selection: Selection


def problem(case: Case, seed: int = 0) -> Problem:
    """Random tensors, and a random selection with rows that lack their own block, or everything."""
    make = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    proxies = case.proxies or case.selections

    def random(heads: int, dim: int) -> Tensor:
        return torch.randn(case.batch, case.sequence, heads, dim, generator=make).to(dtype)

    offsets = None if case.documents is None else torch.tensor(case.documents, dtype=torch.int32)
    keys = torch.arange(case.batch) + seed
    selection = random_selection(
        case.batch, case.sequence, case.selections, top_k_blocks=case.slots, keys=keys, cu_seqlens=offsets,
        block_size=case.block_size,
    )  # fmt: skip
    blocks = selection.blocks.clone()
    # Some rows lack their last block, which is most often their own, and some have none.
    count = (blocks >= 0).sum(-1)
    kind = torch.randint(0, 20, count.shape, generator=make)
    last = torch.arange(case.slots) == (count - 1)[..., None]
    blocks[last & (kind < 4)[..., None]] = -1
    blocks[kind == 5] = -1
    selection = selection._replace(blocks=blocks)
    q, k, v = random(case.heads, case.dim), random(case.kv_heads, case.dim), random(case.kv_heads, case.dim)
    upstream, q_proxy = random(case.heads, case.dim), random(proxies, case.proxy_dim)
    return Problem(q, k, v, upstream, q_proxy, random(case.proxy_heads, case.proxy_dim), selection)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative to all of it; NaN if ours has any that theirs has not."""
    ours, theirs = ours.double(), theirs.double()
    same = ours.isinf() & (ours == theirs)
    ours, theirs = ours.masked_fill(same, 0), theirs.masked_fill(same, 0)
    return float((ours - theirs).detach().norm() / theirs.detach().norm().clamp(min=1e-30))


NAMES = {
    "num_heads": "heads", "num_kv_heads": "kv_heads", "num_selections": "selections", "dim": "dim", "dtype": "dtype",
    "block_size": "block_size", "proxy_dim": "proxy_dim", "num_proxies": "proxies", "num_proxy_kv_heads": "proxy_heads",
}  # fmt: skip
"""Fields of kernels and of cases."""


def of_variants(kernels: Iterable) -> list[Case]:
    """A case for each variant of a kernel, with a tail and a short document."""
    numbers = [{NAMES[f.name]: getattr(one, f.name) for f in fields(one) if f.name in NAMES} for one in kernels]
    return list(dict.fromkeys(Case(**one, slots=3, documents=(0, 270, 300)) for one in numbers))


def run(
    check: Callable[[Case, int], dict[str, tuple[float, float]]],
    cases: Iterable[Case],
    variants: Callable[[], Iterable[Case]],
) -> None:
    """The command line of a check: cases, seeds; a line each. A check gives differences and what they may be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", type=int)
    parser.add_argument("--variants", action="store_true", help="a case for each variant that is compiled")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--case", help="fields as a dict's arguments: heads=4,dim=64")
    options = parser.parse_args()
    chosen = [eval(f"Case({options.case})")] if options.case else list(variants() if options.variants else cases)
    faults = 0
    for number, case in enumerate(chosen):
        if options.only and number not in options.only:
            continue
        for seed in range(options.seed, options.seed + options.seeds):
            began, before = time.time(), emulator.library().emulator_instructions()
            try:
                with here(), emulator.installed(seed=seed, trace=options.trace):
                    found = check(case, seed)
            except Exception as error:
                faults += 1
                text = str(error) if isinstance(error, RuntimeError) else traceback.format_exc()
                print(f"{number} seed {seed} {case}: FAULT {text}", flush=True)
                continue
            wrong = [name for name, (value, most) in found.items() if not value <= most]
            faults += bool(wrong)
            values = " ".join(f"{name} {value:.1e}" for name, (value, _) in found.items())
            done = (emulator.library().emulator_instructions() - before) / 1e6
            print(f"{number} seed {seed} {case}: {values} {time.time() - began:.1f} s, {done:.1f} M instructions"
                  f"{' WRONG: ' + ' '.join(wrong) if wrong else ''}", flush=True)  # fmt: skip
    print(f"{faults} faults")
    if faults:
        sys.exit(1)


@contextlib.contextmanager
def small_windows(case: Case) -> Iterator[None]:
    """Rows of the index have several tasks, some of them of several tiles of queries.

    Problems of 3,000 tokens are cut into windows, most of which a forward pass takes two at a time.
    """
    changes = {"SHORTEST": 96, "LONGEST": 448, "TASKS": 40}
    if case.sequence * case.batch > 2600:
        partial = 2048 * case.heads * case.slots * (case.dim * 2 + 4)
        changes |= {"PART_BYTES": 2**20, "PART_SHARE": 0, "PARTIAL_BYTES": partial}
    with mock.patch.multiple(windows, **changes):
        yield


@contextlib.contextmanager
def here():
    """The host code's way to a device, on the CPU."""
    with mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()):
        yield

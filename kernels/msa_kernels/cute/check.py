"""Compile every kernel for Hopper, with or without a GPU, and look at what comes out.

    python -m msa_kernels.cute.check
    python -m msa_kernels.cute.check --only scores attend --first

For each function: registers of a thread as it starts, shared memory of a thread block (what the launch asks for
included; "run time" where that depends on the call), bytes of local memory, and tensor-core instructions. A kernel
fails if a thread keeps anything in local memory (what the registers could not hold, or an array that is indexed at run
time), if its shared memory is more than an SM gives, if ptxas says that it had to put the tensor-core instructions in
sequence or could not follow them (its remarks C75xx), or if it belongs to a module of tensor-core kernels and has none.

What was found is kept beside the compiled kernels (see `msa_kernels.cute.compile`), by everything that decides it: an
unchanged kernel is not compiled again.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from msa_kernels.cute import compile as compiling

MODULES = ("layout", "topk", "index", "scores", "attend", "merge", "backward", "kl", "sums")
"""Those with kernels; each has `variants()`, the kernels to compile."""
TENSOR_CORES = ("scores", "attend", "merge", "backward", "kl")
"""Those whose kernels are pointless without wgmma."""
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a thread block can have on sm_90."""
SHARED_RESERVED = 1024
"""Bytes that the system takes beside those, counted in a cubin."""
REGISTERS, FRAME = 0x2F, 0x11
"""Of the attributes in a cubin's .nv.info: registers of a function, bytes of its local memory."""
LAUNCH = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
"""cudaLaunchConfig_t; its third field is the dynamic shared memory."""


@dataclass(frozen=True)
class Function:
    """What a kernel's function was compiled to."""

    name: str
    registers: int
    shared: int | None
    """Bytes; None where the call decides."""
    local: int
    """Bytes a thread keeps outside its registers."""
    wgmma: int
    """Tensor-core instructions in the PTX."""


@dataclass(frozen=True)
class Finding:
    """One kernel: its functions, and what ptxas complained about."""

    kernel: str
    functions: tuple[Function, ...]
    remarks: tuple[str, ...]
    seconds: float

    def faults(self, tensor_cores: bool) -> list[str]:
        """Why this kernel must not be used as it is."""
        found = list(self.remarks)
        for function in self.functions:
            if function.local:
                found.append(f"{function.name}: {function.local} bytes of local memory a thread")
            if (function.shared or 0) > SHARED_LIMIT:
                found.append(f"{function.name}: {function.shared} bytes of shared memory, {SHARED_LIMIT} are there")
        if tensor_cores and not any(function.wgmma for function in self.functions):
            found.append("no wgmma instruction")
        return found


def variants(modules: Iterable[str] = MODULES) -> dict[str, list[compiling.Kernel]]:
    """The kernels of each module."""
    return {name: importlib.import_module(f"msa_kernels.cute.{name}").variants() for name in modules}


def examine(kernel: compiling.Kernel) -> Finding:
    """Compile the kernel, or read what an earlier check of exactly this one found."""
    kept = compiling.folder() / f"{type(kernel).__name__}-{compiling.identity(kernel)[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(kept.read_text())
        functions = tuple(Function(**one) for one in found["functions"])
        return Finding(found["kernel"], functions, tuple(found["remarks"]), found["seconds"])
    finding = _compile(kernel)
    with contextlib.suppress(OSError):
        compiling.write(kept, json.dumps(asdict(finding)).encode())
    return finding


def _attempt(kernel: compiling.Kernel) -> Finding:
    try:
        return examine(kernel)
    except Exception as error:  # whatever a compiler raises is this kernel's fault, and the others are still looked at
        return Finding(str(kernel), (), (f"{type(error).__name__}: {error}",), 0.0)


def _compile(kernel: compiling.Kernel) -> Finding:
    began = time.perf_counter()
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as scratch:
        options = f"--keep-cubin --keep-ptx --dump-dir={scratch} remarks{{ptx}}"
        with contextlib.redirect_stderr(said), _no_positions():
            compiled = compiling.compile_now(kernel, options)
        cubin, ptx = (next(Path(scratch).glob(f"*.{kind}")) for kind in ("cubin", "ptx"))
        functions = _functions(cubin.read_bytes(), ptx.read_text(), _launches(str(compiled.ir_module)))
    if "ptxas" not in said.getvalue():
        raise RuntimeError(f"{kernel}: ptxas said nothing, so that its warnings cannot be looked for")
    remarks = re.findall(r"\(C75\d\d\)[^\n]*", said.getvalue())
    short = tuple(dict.fromkeys(re.sub(r" in (the )?function '?\w+'?| in around line \d+", "", one) for one in remarks))
    return Finding(str(kernel), tuple(functions), short, round(time.perf_counter() - began, 2))


@contextlib.contextmanager
def _no_positions() -> Iterator[None]:
    """Keep the compiler from noting for every operation where it stands in the source.

    It does so where remarks are asked for, and takes two thirds more time. Nothing here reads the positions.
    """
    from cutlass.base_dsl import dsl

    with mock.patch.object(dsl, "_set_enable_frame_filtering"):
        yield


def _functions(cubin: bytes, ptx: str, launches: Sequence[tuple[str, int | None]]) -> Iterator[Function]:
    sections, symbols = _elf(cubin)
    found: dict[str, dict[int, int]] = {}
    info = sections[".nv.info"]
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        # Only form 4 carries `size` bytes after its head; the others hold their value in place of the size.
        at += 4
        if form == 4:
            if attribute in (REGISTERS, FRAME):
                symbol, value = struct.unpack_from("<II", info, at)
                found.setdefault(symbols[symbol], {})[attribute] = value
            at += size
    _, *parts = re.split(r"\.entry (\w+)", ptx)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        dynamic = [size for launched, size in launches if launched == name]
        fixed = max(0, len(sections.get(f".nv.shared.{name}", b"")) - SHARED_RESERVED)
        shared = None if None in dynamic or not dynamic else fixed + max(size or 0 for size in dynamic)
        short = re.sub(r"^kernel_cutlass_", "", name)
        yield Function(
            re.split(r"_[A-Z]", short, maxsplit=1)[0],
            found[name][REGISTERS],
            shared,
            found[name][FRAME],
            body.count("wgmma.mma_async"),
        )


def _elf(data: bytes) -> tuple[dict[str, bytes], list[str]]:
    """A 64-bit ELF file's sections by name (without content where they only reserve memory: zeros), and its symbols."""
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]

    def content(head: tuple) -> bytes:
        return bytes(head[5]) if head[1] == 8 else data[head[4] : head[4] + head[5]]

    def text(table: bytes, at: int) -> str:
        return table[at : table.index(b"\0", at)].decode()

    names = content(heads[names_at])
    sections = {text(names, head[0]): content(head) for head in heads}
    symbols = [text(sections[".strtab"], entry[0]) for entry in struct.iter_unpack("<IBBHQQ", sections[".symtab"])]
    return sections, symbols


def _launches(host: str) -> list[tuple[str, int | None]]:
    """Function and dynamic shared memory of each launch in the host's code, in order."""
    found = []
    for body in re.split(r"^  llvm\.func ", host, flags=re.MULTILINE):
        constants = dict(re.findall(r"(%\d+) = llvm\.mlir\.constant\((\d+) : i64\)", body))
        sizes = re.findall(
            r"= llvm\.getelementptr %\d+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
            rf"{re.escape(LAUNCH)}\s+llvm\.store (%\w+), %\d+ : i64",
            body,
        )
        # The address of a launch's function is taken last before its call.
        before = body.split("@_cudaLaunchKernelEx(")[:-1]
        names = [re.findall(r"llvm\.mlir\.addressof @kernels_(\w+)", part)[-1] for part in before] if sizes else []
        if len(names) != len(sizes):
            raise RuntimeError(
                f"{len(names)} launches with {len(sizes)} sizes of shared memory: the host's code changed"
            )
        found += [
            (name, int(constants[size]) if size in constants else None) for name, size in zip(names, sizes, strict=True)
        ]
    return found


def table(finding: Finding, tensor_cores: bool) -> list[str]:
    """A line for each function, and below them what is wrong."""
    lines = []
    for function in finding.functions:
        shared = "run time" if function.shared is None else str(function.shared)
        numbers = f"{function.registers:9d} {shared:>8} {function.local:7d} {function.wgmma:6d} {finding.seconds:6.1f}"
        lines.append(f"{numbers}  {finding.kernel} {function.name}")
    return lines + [f"{'FAULT':>9} {fault} [{finding.kernel}]" for fault in finding.faults(tensor_cores)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODULES, default=MODULES, metavar="MODULE", help="default: all")
    parser.add_argument("--first", action="store_true", help="one variant of each module")
    jobs = min(os.cpu_count() or 1, 8)
    parser.add_argument("--jobs", type=int, default=jobs, metavar="N", help="processes (here: %(default)s)")
    options = parser.parse_args()
    if lacking := compiling.missing():
        sys.exit(f"msa_kernels.cute.check: {lacking}")
    # Before the CuTe DSL is imported, here and in the processes below.
    os.environ["CUTE_DSL_ARCH"] = next(iter(compiling.TARGETS.values()))
    print(f"{'registers':>9} {'shared':>8} {'local':>7} {'wgmma':>6} {'s':>6}  kernel", flush=True)
    kernels = faults = 0
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for module, all_of_it in variants(options.only).items():
            for finding in pool.map(_attempt, all_of_it[:1] if options.first else all_of_it):
                kernels += 1
                faults += len(finding.faults(module in TENSOR_CORES))
                print("\n".join(table(finding, module in TENSOR_CORES)), flush=True)
    print(f"{kernels} kernels, {faults} faults")
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Kernels of the CuTe DSL become callables: compiled once for their static facts, kept in memory and on disk.

A kernel is a frozen dataclass whose fields are its static facts, with `__call__` (decorated by `cute.jit`; it launches,
and its last argument is the stream) and `fakes()`, the arguments to compile it with. The callable takes tensors and
plain numbers and runs on PyTorch's current stream. Batch, length and counts are never static facts: a new shape runs
what is there already.

On disk a kernel is a native object file, in `$MSA_KERNELS_CACHE`, else `$XDG_CACHE_HOME/msa_kernels`, else
`~/.cache/msa_kernels`. Its name is a hash of all that decides its content: the static facts, the sources, the versions
of what compiles, the target, and the processor, for which the host's part is compiled. It gets that name in one step
and ends in a seal, a hash of name and content: processes may compile the same kernel at the same time, and a file that
was cut off, changed or put there by something else is compiled again. The seal is no signature: the folder holds
programs, and nobody else should be able to write to it.
"""

import functools
import hashlib
import inspect
import os
import platform
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Hashable
from importlib import metadata, util
from pathlib import Path
from typing import Protocol

import torch

TARGETS = {(9, 0): "sm_90a"}
"""Architecture by compute capability of the devices that the kernels are written for."""
ENTRY = "kernel"
"""The function's name in every object file."""
NEEDED = {"nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}
"""Distributions that compile and load, and the module by which each is found."""


class Kernel(Hashable, Protocol):
    """Static facts, and how to launch what they are compiled to."""

    def fakes(self) -> tuple:
        """Arguments to compile with: tensors of unknown size, zeros for numbers, and the stream."""
        ...


_loaded: dict[Kernel, Callable[..., None]] = {}
_lock = threading.Lock()


def load(kernel: Kernel) -> Callable[..., None]:
    """The kernel's callable, from memory, from disk, or compiled now (seconds).

    ValueError where the packages are missing or the device is not one that the kernels are written for.
    """
    found = _loaded.get(kernel)
    if found is None:
        # Gradients are computed in a thread of their own, and the compiler keeps global state.
        with _lock:
            found = _loaded.get(kernel)
            if found is None:
                found = _loaded[kernel] = _from_disk(kernel)
    return found


def architecture() -> str:
    """What to compile for: `CUTE_DSL_ARCH`, else the current CUDA device's. ValueError if no kernel is made for it."""
    known = ", ".join(TARGETS.values())
    wish = os.environ.get("CUTE_DSL_ARCH")
    if wish:
        if wish not in TARGETS.values():
            raise ValueError(f"CUTE_DSL_ARCH={wish!r}: the kernels are made for {known} only; use {known} or unset it")
        return wish
    if not torch.cuda.is_available():
        raise ValueError(f"no CUDA device is here to compile kernels for; CUTE_DSL_ARCH={known} compiles without one")
    capability = torch.cuda.get_device_capability()
    if capability not in TARGETS:
        raise ValueError(
            f"{torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}: the kernels are made for {known} "
            "only (H100, H200); use MSA_KERNELS=flex there"
        )
    return TARGETS[capability]


def folder() -> Path:
    """Where this version's object files are."""
    return _root() / _version()[:16]


def describe() -> list[str]:
    """Lines for a user: what compiles kernels and for what, and what is kept on disk."""
    lines = []
    lacking = missing()
    if lacking:
        lines.append(f"kernels: cute cannot compile: {lacking}")
    else:
        compilers = " and ".join(f"{name} {metadata.version(name)}" for name in NEEDED)
        try:
            lines.append(f"kernels: cute compiles for {architecture()} with {compilers}")
        except ValueError as error:
            lines.append(f"kernels: cute compiles nothing: {error}")
    objects = list(_root().glob("*/*.o"))
    current = sum(path.parent == folder() for path in objects)
    size = sum(path.stat().st_size for path in objects) / 2**20
    lines.append(
        f"kernels: compiled ones in {_root()}: {current} for this version, {len(objects) - current} for others, "
        f"{size:.1f} MiB (may be deleted at any time)"
    )
    return lines


def compile_now(kernel: Kernel, options: str = ""):
    """What `cute.compile` makes of the kernel, with more of its options; nothing is kept."""
    lacking = missing()
    if lacking:
        raise ValueError(f"the cute kernels cannot be compiled: {lacking}")
    target = architecture()
    import cutlass.cute
    from cutlass.cutlass_dsl import CuTeDSL

    # The compiler looks once, at the first device, and at the variable only when it is imported.
    seen = CuTeDSL._get_dsl().envar.arch
    if seen != target:
        raise ValueError(
            f"the CuTe DSL compiles for {seen}, not for {target}: it was imported before CUTE_DSL_ARCH was set, or "
            f"another device comes first; start Python with CUTE_DSL_ARCH={target}"
        )
    arguments = kernel.fakes()
    return cutlass.cute.compile(kernel, *arguments, options=f"--enable-tvm-ffi {options}".strip())


def identity(kernel: Kernel) -> str:
    """Hash of all that decides the kernel's object file."""
    facts = repr(kernel)
    if " at 0x" in facts:
        raise ValueError(f"static facts {facts} name an address, which differs between processes; use plain values")
    settings = sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))
    cls = type(kernel)
    import cutlass

    return _digest(
        facts,
        cls.__qualname__,
        # A class from outside this package brings a source of its own.
        Path(inspect.getfile(cls)).read_bytes(),
        _version(),
        architecture(),
        # Of the driver's two flavours, the one that the compiler chose for this machine.
        str(cutlass.CUDA_VERSION),
        # Line tables, assertions and the like, from whoever debugs or profiles.
        repr([(name, value) for name, value in settings if name not in ("CUTE_DSL_LIBS", "CUTE_DSL_ARCH")]),
        _processor(),
    )


def _from_disk(kernel: Kernel) -> Callable[..., None]:
    lacking = missing()
    if lacking:
        raise ValueError(f"the cute kernels cannot be used: {lacking}")
    key = identity(kernel)
    path = folder() / f"{type(kernel).__name__}-{key[:32]}.o"
    if _intact(path, key):
        return _open(path)
    compiled = compile_now(kernel)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / path.name
        compiled.export_to_c(str(made), ENTRY)
        content = made.read_bytes()
        try:
            write(path, content + _seal(key, content))
        except OSError as error:
            warnings.warn(
                f"compiled kernels cannot be kept: {error}; point MSA_KERNELS_CACHE at a folder that can be written to",
                stacklevel=4,
            )
        # In this process, too, what was compiled is used as others will find it.
        return _open(made)


def _open(path: Path) -> Callable[..., None]:
    from cutlass.cute.runtime import load_module

    return load_module(str(path), enable_tvm_ffi=True)[ENTRY]


def _intact(path: Path, key: str) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        warnings.warn(f"a compiled kernel cannot be read and is compiled again: {error}", stacklevel=5)
        return False
    length = hashlib.sha256().digest_size
    return content[-length:] == _seal(key, content[:-length])


def write(path: Path, content: bytes) -> None:
    """The file, with this content or as it was before, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _seal(key: str, content: bytes) -> bytes:
    # Behind the last section of an ELF file, where its readers do not look.
    return bytes.fromhex(_digest(key, content))


def _root() -> Path:
    own = os.environ.get("MSA_KERNELS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "msa_kernels"


@functools.cache
def _version() -> str:
    """Hash of this package's sources and of the versions of what compiles them and runs the result."""
    here = Path(__file__).parent
    sources = [(path.name, path.read_bytes()) for path in sorted(here.glob("*.py"))]
    versions = [_installed(name) or "" for name in NEEDED]
    python = f"{sys.implementation.cache_tag} {platform.machine()}"
    return _digest(*(part for source in sources for part in source), *versions, python)


@functools.cache
def _processor() -> str:
    """The host's part of a kernel uses every instruction that this processor has; another one may lack some."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def missing() -> str | None:
    """What is not installed that compiles kernels, and how to get it."""
    for name, module in NEEDED.items():
        # Looking for what is imported already takes a while, and every call of an operation asks.
        if module not in sys.modules and util.find_spec(module) is None:
            return f"{name} is not installed; pip install {name}" if sys.platform == "linux" else f"{name} is for Linux"
    return None


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _digest(*parts: str | bytes) -> str:
    """Of all parts and where each one ends."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()

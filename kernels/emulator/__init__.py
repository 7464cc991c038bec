"""Run the compiled kernels of `msa_kernels.cute` on a CPU: their own host code and PTX, on tensors of the CPU.

    import emulator
    with emulator.installed(seed=1):
        ...  # functions of msa_kernels.cute on CPU tensors

Needs g++ and what compiles kernels; no GPU. See README.md.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import torch

HERE = Path(__file__).parent
CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.float64: (2, 64)}
CODES |= {torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8), torch.bool: (6, 8), torch.int16: (0, 16)}
"""DLPack's codes and bits."""
PROCESSORS = 3
"""Thread blocks of kernels that fill the GPU."""


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Value(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("number", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class _Any(ctypes.Structure):
    """TVM-FFI's argument."""

    _fields_ = [("type", ctypes.c_int32), ("zero", ctypes.c_uint32), ("value", _Value)]


def folder() -> Path:
    """Where compiled things are kept."""
    return Path(os.environ.get("MSA_EMULATOR_CACHE") or Path(tempfile.gettempdir()) / f"msa_emulator_{os.getuid()}")


@functools.cache
def library() -> ctypes.CDLL:
    """The emulator, compiled when its source is new."""
    source = HERE / "emulator.cpp"
    made = folder() / f"emulator-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-O2", "-march=native", "-fno-math-errno", "-shared", "-fPIC"]
        subprocess.run(["g++", *flags, "-o", part, source], check=True)
        part.replace(made)
    loaded = ctypes.CDLL(str(made))
    loaded.emulator_error.restype = ctypes.c_char_p
    loaded.emulator_parse.restype = ctypes.c_void_p
    loaded.emulator_instructions.restype = ctypes.c_uint64
    return loaded


def _sources(name: str, found: set[str]) -> set[str]:
    """The modules of the package whose code a kernel of one of them can run."""
    if name.startswith("msa_kernels.cute.") and name not in found:
        found.add(name)
        for value in list(vars(sys.modules[name]).values()):
            _sources(value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None) or "", found)
    return found


def _identity(kernel) -> str:
    """As that of `compile`, but changes in other modules do not count."""
    paths = sorted(sys.modules[name].__file__ or "" for name in _sources(type(kernel).__module__, set()))
    content = b"".join(Path(path).read_bytes() for path in paths if not path.endswith("compile.py"))
    return hashlib.sha256(content + repr(kernel).encode()).hexdigest()


def _compile(kernel) -> tuple[Path, Path]:
    """The kernel's PTX, and its host code as a library."""
    from msa_kernels.cute import compile as compiling

    name = f"{type(kernel).__name__}-{_identity(kernel)[:20]}"
    stub = HERE / "stub.c"
    seal = hashlib.sha256(stub.read_bytes()).hexdigest()[:6]
    ptx, host = folder() / f"{name}.ptx", folder() / f"{name}-{seal}.so"
    if not (ptx.exists() and host.exists()):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            compiled = compiling.compile_now(kernel, f"--keep-ptx --dump-dir={scratch}")
            compiled.export_to_c(f"{scratch}/host.o", "kernel")
            command = f"g++ -shared -fPIC -w -Wl,-Bsymbolic -x c {stub} -x none {scratch}/host.o -o {scratch}/host.so"
            subprocess.run(command.split(), check=True)
            Path(f"{scratch}/host.so").replace(host)
            next(Path(scratch).glob("*.ptx")).replace(ptx)
    return ptx, host


class Emulated:
    """A kernel's callable: takes CPU tensors, numbers and None as the compiled one takes those of the GPU."""

    def __init__(self, kernel, change: Callable[[str], str] = str) -> None:
        """`change` makes another program of the PTX, for tests of the emulator."""
        self.kernel = kernel
        ptx, host = _compile(kernel)
        emulator = library()
        programs = emulator.emulator_parse(change(ptx.read_text()).encode())
        if not programs:
            raise RuntimeError(f"{kernel}: {emulator.emulator_error().decode()} [{ptx}]")
        self.host = ctypes.CDLL(str(host))
        for name, function in (("stub_find", emulator.emulator_find), ("stub_launch", emulator.emulator_launch)):
            ctypes.c_void_p.in_dll(self.host, name).value = ctypes.cast(function, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self.host, "stub_programs").value = programs
        self.error = (ctypes.c_char * 4096).in_dll(self.host, "stub_error")
        self.ptx = ptx

    def __call__(self, *given) -> None:
        values, kept, ranges = (_Any * len(given))(), [], []
        for value, one in zip(values, given, strict=True):
            if one is None:
                value.type = 0
            elif isinstance(one, torch.Tensor):
                code, bits = CODES[one.dtype]
                sizes = (ctypes.c_int64 * max(one.ndim, 1))(*one.shape)
                strides = (ctypes.c_int64 * max(one.ndim, 1))(*one.stride())
                tensor = _DLTensor(one.data_ptr(), 2, 0, one.ndim, code, bits, 1, sizes, strides, 0)
                kept.append((tensor, sizes, strides))
                value.type, value.value.pointer = 7, ctypes.addressof(tensor)
                if one.numel():
                    extent = sum((n - 1) * s for n, s in zip(one.shape, one.stride(), strict=True)) + 1
                    ranges += [one.data_ptr(), one.data_ptr() + extent * one.element_size()]
            elif isinstance(one, float):
                value.type, value.value.number = 3, one
            else:
                value.type, value.value.integer = 1, int(one)
        emulator = library()
        emulator.emulator_ranges((ctypes.c_uint64 * len(ranges))(*ranges), ctypes.c_int64(len(ranges) // 2))
        self.error.value = b""
        if getattr(self.host, "__tvm_ffi_kernel")(None, values, ctypes.c_int32(len(given)), ctypes.byref(_Any())):
            said = self.error.value.decode()
            if "719" in said:
                said = emulator.emulator_error().decode()
            raise RuntimeError(f"{self.kernel}: {said}")


_loaded: dict = {}


def load(kernel) -> Emulated:
    """In the place of `msa_kernels.cute.compile.load`."""
    if kernel not in _loaded:
        _loaded[kernel] = Emulated(kernel)
    return _loaded[kernel]


def loaded() -> dict:
    """What `load` has given so far."""
    return _loaded


def options(seed: int = 0, resident: int = 3, steps: int = 4_000_000_000, races: bool = True, proxies: bool = True,
            trace: bool = False) -> None:  # fmt: skip
    """How launches run from now on: order of events, thread blocks at a time, most instructions, what is checked."""
    library().emulator_options(
        ctypes.c_uint64(seed), ctypes.c_int64(resident), ctypes.c_int64(steps), int(races), int(proxies), int(trace)
    )


@contextlib.contextmanager
def installed(**how):
    """Within: kernels are emulated; memory of `torch.empty` is NaN, or the largest integer."""
    from msa_kernels import cute
    from msa_kernels.cute import hopper

    options(**how)
    with contextlib.ExitStack() as stack:
        for info in pkgutil.iter_modules(cute.__path__):
            if info.name in ("compile", "check"):
                continue
            module = importlib.import_module(f"msa_kernels.cute.{info.name}")
            if hasattr(module, "load"):
                stack.enter_context(mock.patch.object(module, "load", load))
        stack.enter_context(mock.patch.object(hopper, "processors", return_value=PROCESSORS))
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

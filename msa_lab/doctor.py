"""What is installed here, whether it fits together, and which kernel paths work."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement

SHOWN = ("torch", "lightning", "numpy", "zarr", "xarray", "tokenizers", "wandb", "triton", "nvidia-cutlass-dsl")
DSL = "nvidia-cutlass-dsl"


def examine() -> tuple[list[str], list[str]]:
    """Lines of facts, and what does not fit together (empty on a sound machine)."""
    import torch

    versions = installed()
    driver = driver_cuda()
    facts = [f"python {platform.python_version()} on {platform.platform()} ({sys.prefix})"]
    facts += [f"{name} {versions.get(name, 'is not installed')}" for name in ("msa-lab", *SHOWN)]
    facts += [f"{name} {version}" for name, version in versions.items() if name.startswith(f"{DSL}-libs")]
    facts.append(f"torch was built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU only'}")
    facts.append(f"GPU driver: {f'up to CUDA {driver[0]}.{driver[1]}' if driver else 'none'}")
    if driver and not torch.version.cuda:
        facts.append("note: a GPU driver is here, but this torch cannot use it; install a CUDA build to train on it")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        facts.append(f"GPU {index}: {torch.cuda.get_device_name(index)}, sm_{major}{minor}")
    facts += kernel_paths()
    return facts, conflicts("msa-lab") + dsl_skew(versions) + cuda_skew(torch.version.cuda, driver)


def installed() -> dict[str, str]:
    """Version of every installed distribution by its normalised name, sorted."""
    found = {_normal(dist.name): dist.version for dist in metadata.distributions() if dist.name}
    return dict(sorted(found.items()))


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def conflicts(package: str) -> list[str]:
    """What `package` needs, directly or not, and does not have: each a line with the way out."""
    problems, queue, seen = [], [(package, frozenset[str]())], set()
    while queue:
        name, extras = queue.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                continue
            try:
                version = metadata.version(needed.name)
            except metadata.PackageNotFoundError:
                problems.append(f"{name} needs {needed.name}{needed.specifier}, which is not installed; install it")
                continue
            if not needed.specifier.contains(version, prereleases=True):
                problems.append(
                    f"{name} needs {needed.name}{needed.specifier}, but {version} is installed; "
                    f"pip install '{needed.name}{needed.specifier}'"
                )
            queue.append((_normal(needed.name), frozenset(needed.extras)))
    return problems


def dsl_skew(versions: Mapping[str, str]) -> list[str]:
    """The CuTe DSL and its libraries come as packages of their own, and work only in one and the same version."""
    own = versions.get(DSL)
    if own is None:
        return []
    return [
        f"{name} {version} does not fit {DSL} {own}; pip install --force-reinstall '{DSL}[cu13]=={own}'"
        for name, version in versions.items()
        if name.startswith(f"{DSL}-libs") and version != own
    ]


def cuda_skew(torch_cuda: str | None, driver: tuple[int, int] | None) -> list[str]:
    """A driver runs programs built for its own major CUDA version and earlier ones."""
    if torch_cuda is None or driver is None or int(torch_cuda.split(".")[0]) <= driver[0]:
        return []
    return [
        f"torch was built for CUDA {torch_cuda}, but the driver reaches CUDA {driver[0]}.{driver[1]} only; "
        f"update the driver or install a torch for CUDA {driver[0]}"
    ]


def driver_cuda() -> tuple[int, int] | None:
    """Newest CUDA version that the installed GPU driver runs; None without a driver."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _dense_attention() -> str:
    """Which library serves a run in deterministic mode, the default, on the kernels' path."""
    import torch
    from msa_kernels.cute import library

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return library.describe()
    finally:
        torch.use_deterministic_algorithms(before)


def kernel_paths() -> list[str]:
    """For a model of ordinary sizes in bf16: each path, usable or why not, and the one that a run would take."""
    import torch
    from msa_kernels import select_path
    from msa_kernels.cute import compile as compiling

    place = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"device_type": place, "dtype": torch.bfloat16, "head_dim": 128, "proxy_dim": 128, "block_size": 128}
    lines = []
    for path in ("reference", "flex", "cute"):
        try:
            select_path(**sizes, backend=path)
            attention = f"; {_dense_attention()}" if path == "cute" else ""
            lines.append(f"kernels: {path} is usable on {place}{attention}")
        except ValueError as error:
            lines.append(f"kernels: {error}")
    try:
        chosen, reason = select_path(**sizes)
        lines.append(f"kernels: a run on {place} takes {chosen}, {reason}")
    except ValueError as error:
        lines.append(f"kernels: no run would start here: {error}")
    return lines + compiling.describe()

"""What a run ran on: versions, hardware, corpus, code and kernel path, for `environment.json`."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lab.config import RunConfig

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    *("torch", "lightning", "numpy", "zarr", "xarray", "tokenizers", "triton", "nvidia-cutlass-dsl", "flash-attn-4"),
    "wandb",
)


def kernel_path(config: RunConfig, device: torch.device) -> tuple[str, str]:
    """The kernel path of a run and the reason for it.

    Raises:
        ValueError: The config asks for a path that cannot be had here.
    """
    import torch
    from msa_kernels import select_path

    model = config.model
    return select_path(
        device_type=device.type,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        head_dim=model.head_dim,
        proxy_dim=model.proxy_dim,
        block_size=model.block_size,
        # Regrouped heads have keys to themselves; every path that takes other groups takes groups of one.
        group_size=1
        if "regrouped" in model.attention_kinds
        else model.num_query_heads // max(model.num_proxies, model.num_kv_heads),
        top_k_blocks=model.top_k_blocks,
        backend=None if config.backend == "auto" else config.backend,
    )


def describe(config: RunConfig, device: torch.device, corpus: dict[str, Any]) -> dict[str, Any]:
    """Everything outside the config that can change a number."""
    import torch

    path, reason = kernel_path(config, device)
    cuda = device.type == "cuda"
    return {
        "code": code_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if cuda else None,
        "path": path,
        "path_reason": reason,
        "dense_attention": _dense_attention() if path == "cute" else None,
        "corpus": corpus,
    }


def _dense_attention() -> str:
    """The library that gives a log-sum-exp with dense attention, in the mode that is set."""
    from msa_kernels.cute import library

    return library.describe()


def code_version() -> str:
    """The package's version, and the commit where it runs from a checkout (`+` marks uncommitted changes)."""
    version = _version("msa-lab") or "unknown"
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        # A package installed inside somebody else's checkout must not take that one's commit for its own.
        _run([*git, "ls-files", "--error-unmatch", Path(__file__).name])
        return f"{version} {_run([*git, 'describe', '--always', '--dirty=+', '--abbrev=12', '--exclude=*'])}"
    except (OSError, subprocess.SubprocessError):
        return version


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

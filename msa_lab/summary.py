"""What a run is about to do, in a few lines."""

from __future__ import annotations

import torch

from msa_lab.budget import count_parameters
from msa_lab.config import RunConfig
from msa_lab.environment import kernel_path


def summary(config: RunConfig) -> list[str]:
    """Size, selection and kernels of the run, one line each.

    Raises:
        ValueError: The kernel path that the config asks for cannot be had here.
    """
    model, length = config.model, config.data.context_length
    count, blocks = count_parameters(model), -(-length // model.block_size)
    path, reason = kernel_path(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    kinds = ", ".join(f"{model.attention_kinds.count(kind)} {kind}" for kind in dict.fromkeys(model.attention_kinds))
    lines = [
        f"model: {count.total:,} parameters ({count.non_embedding:,} without embedding, {count.proxy:,} in proxies); "
        f"layers: {kinds}"
    ]
    if set(model.attention_kinds) != {"dense"}:
        k, size = model.top_k_blocks, model.block_size
        lines.append(f"selection: {k} blocks x {size} = {k * size} tokens of {length}; density {config.density:.6f}")
        if k > blocks:
            fix = k // size if k % size == 0 and 1 < k // size <= blocks else max(1, blocks // 4)
            lines.append(
                f"warning: model.top_k_blocks={k}: counts blocks, not tokens, and only {blocks} blocks of {size} exist "
                f"in {length} tokens, so attention is dense; try {fix}"
            )
    return [*lines, f"kernels: {path}, {reason}"]

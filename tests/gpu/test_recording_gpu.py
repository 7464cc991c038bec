"""What recording costs a GPU in memory: nothing beside a training step."""

from pathlib import Path

import torch
from tiny import tiny_run

from msa_lab.train import train

MODEL = {"d_model": 256, "num_layers": 4, "num_query_heads": 8, "head_dim": 64, "proxy_dim": 64, "block_size": 128}


def peak(folder: Path, records: int) -> int:
    """Bytes at most in a training of 8 steps with so many records."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = tiny_run(
        folder / "texts",
        arm=f"records{records}",
        model=MODEL | {"top_k_blocks": 4},
        train={"steps": 8, "batch_size": 8, "proxy_warmup_steps": 2, "precision": "bf16"},
        data={"context_length": 2048},
        selections={"records": records, "documents": 4},
    )
    train(config, root=folder / "runs", cache=folder / "data", progress=False, wandb="disabled")
    return torch.cuda.max_memory_allocated()


def test_a_record_at_every_step_leaves_the_peak_of_training_as_it_is(tmp_path: Path) -> None:
    peak(tmp_path, 2)  # what is allocated once, for good, is there after it
    without, recorded = peak(tmp_path, 0), peak(tmp_path, 8)
    assert recorded <= 1.01 * without

"""Training on a GPU: compiled steps, replayed as CUDA graphs, over the switch from the warm-up to the sparse phase."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_run
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees

from msa_lab.train import train

MODEL = {"d_model": 256, "num_layers": 2, "num_query_heads": 8, "head_dim": 64, "proxy_dim": 64, "block_size": 128}


def losses(folder: Path, arm: str, *, compiled: bool, attention: str = "msa", **more: int) -> list[list[float]]:
    """Loss and KL of 12 steps, 5 of them in the warm-up, with a record, a validation and a checkpoint on the way."""
    torch._dynamo.reset()
    config = tiny_run(
        folder / "texts",
        arm=arm,
        model=MODEL | {"top_k_blocks": 4, "attention": attention},
        train={"steps": 12, "batch_size": 4, "proxy_warmup_steps": 5, "precision": "bf16", "compile": compiled}
        | {"log_every": 1, "validate_every": 4, "checkpoint_every": 3, "lr": 3e-4}
        | more,
        data={"context_length": 1024},
        selections={"records": 3, "documents": 2},
    )
    run = train(config, root=folder / "runs", cache=folder / "data", progress=False, wandb="disabled")
    metrics = run.metrics
    found = [metrics[metrics["name"] == name]["value"].tolist() for name in ("train/ce", "train/kl")]
    assert len(found[0]) == 12
    return found[: 1 + bool(found[1])]


@pytest.mark.parametrize("attention", ["msa", "regrouped", "random", "dense"])
def test_graphs_replay_what_the_model_computes_again_and_again(tmp_path: Path, attention: str) -> None:
    plain = losses(tmp_path, "plain", compiled=False, attention=attention)
    counters.clear()
    once, again = (losses(tmp_path, arm, compiled=True, attention=attention) for arm in ("once", "again"))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert cudagraph_trees.get_manager(0, create_if_none_exists=False) is not None
    assert once == again
    torch.testing.assert_close(torch.tensor(once), torch.tensor(plain), rtol=0.01, atol=0.01)


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    whole, parts = (losses(tmp_path, f"in{n}", compiled=True, accumulate=n) for n in (1, 2))
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), rtol=0.01, atol=0.01)

"""Settings that are seldom used together, each trained, recorded, scored again and put into a report."""

import numpy as np
import pytest
import torch
from msa_analysis.report import write_report
from tiny import tiny_run, write_corpus

from msa_lab.config import DataConfig, RecallConfig
from msa_lab.data import open_data
from msa_lab.evaluate import evaluate
from msa_lab.selections import open_selections
from msa_lab.train import train

COMBINATIONS = {
    "kinds mixed by layer": {
        "model": {"num_layers": 4, "attention": ("dense", "msa", "window", "random")},
    },
    "fewer proxies than key heads": {"model": {"num_proxies": 1, "num_kv_heads": 2}},
    "a key for each proxy": {"model": {"num_proxies": 4, "num_proxy_kv_heads": 4}},
    "sink and two local blocks": {"model": {"num_sink_blocks": 1, "num_local_blocks": 2, "top_k_blocks": 4}},
    "nothing forced": {"model": {"num_local_blocks": 0}},
    "everything forced": {"model": {"num_sink_blocks": 1, "top_k_blocks": 2}},
    "own block only": {"model": {"top_k_blocks": 1}},
    "more blocks than there are": {"model": {"top_k_blocks": 64}},
    "no divergence": {"train": {"kl_weight": 0.0}},
    "divergence reaches the backbone": {"model": {"detach_proxy_input": False}},
    "recomputed and accumulated": {"train": {"activation_checkpointing": True, "accumulate": 2}},
    "half precision": {"train": {"precision": "bf16"}},
    "cosine, untied": {"train": {"schedule": "cosine"}, "model": {"tie_embeddings": False}},
    "length no multiple of the block": {"data": {"context_length": 125}},
    "documents masked": {"data": {"document_mask": True}},
    "no teacher": {"selections": {"teacher": False}},
    "nothing recorded": {"selections": {"records": 0}},
    "every third query": {"selections": {"query_stride": 3}},
    "warm-up to the end": {"train": {"proxy_warmup_steps": 100}},
}
SELDOM = (
    "nothing forced",
    "no teacher",
    "every third query",
    "everything forced",
    "a key for each proxy",
    "half precision",
)
"""The rarest of them, which wait for the slow tests."""
REPORTED = ("kinds mixed by layer", "nothing forced", "no teacher", "nothing recorded", "every third query")


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    folder = tmp_path_factory.mktemp("combinations")
    write_corpus(folder / "texts")
    return folder


def trained(where, **changes):
    plain = {"log_every": 4, "validate_every": 12, "steps": 8, "proxy_warmup_steps": 3}
    changes["train"] = plain | changes.get("train", {})
    config = tiny_run(where / "texts", **changes)
    return train(config, root=where / "runs", cache=where / "data", progress=False, wandb="disabled")


@pytest.mark.filterwarnings("ignore:.*dense in all but name")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in COMBINATIONS]
)
def test_a_seldom_combination_goes_from_training_to_the_report(name, where):
    run = trained(
        where, arm=name.replace(" ", "_").replace(",", ""), **{k: dict(v) for k, v in COMBINATIONS[name].items()}
    )
    again = evaluate(run, cache=where / "data")
    assert again["validation_loss"] == pytest.approx(run.result["validation_loss"], rel=1e-6)
    config = run.config
    if config.selections.records:
        data = open_selections(run)
        assert list(data["layer"].values) == [i for i, k in enumerate(config.model.attention_kinds) if k != "dense"]
        selected, own = data["selected"].values, data["query"].values // config.model.block_size
        assert (selected <= own[:, None]).all()
        kept = (selected >= 0).sum(-1)
        np.testing.assert_array_equal(kept, np.broadcast_to(np.minimum(own + 1, config.model.top_k_blocks), kept.shape))
    if name in REPORTED:
        page = write_report(run.path, where / f"{name}.html").read_text()
        assert "ndertrained" in page


def test_a_recall_run_is_scored_by_distance_from_training_to_the_report(where):
    data = DataConfig(source="recall", context_length=128, recall=RecallConfig(num_keys=16, pairs=8, block_size=8))
    size = open_data(data, where / "data").vocab_size
    changes = {name: getattr(data, name) for name in ("source", "path", "context_length", "recall")}
    changes["validation_fraction"] = DataConfig().validation_fraction
    run = trained(where, arm="recall", data=changes, model={"vocab_size": size}, train={"batch_size": 8})
    by_distance = run.result["accuracy_by_distance"]
    assert run.result["bits_per_byte"] is None
    assert len(by_distance) > 3
    assert sum(a["questions"] for a in by_distance.values()) > 20
    assert evaluate(run)["accuracy_by_distance"] == by_distance
    assert "ccuracy by distance" in write_report(run.path, where / "recall.html").read_text()


def test_recording_turned_off_leaves_no_log_and_the_same_losses(where):
    runs = [trained(where, arm=f"records{n}", selections={"records": n}) for n in (0, 2)]
    assert [(run.path / "selections.zarr").exists() for run in runs] == [False, True]
    states = [torch.load(run.path / "last.ckpt", weights_only=True)["state_dict"] for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

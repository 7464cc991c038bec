import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_run, write_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from msa_lab import callbacks
from msa_lab.config import RecallConfig
from msa_lab.data import open_data
from msa_lab.evaluate import load_model
from msa_lab.recorder import PER_QUERY_BLOCK, SelectionRecorder, _undisturbed, observe
from msa_lab.runs import Run, arm_folder
from msa_lab.selections import SelectionStore, open_selections, record, record_steps
from msa_lab.teacher import block_mass
from msa_lab.tokenizer import MARK
from msa_lab.tracking import MetricsLog
from msa_lab.train import TrainingStoppedError, train

pytestmark = pytest.mark.xdist_group("recorder")  # its run is trained once, not once a worker


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def fit(config, folder):
    return train(config, root=folder, cache=folder.parent / "cache", progress=False, wandb="disabled")


@pytest.fixture(scope="module")
def config(corpus):
    return tiny_run(corpus, selections={"records": 5})


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    return fit(config, tmp_path_factory.mktemp("whole") / "runs")


def test_records_lie_on_the_scheduled_steps_with_their_phase(whole, config):
    data = open_selections(whole)
    assert data["step"].values.tolist() == record_steps(0, 12, 5) == [0, 3, 6, 9, 12]
    assert data["phase"].values.tolist() == ["warmup", "warmup", "sparse", "sparse", "sparse"]
    assert data.sizes["document"] == 2
    probe = open_data(config.data, whole.path.parents[3] / "cache").probe(2)
    assert data["document"].values.tolist() == list(probe.ids)
    np.testing.assert_array_equal(data["tokens"].values, probe.tokens.numpy())
    assert data.attrs["tokenizer"] == "bytes"


def test_selections_are_legal_and_early_queries_leave_slots_empty(whole):
    data = open_selections(whole)
    own = (data["query"].values // 8)[:, None]
    for name in ("selected", "teacher", "head_teacher"):
        ids = data[name].values
        assert ((ids >= -1) & (ids <= own)).all()
        assert ((ids >= 0).sum(-1) == np.minimum(own[:, 0] + 1, 3)).all()
        assert (ids == own).any(-1).all(), "the own block is forced"
        kept = np.where(ids < 0, 99, ids)
        assert (np.diff(kept) > 0)[ids[..., 1:] >= 0].all()
        assert (np.sort(kept) == kept).all()
    for ids, shares in (("selected", "mass"), ("selected", "score"), ("teacher", "teacher_mass")):
        np.testing.assert_array_equal(np.isnan(data[shares].values), data[ids].values < 0)


def test_the_last_record_is_what_the_saved_model_does(whole, config):
    data = open_selections(whole).isel(step=-1)
    model = load_model(whole)
    tokens = torch.from_numpy(data["tokens"].values.astype(np.int64))
    with torch.no_grad():
        model(tokens)
    seen = observe(model, tokens, config, heads=True, rows=2)
    for name, value in seen.items():
        np.testing.assert_array_equal(data[name].values, value.astype(data[name].dtype), err_msg=name)
    together = observe(model, tokens, config, rows=1)
    assert (together["selected"] == seen["selected"]).mean() > 0.999


def test_teacher_and_masses_belong_to_the_groups_own_heads(whole):
    data = open_selections(whole).isel(step=-1)
    by_head = np.nansum(data["head_teacher_mass"].values.astype(np.float32), -1)
    teacher, mass = data["teacher_mass"].sum("slot").values, data["mass"].sum("slot").values
    assert (teacher >= mass - 2e-3).all(), "nothing captures more than the teacher's own top blocks"
    # A group's top blocks capture no more than its heads' own top blocks do on average.
    assert (teacher <= by_head.reshape(2, 2, 2, 2, -1).mean(3) + 2e-3).all()
    assert (teacher <= 1 + 2e-3).all()


def test_queries_in_ranges_and_strides_give_the_same_record(whole, config, monkeypatch):
    model, tokens = load_model(whole), torch.arange(256).view(2, 128) % 257
    plain = observe(model, tokens, config, heads=True)
    monkeypatch.setattr("msa_lab.recorder.QUERIES", 50)
    cut = observe(model, tokens, config, heads=True)
    strided = observe(model, tokens, tiny_run(Path(config.data.path), selections={"query_stride": 5}), heads=True)
    for name, value in plain.items():
        np.testing.assert_allclose(cut[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
        if name not in PER_QUERY_BLOCK:
            np.testing.assert_allclose(strided[name], value[..., ::5, :], rtol=1e-5, atol=1e-7, err_msg=name)


def test_training_is_bit_identical_with_and_without_recording(whole, corpus, tmp_path):
    plain = fit(tiny_run(corpus, selections={"records": 0}), tmp_path / "runs")
    frames = [r.metrics[~r.metrics.name.str.contains("tokens_per_second|selections/")] for r in (whole, plain)]
    first, second = (frame.reset_index(drop=True) for frame in frames)
    assert len(first)
    assert first.equals(second)
    ours, theirs = load_model(whole).state_dict(), load_model(plain).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ValueError, match="nothing was recorded"):
        open_selections(plain)


def same_log(run, other):
    found, expected = open_selections(run), open_selections(other)
    assert set(found.variables) == set(expected.variables)
    for name, value in expected.variables.items():
        np.testing.assert_array_equal(found[name].values, value.values, err_msg=str(name))


@pytest.mark.parametrize("stop", [6, 8])
def test_a_resumed_run_has_the_records_of_an_uninterrupted_one(whole, config, tmp_path, monkeypatch, stop):
    kept = callbacks.StopOnSignal.on_train_batch_end

    def receive(self, trainer, *rest):
        self.received |= trainer.global_step == stop
        kept(self, trainer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.StopOnSignal, "on_train_batch_end", receive)
        with pytest.raises(TrainingStoppedError):
            fit(config, tmp_path / "runs")
    assert open_selections(Run.of(config, tmp_path / "runs"))["step"].values.max() <= stop
    same_log(fit(config, tmp_path / "runs"), whole)


def test_a_run_that_dies_with_its_log_ahead_of_its_checkpoint_records_nothing_twice(
    whole, config, tmp_path, monkeypatch
):
    run, kept = Run.of(config, tmp_path / "runs"), callbacks.Checkpoints.on_train_batch_end

    def die(self, trainer, *rest):
        if trainer.global_step == 8:
            raise RuntimeError("died")
        kept(self, trainer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.Checkpoints, "on_train_batch_end", die)
        with pytest.raises(RuntimeError, match="died"):
            fit(config, tmp_path / "runs")
    assert torch.load(run.path / "last.ckpt", weights_only=True)["global_step"] == 5
    assert open_selections(run)["step"].values.tolist() == [0, 3, 6]
    same_log(fit(config, tmp_path / "runs"), whole)


def test_a_full_disk_while_recording_ends_training_with_one_line_and_the_run_resumes(
    whole, config, tmp_path, monkeypatch
):
    kept = SelectionStore._write

    def full(self, name, value, index):
        if index == 2 and name == "teacher":
            raise OSError(28, "No space left on device")
        kept(self, name, value, index)

    with monkeypatch.context() as patch:
        patch.setattr(SelectionStore, "_write", full)
        line = re.escape(
            "could not record the selections of step 6 (No space left on device); earlier records are whole"
        )
        with pytest.raises(OSError, match=line):
            fit(config, tmp_path / "runs")
    assert open_selections(Run.of(config, tmp_path / "runs"))["step"].values.tolist() == [0, 3]
    same_log(fit(config, tmp_path / "runs"), whole)


def test_accumulated_parts_record_once_a_step(corpus, tmp_path):
    run = fit(tiny_run(corpus, train={"accumulate": 2}, selections={"records": 13}), tmp_path / "runs")
    assert open_selections(run)["step"].values.tolist() == list(range(13))


def test_rules_share_one_choice_among_the_groups_and_have_no_scores(corpus, tmp_path):
    run = fit(tiny_run(corpus, model={"attention": ("window", "random")}, train={"steps": 2}), tmp_path / "runs")
    data = open_selections(run)
    assert set(data["phase"].values) == {"sparse"}, "rules without proxies have no warm-up"
    window, random = (data["selected"].sel(layer=layer).values for layer in (0, 1))
    assert (window[:, :, 0] == window[:, :, 1]).all()
    own = data["query"].values // 8
    assert (np.nanmin(np.where(window >= 0, window, 99), -1) == np.maximum(own - 2, 0)).all()
    assert (random[:, :, 0] != random[:, :, 1]).any()
    assert (random[0] != random[1]).any(), "random blocks are drawn anew at every step"
    assert np.isnan(data["score"].values).all()
    assert not np.isnan(data["mass"].values[..., 0]).any()


def test_blocks_never_selected_are_logged_at_every_record(whole):
    metrics = whole.metrics
    rows = metrics[metrics.name.str.startswith("selections/never_selected/layer")]
    assert sorted(set(rows.step)) == [0, 3, 6, 9, 12]
    assert set(rows.name) == {"selections/never_selected/layer0", "selections/never_selected/layer1"}
    assert rows["value"].between(0, 2 * 2 * 15).all()


def test_maps_of_the_last_record_reach_a_logger_that_shows_images(config, tmp_path, monkeypatch):
    shown = {}
    monkeypatch.setattr(MetricsLog, "log_image", lambda self, name, image, step: shown.update({(step, name): image}))
    data = open_selections(fit(config, tmp_path / "runs")).isel(step=-1)
    assert sorted(shown) == [(12, f"selections/rate/layer{i}/proxy{p}") for i in (0, 1) for p in (0, 1)]
    image = shown[12, "selections/rate/layer1/proxy0"]
    assert image.shape == (16, 16)
    picks = data["selected"].isel(layer=1, proxy=0).values
    assert image[9, 4] == pytest.approx((picks[:, 72:80] == 4).any(-1).mean())
    assert not np.triu(image, 1).any()


def test_only_the_first_process_records(config, tmp_path):
    recorder = SelectionRecorder(Run(tmp_path), config, data=None)
    other = SimpleNamespace(is_global_zero=False, global_step=0)
    recorder.on_train_start(other, None)
    recorder.on_train_batch_end(other, SimpleNamespace(train_config=config.train), None, None, 0)
    assert list(tmp_path.iterdir()) == []


def test_modes_and_random_states_are_put_back(whole):
    model = load_model(whole).train()
    model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = torch.random.get_rng_state()

    def fail():
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), _undisturbed(model, torch.device("cpu")):
        fail()
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.random.get_rng_state(), state)


def test_recorded_masses_are_the_dense_attention_of_the_recorded_heads(whole, config):
    model, tokens = load_model(whole), torch.arange(128)[None] % 257
    with torch.no_grad(), record(model) as seen:
        model(tokens)
    one = seen["layers.1.attention.select"]
    mass = block_mass(one.q, one.k, block_size=8, num_groups=2).numpy()
    found = observe(model, tokens, config)
    picked = np.take_along_axis(mass, np.maximum(found["selected"][1], 0).astype(np.int64), -1)
    expected = np.where(found["selected"][1] < 0, np.nan, picked)
    np.testing.assert_allclose(found["mass"][1], expected, rtol=1e-5)


def test_a_fork_records_from_its_first_step_on(corpus, tmp_path):
    stem = tiny_run(corpus, arm="stem", model={"attention": "dense"}, train={"stop_at": 6})
    fit(stem, tmp_path / "runs")
    fork = tiny_run(
        corpus, arm="fork", train={"fork_from": arm_folder(stem), "fork_step": 6, "proxy_warmup_steps": 3, "steps": 12}
    )
    data = open_selections(fit(fork, tmp_path / "runs"))
    assert data["step"].values.tolist() == [6, 9, 12]
    assert data["phase"].values.tolist() == ["warmup", "sparse", "sparse"]


def test_half_precision_runs_record_what_they_select(corpus, tmp_path):
    config = tiny_run(corpus, train={"precision": "bf16", "steps": 2, "proxy_warmup_steps": 1})
    data = open_selections(fit(config, tmp_path / "runs")).isel(step=-1)
    held = data["selected"].values >= 0
    assert (np.isfinite(data["mass"].values) == held).all()
    assert (np.isfinite(data["score"].values) == held).all()
    total = np.nansum(data["teacher_mass"].values.astype(np.float32), -1)
    assert ((total > 0.1) & (total < 1.003)).all()
    model, tokens = load_model(Run.of(config, tmp_path / "runs")), torch.from_numpy(data["tokens"].values.astype(int))
    with torch.autocast("cpu", torch.bfloat16):
        seen = observe(model, tokens, config, rows=2)
    np.testing.assert_array_equal(data["selected"].values, seen["selected"])


def test_the_recall_task_is_its_own_tokenizer(corpus, tmp_path):
    recall = RecallConfig(block_size=8, pairs=12, num_keys=16)
    data = {"source": "recall", "path": "", "validation_fraction": 0.1, "recall": recall}
    run = fit(tiny_run(corpus, train={"steps": 2, "warmup_steps": 1}, data=data), tmp_path / "runs")
    assert open_selections(run).attrs["tokenizer"] == "recall"


def test_the_tokenizer_lies_beside_the_log(corpus, tmp_path):
    bpe = Tokenizer(models.BPE(vocab={MARK: 0, **{c: i + 1 for i, c in enumerate("abcdefgh\u0120")}}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens([MARK])
    bpe.save(str(tmp_path / "mine.json"))
    data = {"tokenizer": str(tmp_path / "mine.json")}
    run = fit(tiny_run(corpus, train={"steps": 2, "warmup_steps": 1}, data=data), tmp_path / "runs")
    assert open_selections(run).attrs["tokenizer"] == "tokenizer.json"
    assert (run.path / "tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()

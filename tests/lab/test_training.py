"""Training runs: what they leave behind, and that stopping, resuming and splitting change nothing."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import tiny_run, write_corpus

from msa_lab import callbacks
from msa_lab.config import RunConfig
from msa_lab.learner import Learner, Parts, schedule
from msa_lab.runs import Run
from msa_lab.train import TrainingStoppedError, train

pytestmark = pytest.mark.xdist_group("training")  # its study is trained once, not once a worker


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def fit(config: RunConfig, folder: Path) -> Run:
    return train(config, root=folder, cache=folder.parent / "cache", progress=False, wandb="disabled")


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next training run end after `step`, as a signal would."""
    kept = callbacks.StopOnSignal.on_train_batch_end

    def receive(self: callbacks.StopOnSignal, trainer: object, *rest: object) -> None:
        self.received |= trainer.global_step == step  # pyright: ignore[reportAttributeAccessIssue]
        kept(self, trainer, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(callbacks.StopOnSignal, "on_train_batch_end", receive)


def numbers(run: Run) -> pd.DataFrame:
    frame = run.metrics
    return frame[~frame.name.isin(["tokens_per_second", "mfu"])].reset_index(drop=True)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit(tiny_run(corpus), tmp_path_factory.mktemp("whole") / "runs")


def test_a_run_leaves_its_record(whole: Run) -> None:
    assert whole.finished
    metrics = whole.metrics.pivot(index="step", columns="name", values="value").drop(index=0)
    assert list(metrics.index) == list(range(1, 13))
    wanted = ["train/loss", "train/ce", "train/kl", "grad_norm/base", "grad_norm/proxy", "lr/base", "lr/proxy", "phase"]
    wanted += [f"train/kl/layer{layer}" for layer in (0, 1)]
    wanted += [f"train/kl/layer{layer}/proxy{p}" for layer in (0, 1) for p in (0, 1)]
    assert metrics[wanted].notna().all(axis=None)
    assert list(metrics.phase) == [0.0] * 4 + [1.0] * 8
    layers = metrics[["train/kl/layer0", "train/kl/layer1"]].sum(axis=1)
    pd.testing.assert_series_equal(metrics["train/kl"], layers, check_names=False)
    assert (metrics["train/kl"] > 0).all()
    assert metrics["validation/bits_per_byte"].dropna().index.tolist() == [6, 12]
    result = whole.result
    assert result["bits_per_byte"] == metrics["validation/bits_per_byte"][12]
    assert result["path"] == "reference"
    assert result["path_reason"]
    assert result["tokens"] == 12 * 4 * 128
    assert sum(row["nats"] for row in result["rows"]) > 0
    assert result["parameters"]["total"] == sum(p.numel() for p in Learner(*_hparams(whole)).model.parameters())


def _hparams(run: Run) -> tuple:
    held = torch.load(run.path / "last.ckpt", weights_only=True)["hyper_parameters"]
    return held["config"], held["backend"]


def test_the_logged_kl_is_the_reference_value(whole: Run, corpus: Path) -> None:
    from msa_lab.data import open_data

    config = whole.config
    data = open_data(config.data, whole.path.parents[3].parent / "cache")
    model = Learner(*_hparams(whole)).model
    model.initialise(config.seed)
    part = next(iter(Parts(data, config, 0, 0, 1)))
    kl = model(part.inputs, sparse=False, with_kl=True).kl.detach()
    logged = whole.metrics.pivot(index="step", columns="name", values="value").loc[1]
    for layer in (0, 1):
        for proxy in (0, 1):
            assert logged[f"train/kl/layer{layer}/proxy{proxy}"] == pytest.approx(float(kl[layer, proxy]), rel=1e-5)


def test_checkpoints_load_without_unpickling(whole: Run) -> None:
    learner = Learner.load_from_checkpoint(whole.path / "last.ckpt", weights_only=True)
    assert learner.run_config == whole.config


@pytest.mark.parametrize("step", [3, 4, 7])
def test_resuming_is_bit_for_bit_the_uninterrupted_run(
    step: int, whole: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 is the hand-over from warm-up to sparse; 7 lies after a checkpoint at 5, in the sparse phase.
    config = tiny_run(corpus)
    with monkeypatch.context() as patched:
        stop_at(step, patched)
        with pytest.raises(TrainingStoppedError, match=f"step {step} of 12"):
            fit(config, tmp_path / "runs")
    assert not Run.of(config, tmp_path / "runs").finished
    resumed = fit(config, tmp_path / "runs")
    pd.testing.assert_frame_equal(numbers(resumed), numbers(whole))
    ours, theirs = (torch.load(r.path / "last.ckpt", weights_only=True) for r in (resumed, whole))
    for name, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], value), name
    for i, state in theirs["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            assert torch.equal(ours["optimizer_states"][0]["state"][i][key], value), (i, key)


def test_a_killed_run_repeats_only_what_no_checkpoint_held(
    whole: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(corpus)

    def die(self: object, trainer: object, *rest: object) -> None:
        if trainer.global_step == 8:  # pyright: ignore[reportAttributeAccessIssue]
            raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(callbacks.StopOnSignal, "on_train_batch_end", die)
        with pytest.raises(RuntimeError, match="killed"):
            fit(config, tmp_path / "runs")
    run = Run.of(config, tmp_path / "runs")
    assert run.metrics.step.max() == 7
    with (run.path / "metrics.csv").open("a") as file:
        file.write("8,train/l")  # a line torn by the kill
    pd.testing.assert_frame_equal(numbers(fit(config, tmp_path / "runs")), numbers(whole))


def test_a_second_launch_returns_the_finished_run(whole: Run, corpus: Path) -> None:
    before = (whole.path / "result.json").stat().st_mtime_ns
    again = fit(tiny_run(corpus), whole.path.parents[2])
    assert again == whole
    assert (whole.path / "result.json").stat().st_mtime_ns == before


def test_a_foreign_checkpoint_is_refused(whole: Run, corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, train={"lr": 1e-4})
    run = Run.of(config, tmp_path)
    run.write_config(config)
    (run.path / "last.ckpt").write_bytes((whole.path / "last.ckpt").read_bytes())
    with pytest.raises(ValueError, match=r"last\.ckpt: belongs to another config"):
        fit(config, tmp_path)


def test_a_folder_of_another_config_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus)
    run = Run.of(config, tmp_path)
    run.write_config(tiny_run(corpus, train={"lr": 1e-4}))
    with pytest.raises(ValueError, match="holds another config"):
        fit(config, tmp_path)


def test_a_second_process_in_the_same_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus)
    run = Run.of(config, tmp_path)
    with run.lock():
        code = (
            "import sys; from pathlib import Path; from msa_lab.runs import Run\n"
            "try:\n    with Run(Path(sys.argv[1])).lock(): print('got it')\nexcept ValueError as e: print(e)"
        )
        out = subprocess.run([sys.executable, "-c", code, run.path], capture_output=True, text=True, check=True)
    assert "another process is training this run" in out.stdout


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size=200: .* 257"):
        fit(tiny_run(corpus, model={"vocab_size": 200}), tmp_path)


def test_a_budget_that_covers_the_context_warns_and_marks_the_run(corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, model={"top_k_blocks": 16}, train={"steps": 2, "proxy_warmup_steps": 0})
    with pytest.warns(UserWarning, match="dense in all but name"):
        run = fit(config, tmp_path)
    assert run.result["hides_sparsity"]


@pytest.mark.parametrize("attention", ["dense", "msa", "window", "random"])
def test_splitting_a_batch_changes_no_gradient_and_no_logged_kl(attention: str, corpus: Path, tmp_path: Path) -> None:
    small = {"steps": 6, "proxy_warmup_steps": 3, "clip": 0.0, "proxy_clip": 0.0}
    runs = [
        fit(tiny_run(corpus, model={"attention": attention}, train={**small, "accumulate": n}), tmp_path)
        for n in (1, 4)
    ]
    one, four = (numbers(run) for run in runs)
    same = one.merge(four, on=["step", "name"], suffixes=("", "_split"))
    assert len(same) == len(one) == len(four)
    assert same.value.to_numpy() == pytest.approx(same.value_split.to_numpy(), rel=2e-4, abs=1e-6)
    first = same[same.step == 1]
    assert first.value.to_numpy() == pytest.approx(first.value_split.to_numpy(), rel=1e-5, abs=1e-7)


def test_without_kl_the_proxies_never_move_and_with_it_all_do(corpus: Path, tmp_path: Path) -> None:
    for weight, moves in ((0.0, False), (1.0, True)):
        run = fit(tiny_run(corpus, train={"kl_weight": weight, "weight_decay": 0.0}), tmp_path)
        trained = Learner.load_from_checkpoint(run.path / "last.ckpt", weights_only=True).model
        trained_proxies = dict(trained.proxy_parameters())
        fresh = Learner(*_hparams(run)).model
        for name, value in fresh.proxy_parameters():
            assert torch.equal(value, trained_proxies[name]) != moves, (weight, name)


def test_the_schedule_warms_up_holds_and_decays(corpus: Path) -> None:
    config = tiny_run(corpus, train={"steps": 100, "warmup_steps": 10, "decay_fraction": 0.2}).train
    values = [schedule(config, step) for step in range(101)]
    assert values[0] == pytest.approx(0.1)
    assert values[9] == values[10] == values[80] == 1.0
    assert values[90] == pytest.approx(0.1 + 0.9 * 0.5)
    assert values[100] == pytest.approx(0.1)
    proxy = [schedule(config, step, first=50) for step in range(50, 101)]
    assert proxy[0] == pytest.approx(0.1)
    assert proxy[10:30] == [1.0] * 20
    assert proxy[40] == values[90]


def test_a_signal_saves_and_says_how_to_go_on(corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, train={"steps": 5000, "checkpoint_every": 5000})
    run = Run.of(config, tmp_path)

    def interrupt_once_running() -> None:
        deadline = time.time() + 60
        while run.metrics.empty and time.time() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt_once_running, daemon=True).start()
    with pytest.raises(TrainingStoppedError, match="saved at step"):
        fit(config, tmp_path)
    assert (run.path / "last.ckpt").exists()
    assert not run.finished


def test_a_diverging_run_says_so(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        fit(tiny_run(corpus, train={"lr": 1e30, "clip": 0.0, "steps": 8}), tmp_path)


def test_a_run_killed_before_its_result_was_written_finishes_at_once(whole: Run, corpus: Path, tmp_path: Path) -> None:
    copied = Run.of(tiny_run(corpus), tmp_path / "runs")
    shutil.copytree(whole.path, copied.path)
    for name in ("result.json", "model.safetensors"):
        (copied.path / name).unlink()
    again = fit(tiny_run(corpus), tmp_path / "runs").result
    expected = whole.result
    for name in ("bits_per_byte", "rows", "tokens", "flops_total", "parameters"):
        assert again[name] == expected[name], name
    assert again["wall_seconds"] <= expected["wall_seconds"]


def test_another_corpus_is_refused_on_resume(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_corpus(tmp_path / "corpus")
    config = tiny_run(own, model={"attention": "dense"})
    with monkeypatch.context() as patched:
        stop_at(5, patched)
        with pytest.raises(TrainingStoppedError):
            fit(config, tmp_path / "runs")
    (own / "doc00.txt").write_text("another text " * 500)
    with pytest.raises(ValueError, match=r"trained on corpus .* or start under another study name"):
        fit(config, tmp_path / "runs")


def test_a_start_without_a_checkpoint_keeps_nothing_of_an_earlier_try(
    whole: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: object, trainer: object, *rest: object) -> None:
        raise RuntimeError("killed")

    config = tiny_run(corpus)
    with monkeypatch.context() as patched:
        patched.setattr(callbacks.StopOnSignal, "on_train_batch_end", die)
        with pytest.raises(RuntimeError, match="killed"):
            fit(config, tmp_path / "runs")
    assert (Run.of(config, tmp_path / "runs").metrics.step == 0).any()
    pd.testing.assert_frame_equal(numbers(fit(config, tmp_path / "runs")), numbers(whole))


def test_a_step_that_is_not_finite_is_never_saved(corpus: Path, tmp_path: Path) -> None:
    config = tiny_run(corpus, train={"lr": 1e30, "clip": 0.0, "steps": 8, "checkpoint_every": 1})
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        fit(config, tmp_path)
    held = torch.load(Run.of(config, tmp_path).path / "last.ckpt", weights_only=True)
    assert held["global_step"] == Run.of(config, tmp_path).metrics.step.max()

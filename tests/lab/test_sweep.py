import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_child import CHILD, began, config, fork, stand_in

from msa_lab import sweep as sweep_module
from msa_lab.runs import Run
from msa_lab.sweep import sweep


@pytest.fixture
def child(tmp_path, monkeypatch):
    return stand_in(tmp_path, monkeypatch)


def test_forks_wait_for_the_stem_of_their_seed_and_go_side_by_side(child, tmp_path):
    stem = config("stem", stop_at=200)
    arms = [fork(name, stem) for name in ("msa", "dense", "window")]
    assert sweep([*arms, stem], root=tmp_path / "runs", slots=3) == []
    end = float((Run.of(stem, tmp_path / "runs").path / "end").read_text())
    starts = [began(Run.of(arm, tmp_path / "runs"))[0] for arm in arms]
    ends = [float((Run.of(arm, tmp_path / "runs").path / "end").read_text()) for arm in arms]
    assert min(starts) > end
    assert max(starts) < min(ends)


def test_no_more_runs_than_slots_and_cores_are_shared(child, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    runs = [config("a", seed) for seed in range(3)]
    assert sweep(runs, root=tmp_path, slots=2) == []
    times = sorted(
        line.split() for run in runs for line in (Run.of(run, tmp_path).path / "times").read_text().split("\n") if line
    )
    ends = sorted(float((Run.of(run, tmp_path).path / "end").read_text()) for run in runs)
    assert {threads for _, threads, _ in times} == {"4"}
    assert float(times[2][0]) > ends[0]


def test_a_run_with_nothing_beside_it_gets_every_core_also_when_resumed(child, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    stem = config("stem", stop_at=200)
    study = [stem, fork("msa", stem), fork("dense", stem)]
    sweep(study[:1], root=tmp_path, slots=2)
    (Run.of(stem, tmp_path).path / "result.json").unlink()
    sweep(study, root=tmp_path, slots=2)
    (Run.of(study[2], tmp_path).path / "result.json").unlink()
    sweep(study, root=tmp_path, slots=2)
    used = [
        [line.split()[1] for line in (Run.of(run, tmp_path).path / "times").read_text().splitlines()] for run in study
    ]
    assert used == [["8", "8"], ["4"], ["4", "4"]]


def test_runs_go_to_one_gpu_each_and_a_freed_one_is_taken_again(child, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "visible_gpus", lambda: ["2", "GPU-5f"])
    runs = [config("a", seed) for seed in range(3)]
    assert sweep(runs, root=tmp_path) == []
    used = [(Run.of(run, tmp_path).path / "times").read_text().split()[2] for run in runs]
    assert sorted(used[:2]) == ["2", "GPU-5f"]
    assert used[2] in used[:2]


def test_small_runs_share_gpus_in_turn_when_there_are_more_slots(child, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "visible_gpus", lambda: ["0", "1"])
    runs = [config("a", seed) for seed in range(4)]
    assert sweep(runs, root=tmp_path, slots=4) == []
    lines = [(Run.of(run, tmp_path).path / "times").read_text().split() for run in runs]
    assert sorted(line[2] for line in lines) == ["0", "0", "1", "1"]
    ends = [float((Run.of(run, tmp_path).path / "end").read_text()) for run in runs]
    assert max(float(line[0]) for line in lines) < min(ends)


def test_visible_gpus_are_the_ones_that_the_environment_names(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert sweep_module.visible_gpus() == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sweep_module.visible_gpus() == ["0", "1"]


def test_finished_runs_are_not_started_again(child, tmp_path):
    runs = [config("a"), config("b")]
    assert sweep(runs, root=tmp_path) == []
    before = [began(Run.of(run, tmp_path)) for run in runs]
    (Run.of(runs[1], tmp_path).path / "result.json").unlink()
    assert sweep(runs, root=tmp_path) == []
    after = [began(Run.of(run, tmp_path)) for run in runs]
    assert [len(times) for times in before] == [1, 1]
    assert [len(times) for times in after] == [1, 2]


def test_a_failed_run_stops_only_its_own_forks(child, tmp_path, capsys):
    stem, bad = config("stem", stop_at=200), config("bad", stop_at=200)
    runs = [bad, fork("fork_of_bad", bad), stem, fork("msa", stem)]
    failures = sweep(runs, root=tmp_path, slots=1)
    assert [failure.run for failure in failures] == [Run.of(run, tmp_path) for run in runs[:2]]
    assert failures[0].reason == "ValueError: data.path='x': no such folder"
    assert failures[1].reason == "not run, because the run that it forks from (bad seed0) did not finish"
    assert all(Run.of(run, tmp_path).finished for run in runs[2:])
    shown = capsys.readouterr().out
    assert "bad seed0: failed: ValueError" in shown
    assert "msa seed0: finished after" in shown
    assert "loss 1.250" in shown


def test_the_last_line_of_an_earlier_attempt_is_not_taken_for_this_ones(child, tmp_path):
    run = Run.of(config("quiet"), tmp_path)
    child.write_text("import sys; sys.exit(3)")
    run.path.mkdir(parents=True)
    (run.path / "log.txt").write_text("an old complaint\n")
    assert sweep([config("quiet")], root=tmp_path)[0].reason == "ended with exit code 3"


def test_one_folder_for_two_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="2 runs share the folder s/a-"):
        sweep([config("a"), config("a")], root=tmp_path)


def test_a_folder_that_holds_another_config_fails_alone(child, tmp_path):
    runs = [config("a"), config("b")]
    Run.of(runs[0], tmp_path).write_config(replace(runs[0], seed=5))
    failures = sweep(runs, root=tmp_path)
    assert [failure.run.path.parent.name[0] for failure in failures] == ["a"]
    assert "holds another config" in failures[0].reason
    assert Run.of(runs[1], tmp_path).finished


SWEEP = """
import sys
sys.path.insert(0, {tests!r})
from sweep_child import config, sweep_module
sweep_module.TRAIN = (sys.executable, {child!r})
sweep_module.visible_gpus = list
sweep_module.sweep([config("slow1"), config("slow2")], root={root!r}, slots=2)
"""


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_children_save_and_end_when_the_sweep_is_interrupted_or_killed(child, tmp_path, blow):
    root = tmp_path / "runs"
    code = SWEEP.format(tests=str(Path(__file__).parent), child=str(child), root=str(root))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    paths = [Run.of(config(arm), root).path for arm in ("slow1", "slow2")]
    _wait(lambda: all((path / "metrics.csv").exists() for path in paths))
    parent.send_signal(blow)
    parent.wait(20)
    parent.stderr.close()
    _wait(lambda: all((path / "last.ckpt").exists() for path in paths))
    child.write_text(CHILD.replace("time.sleep(60)", "pass"))
    assert sweep([config("slow1"), config("slow2")], root=root, live=False) == []
    assert "again" in (paths[0] / "log.txt").read_text()


def test_a_restart_waits_for_what_is_still_saving(child, tmp_path):
    run = Run.of(config("a"), tmp_path)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from msa_lab.runs import Run; from pathlib import Path\n"
            "with Run(Path(sys.argv[1])).lock(): print(1, flush=True); time.sleep(1.5)",
            str(run.path),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    held = time.time()
    assert sweep([config("a")], root=tmp_path) == []
    assert began(run)[0] - held > 1.2
    holder.wait()
    holder.stdout.close()


def test_bars_move_on_a_terminal(child, tmp_path, capsys):
    assert sweep([config("msa"), config("bad")], root=tmp_path, live=True)
    assert "msa seed0: finished" in capsys.readouterr().out


def _wait(done, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)

"""The cluster's side of a sweep, on a real Slurm that the tests start themselves."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import slurm_cluster

from msa_lab import slurm
from msa_lab.config import RunConfig, TrainConfig
from msa_lab.runs import Run, arm_folder, find
from msa_lab.slurm import sweep_on_slurm
from msa_lab.slurm_options import SlurmOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "everything is here"),
]

CHILD = textwrap.dedent(
    """
    import os, signal, sys, time
    from pathlib import Path

    folder = Path(sys.argv[2]).parent
    arm = folder.parent.name
    begun = (folder / "last.ckpt").exists()

    def stop(*_):
        (folder / "last.ckpt").write_text("saved")
        sys.exit(130)

    signal.signal(signal.SIGTERM, stop)
    with (folder / "starts").open("a") as file:
        file.write(f"{time.time()} {os.environ.get('SLURM_JOB_ID')} {os.environ['OMP_NUM_THREADS']}\\n")
    print("training", "again" if begun else "", flush=True)
    with (folder / "metrics.csv").open("a") as file:
        file.write("step,name,value\\n10,train/ce,2.5\\n")
    if arm.startswith("bad"):
        print("FloatingPointError: step 7: the loss is not finite")
        sys.exit(1)
    if arm.startswith("slow") and not begun:
        time.sleep(120)
    if arm.startswith("steady"):
        time.sleep(8)
    if arm.startswith("once") and not (folder / "starts").read_text().count("\\n") > 1:
        time.sleep(120)
    time.sleep(0.5)
    (folder / "last.ckpt").write_text("end")
    (folder / "end").write_text(str(time.time()))
    (folder / "result.json").write_text("{}")
    """
)
CPU = SlurmOptions(partition="low", time=5, gpus=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def child(cluster, tmp_path, monkeypatch):
    """The cluster with both nodes up, and a stand-in for training."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(slurm, "TRAIN", (sys.executable, str(script)))
    yield cluster
    cluster.run("scancel", f"--user={os.getuid()}")
    wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), "the queue does not empty")


def config(arm: str, seed: int = 0, **train) -> RunConfig:
    return RunConfig(study="s", arm=arm, seed=seed, train=TrainConfig(**train))


def fork(arm: str, stem: RunConfig) -> RunConfig:
    return config(arm, stem.seed, fork_from=arm_folder(stem), fork_step=200)


def starts(run: Run) -> list[list[str]]:
    path = run.path / "starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def job_of(run: Run) -> str:
    return json.loads((run.path / "slurm.json").read_text())["job_id"]


def wait_for(done, complaint: str, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, complaint
        time.sleep(0.2)


class Sweeping:
    """A sweep in a thread of its own, so that the test can disturb it."""

    def __init__(self, runs, root: Path, options: SlurmOptions = CPU) -> None:
        def go() -> None:
            self.failures = sweep_on_slurm(runs, options, root=root, live=False, poll=0.5, patience=4.0)

        self.thread = threading.Thread(target=go)
        self.thread.start()

    def result(self):
        self.thread.join(200)
        assert not self.thread.is_alive(), "the sweep does not end"
        return self.failures


def test_forks_depend_on_their_stem_and_a_failed_run_stops_only_its_own(child, tmp_path, capsys):
    stem, bad = config("stem", stop_at=200), config("bad", stop_at=200)
    runs = [fork("msa", stem), fork("fork_of_bad", bad), bad, fork("dense", stem), stem]
    failures = sweep_on_slurm(runs, CPU, root=tmp_path, live=False, poll=0.5, patience=4.0)
    assert {failure.run: failure.reason for failure in failures} == {
        Run.of(runs[1], tmp_path): "not run, because the run that it forks from (bad seed0) did not finish",
        Run.of(bad, tmp_path): "FloatingPointError: step 7: the loss is not finite",
    }
    end = float((Run.of(stem, tmp_path).path / "end").read_text())
    for name in ("msa", "dense"):
        (start,) = starts(Run.of(fork(name, stem), tmp_path))
        assert float(start[0]) > end
    assert len({job_of(Run.of(run, tmp_path)) for run in runs}) == 5
    assert not starts(Run.of(runs[1], tmp_path))
    # Nothing waits for ever for a stem that will not come.
    wait_for(lambda: not child.run("squeue", "--noheader").stdout.strip(), "a job stays in the queue", 20)
    assert "bad seed0: failed: FloatingPointError" in capsys.readouterr().out
    states = {row["run"].split("-")[0]: row["state"] for row in json.loads((tmp_path / "s/sweep.json").read_text())}
    assert states == {
        "msa": "finished",
        "dense": "finished",
        "stem": "finished",
        "bad": "failed",
        "fork_of_bad": "failed",
    }


def test_a_whole_study_goes_through_the_cluster_and_ends_with_its_report(cluster, tmp_path):
    (tmp_path / "study.py").write_text("from msa_lab.demo import tiny_runs\n\n\ndef runs():\n    return tiny_runs()\n")
    command = [sys.executable, "-m", "msa_lab.cli", "sweep", ".", "--executor", "slurm", "--slurm.gpus", "0"]
    more = ["--slurm.partition", "low", "--slurm.time", "20", "--slurm.more", "{comment: tiny, cpus-per-task: 1}"]
    done = subprocess.run(
        [*command, *more], cwd=tmp_path, env=os.environ | cluster.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "4 runs: 1 queued, 3 waiting" in done.stdout
    runs = {run.config.arm: run for run in find(tmp_path / "runs")}
    assert set(runs) == {"stem", "msa", "dense", "window"}
    assert len({job_of(run) for run in runs.values()}) == 4
    scripts = {arm: next((run.path / "slurm").glob("*.sh")).read_text() for arm, run in runs.items()}
    assert f"--dependency=afterok:{job_of(runs['stem'])}\n" in scripts["window"]
    assert "--dependency" not in scripts["stem"]
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()


def test_a_preempted_run_saves_and_goes_on(child, tmp_path, capsys):
    runs = [config("slow", seed) for seed in range(2)]
    sweeping = Sweeping(runs, tmp_path)
    folders = [Run.of(run, tmp_path) for run in runs]
    wait_for(lambda: all(starts(run) for run in folders), "the runs do not start")
    child.run("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 3")
    assert sweeping.result() == []
    for run in folders:
        assert len(starts(run)) == 2
        assert "again" in (run.path / "log.txt").read_text()
    assert "back in the queue" in capsys.readouterr().out


def test_a_run_whose_time_is_up_saves_and_goes_on_and_one_that_gains_nothing_is_named(child, tmp_path):
    runs = [config("slow"), config("slow", 1), config("fruitless")]
    script = Path(slurm.TRAIN[1])
    hang = 'if arm.startswith("fruitless"):\n    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n    time.sleep(120)\n'
    script.write_text(CHILD.replace('if arm.startswith("bad")', f'{hang}if arm.startswith("bad")'))
    timed, told, fruitless = (Run.of(run, tmp_path) for run in runs)
    sweeping = Sweeping(runs, tmp_path)
    wait_for(lambda: starts(timed) and starts(told), "the runs do not start")
    child.run("scancel", "--signal=USR2", job_of(timed))
    child.run("scancel", "--signal=TERM", job_of(told))  # as when a node is about to be switched off
    for n in range(1, 4):
        wait_for(lambda n=n: len(starts(fruitless)) == n, f"start {n} does not come")
        child.run("scancel", "--signal=USR2", job_of(fruitless))
    (failure,) = sweeping.result()
    assert failure.run == fruitless
    assert failure.reason == "nothing new was saved in 3 starts of this job; give it more slurm.time"
    for run in (timed, told):
        assert len(starts(run)) == 2
        assert run.finished


@pytest.mark.parametrize("requeue", [True, False])
def test_a_vanished_node_costs_one_run_its_place_at_most(child, tmp_path, capsys, requeue):
    runs = [config("once"), config("steady"), config("quick")]
    options = CPU if requeue else replace(CPU, more={"no-requeue": True})
    sweeping = Sweeping(runs, tmp_path, options)
    lost, other, quick = (Run.of(run, tmp_path) for run in runs)
    wait_for(lambda: starts(lost) and starts(other), "the runs do not start")
    where = child.run("squeue", "--noheader", "--format=%N", f"--jobs={job_of(lost)}").stdout.strip()
    child.kill_node(where)
    try:
        wait_for(lambda: child.state(where).startswith("down"), "nobody notices")
        wait_for(lambda: quick.finished, "the rest does not go on")
    finally:
        child.start_node(where)
    failures = sweeping.result()
    if requeue:
        assert failures == []
        assert "back in the queue" in capsys.readouterr().out
    else:
        assert [failure.run for failure in failures] == [lost]
        assert f"its node {where} vanished" in failures[0].reason


def test_a_restarted_sweep_watches_the_jobs_that_are_there(child, tmp_path, capsys):
    runs = [config("once")]
    (run,) = (Run.of(each, tmp_path) for each in runs)

    class StoppedError(Exception):
        pass

    def stop(_: float) -> None:
        if starts(run):
            raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm.time, "sleep", stop)
        with pytest.raises(StoppedError):
            sweep_on_slurm(runs, CPU, root=tmp_path, live=False, poll=0.5)
    first = job_of(run)
    sweeping = Sweeping(runs, tmp_path)
    wait_for(lambda: "is running already" in capsys.readouterr().out, "it does not see the job")
    child.run("scancel", "--signal=USR2", first)
    assert sweeping.result() == []
    assert job_of(run) == first


def test_a_refused_submission_is_named_in_slurms_words(child, tmp_path):
    options = replace(CPU, partition="nowhere")
    (failure,) = sweep_on_slurm([config("a")], options, root=tmp_path, live=False)
    assert "could not be submitted" in failure.reason
    assert "Invalid partition" in failure.reason
    assert "\n" not in failure.reason

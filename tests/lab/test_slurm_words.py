"""What a sweep asks of Slurm and understands of its answers, with stand-ins for Slurm's commands."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from sweep_child import config, fork

from msa_lab import slurm_job
from msa_lab.cli import main
from msa_lab.runs import Run
from msa_lab.slurm import look, sweep_on_slurm
from msa_lab.slurm_job import TrainingJob
from msa_lab.slurm_options import SlurmOptions

submitit = pytest.importorskip("submitit")


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """sbatch numbers its jobs and keeps their scripts; squeue prints the file `queue`."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def put(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        (folder / name).chmod(0o755)

    put("srun", "exit 1")
    put("squeue", "cat queue")
    put("sbatch", 'n=$(ls job* 2>/dev/null | wc -l); cp "$1" job$((n + 1)); echo "Submitted batch job $((n + 1))"')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return put


def asked(path) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in path.read_text().splitlines() if line.startswith("#SBATCH")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def test_options_reach_sbatch_as_they_are_and_forks_depend_on_their_stem(commands, tmp_path):
    stem = config("stem", stop_at=200)
    (tmp_path / "queue").write_text("1|FAILED|None||x\n2|FAILED|None||x\n3|FAILED|None||x\n")
    more = {"qos": "high", "mem": "32G", "exclusive": True}
    options = SlurmOptions(partition="gpu", account="lab", time=90, gpus=2, cpus=8, more=more)
    sweep_on_slurm([fork("msa", stem), stem], options, root=tmp_path / "runs", live=False, poll=0.1, patience=0.0)
    first, second = asked(tmp_path / "job1"), asked(tmp_path / "job2")
    expected = {"partition": "gpu", "account": "lab", "time": "90", "gpus-per-node": "2", "cpus-per-task": "8"}
    expected |= {"qos": "high", "mem": "32G", "exclusive": "", "requeue": "", "kill-on-invalid-dep": "yes"}
    assert expected.items() <= first.items()
    assert first["job-name"].startswith("s/stem-")
    assert first["job-name"].endswith("/seed0")
    assert "dependency" not in first
    assert second["dependency"] == "afterok:1"
    job = submitit.slurm.slurm.SlurmJob(Run.of(stem, tmp_path / "runs").path / "slurm", "1").submission().function
    assert job.command[-2:] == ["--devices", "2"]


def test_what_is_not_asked_for_is_left_to_the_cluster():
    assert set(SlurmOptions(gpus=0).parameters()) == {"time", "additional_parameters"}
    kept = SlurmOptions(more={"no-requeue": True}).parameters()["additional_parameters"]
    assert kept == {"kill-on-invalid-dep": "yes", "no-requeue": True}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("NODE_FAIL", "Slurm job 1: its node node7 vanished; it said last: at step 9"),
        ("OUT_OF_MEMORY", "Slurm job 1: the memory it asked for was not enough; try a larger mem in slurm.more"),
        ("TIMEOUT", "Slurm job 1: its time was up before it had saved; try a longer slurm.time"),
        ("CANCELLED", "Slurm job 1: it was cancelled"),
        ("PREEMPTED", "Slurm job 1: it was preempted, and this cluster does not put jobs back into the queue"),
        ("FAILED", "at step 9"),
        ("", "Slurm job 1: Slurm does not know it any more"),
    ],
)
def test_a_job_that_is_over_without_a_result_is_named_by_its_state(commands, tmp_path, state, reason, monkeypatch):
    run = Run.of(config("a"), tmp_path)
    run.write_config(config("a"))
    (run.path / "log.txt").write_text("an old complaint\n")
    commands("squeue", f"echo 'at step 9' >> {run.path}/log.txt; cat queue")
    (tmp_path / "queue").write_text(f"1|{state}|None|node7|x\n" if state else "")
    (failure,) = sweep_on_slurm([config("a")], root=tmp_path, live=False, poll=0.1, patience=0.0)
    assert failure.reason.startswith(reason)
    assert "an old complaint" not in failure.reason


def test_a_job_that_says_nothing_is_not_given_the_words_of_an_earlier_one(commands, tmp_path):
    run = Run.of(config("a"), tmp_path)
    run.write_config(config("a"))
    (run.path / "log.txt").write_text("an old complaint\n")
    (tmp_path / "queue").write_text("1|FAILED|None|node7|x\n")
    (failure,) = sweep_on_slurm([config("a")], root=tmp_path, live=False, poll=0.1, patience=0.0)
    assert failure.reason == "Slurm job 1 ended as FAILED and said nothing"
    (run.path / "slurm" / "2_0_log.err").write_text("srun: error: python: no such file\n")
    (tmp_path / "queue").write_text("2|FAILED|None|node7|x\n")
    (failure,) = sweep_on_slurm([config("a")], root=tmp_path, live=False, poll=0.1, patience=0.0)
    assert failure.reason == "srun: error: python: no such file"


def test_a_controller_that_does_not_answer_is_waited_for(commands, tmp_path, capsys):
    run = Run.of(config("a"), tmp_path)
    text = f'if [ -e asked ]; then echo "{{}}" > {run.path}/result.json; echo "1|COMPLETED|None||x"; exit 0; fi\n'
    commands("squeue", f"{text}touch asked; echo 'slurm_load_jobs error: Unable to contact controller' >&2; exit 1")
    assert sweep_on_slurm([config("a")], root=tmp_path, live=False, poll=0.1) == []
    assert "Slurm does not answer (slurm_load_jobs error: Unable to contact controller)" in capsys.readouterr().out


def test_jobs_that_slurm_has_forgotten_are_missing_and_no_error(commands, tmp_path):
    commands("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert look(["12"]) == {}
    commands("squeue", "echo '12|PENDING|Resources||s/a-1/seed0'; echo '13|RUNNING|None|node[1-2]|with|bar'")
    seen = look(["12", "13"])
    assert seen["12"] == ("PENDING", "Resources", "", "s/a-1/seed0")
    assert seen["13"] == ("RUNNING", "None", "node[1-2]", "with|bar")


def test_without_slurm_the_request_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text("from msa_lab.demo import tiny_runs\ndef runs():\n    return tiny_runs()\n")
    assert main(["sweep", ".", "--executor", "slurm"]) == 2
    assert capsys.readouterr().err.startswith("msa-lab: executor=slurm: there is no sbatch here")
    assert main(["sweep", ".", "--executor", "slurm", "--slots", "2"]) == 2
    assert "slots=2: is for this machine" in capsys.readouterr().err
    assert main(["sweep", ".", "--executor", "slurm", "--slurm.time", "0"]) == 2
    assert "slurm.time=0: counts minutes and must be at least 1; try 240" in capsys.readouterr().err


JOB = """
import signal, sys
from msa_lab.slurm_job import TrainingJob
import msa_lab.slurm_job
msa_lab.slurm_job.slurm_state = lambda job_id: {state!r}
job = TrainingJob([sys.executable, "-c", {child!r}], {folder!r})
def submitits(number, frame):
    print("checkpoint", job.checkpoint().function.fruitless, flush=True)
    sys.exit(99)
signal.signal(signal.SIGUSR2, submitits)
job()
"""
CHILD = """
import os, signal, sys, time
def stop(*_):
    {saves}
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
open("up", "w").write(" ".join(name for name in os.environ if name.startswith("SLURM")))
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("number", "state", "saves", "code", "said"),
    [
        (signal.SIGUSR2, "RUNNING", True, 99, "checkpoint 0\n"),
        (signal.SIGUSR2, "RUNNING", False, 99, "checkpoint 1\n"),
        (signal.SIGTERM, "RUNNING", True, 99, "checkpoint 0\n"),
        (signal.SIGTERM, "CANCELLED", True, 1, ""),
    ],
)
def test_a_job_saves_before_it_is_put_back_and_is_not_when_it_was_cancelled(tmp_path, number, state, saves, code, said):
    child = CHILD.format(saves='open("last.ckpt", "w")' if saves else "pass")
    code_of_job = JOB.format(state=state, child=child, folder=str(tmp_path))
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "3"}
    job = subprocess.Popen(
        [sys.executable, "-c", code_of_job], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 30
    while not (tmp_path / "up").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.2)
    job.send_signal(number)
    out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (code, said)
    assert (tmp_path / "last.ckpt").exists() == saves
    assert (tmp_path / "up").read_text() == ""


def test_a_job_that_gains_nothing_gives_up_and_says_why(tmp_path):
    job = TrainingJob(["true"], str(tmp_path), started=time.time())
    for _ in range(slurm_job.MAX_FRUITLESS - 1):
        again = job.checkpoint()
        assert again is not None
        job = again.function
    assert job.checkpoint() is None
    assert "nothing new was saved in 3 starts of this job" in (tmp_path / "log.txt").read_text()
    (tmp_path / "last.ckpt").touch()
    gained = job.checkpoint()
    assert gained is not None
    assert gained.function.fruitless == 0


def test_a_failed_run_ends_its_job_as_failed_with_its_own_words(tmp_path):
    child = "print('step 7: the loss is not finite'); raise SystemExit(1)"
    job = TrainingJob([sys.executable, "-c", child], str(tmp_path))
    with pytest.raises(RuntimeError, match="step 7: the loss is not finite"):
        job()
    killed = TrainingJob([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], str(tmp_path))
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        killed()
    assert "killed by SIGKILL" in (tmp_path / "log.txt").read_text().splitlines()[-1]


def test_a_finished_run_is_not_trained_again_by_a_late_job(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({}))
    TrainingJob(["/nowhere"], str(tmp_path))()

"""What a sweep shows of its runs, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console
from rich.live import Live
from sweep_child import config, fork

from msa_lab import sweep_progress
from msa_lab.sweep_jobs import FAILED, FINISHED, QUEUED, Job, plan
from msa_lab.sweep_progress import Board, in_words, open_board


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sweep_progress.time, "monotonic", clock)
    return clock


def jobs_of(root) -> list[Job]:
    stem = config("stem", stop_at=200)
    return plan([fork("msa", stem), fork("dense", stem), stem, config("alone"), config("bad")], root)


def log(job: Job, step: int, **values: float) -> None:
    job.run.path.mkdir(parents=True, exist_ok=True)
    with (job.run.path / "metrics.csv").open("a") as file:
        file.write("".join(f"{step},{name},{value}\n" for name, value in values.items()))


def drawn(board: Board) -> list[str]:
    told = io.StringIO()
    console = Console(file=told, width=90)
    console.print(board.table())
    return told.getvalue().splitlines()


def test_the_table_tells_every_state_and_the_time_left(tmp_path, clock):
    jobs = jobs_of(tmp_path)
    msa, _, stem, alone, bad = jobs
    board = Board(jobs, 2, None)
    board.start(stem)
    bad.fail("step 7: the loss is not finite" + " and so on" * 20)
    alone.state = FINISHED
    clock.now += 30  # preparing: no step yet, and so no speed
    log(stem, 20, ce=3.0)
    board.update(stem)
    assert board.shown[stem].seconds_left(200) is None
    clock.now += 10
    log(stem, 70, **{"train/ce": 2.5})
    board.update(stem)
    assert board.shown[stem].seconds_left(200) == pytest.approx(26.0)
    lines = drawn(board)
    assert lines[0].startswith("5 runs: 1 running, 2 waiting, 1 finished, 1 failed")
    rows = {" ".join(line.split()[:2]): line for line in lines[2:]}
    assert list(rows) == ["stem seed0", "bad seed0", "msa seed0", "dense seed0", "alone seed0"]
    assert rows["stem seed0"].split()[2:6] == ["running", "70/200", "26", "s"]
    assert "loss 2.500" in rows["stem seed0"]
    assert "failed" in rows["bad seed0"]
    assert "step 7: the loss is not finite" in rows["bad seed0"]
    assert rows["msa seed0"].split()[2:] == ["waiting", "for", "stem", "seed0"]
    assert msa.state != QUEUED


def test_the_time_left_of_a_sweep_follows_from_the_speed_of_any_run(tmp_path, clock):
    jobs = jobs_of(tmp_path)
    _, _, stem, alone, bad = jobs
    board = Board(jobs, 1, None)
    bad.state = alone.state = FAILED
    board.start(stem)
    assert board.seconds_left() is None
    assert board.headline() == "5 runs: 1 running, 2 waiting, 2 failed"
    log(stem, 10, tokens_per_second=8 * 1024 * 2.0)
    board.update(stem)
    board._estimate()
    clock.now += 10
    log(stem, 30, tokens_per_second=8 * 1024 * 2.0)
    board.update(stem)
    forks = sum(board.estimates[job] or 0.0 for job in jobs[:2])
    assert board.seconds_left() == pytest.approx(170 / 2 + forks)
    assert 150 < forks < 250  # 200 steps each, about as fast
    board.slots = 2
    assert board.seconds_left() < 170 / 2 + forks - 50


def test_a_table_that_is_too_long_for_the_screen_counts_the_rest(tmp_path):
    jobs = plan([config("a", seed) for seed in range(30)], tmp_path)
    lines = drawn(Board(jobs, 1, Live(console=Console(file=io.StringIO(), width=100, height=16))))
    assert len(lines) <= 16
    assert lines[-1].strip() == "and 20 more"


def test_lines_tell_how_far_a_run_is_now_and_then(tmp_path, clock, capsys):
    jobs = plan([config("a")], tmp_path)
    with open_board(jobs, 1, False) as board:
        board.start(jobs[0])
        for step in range(10, 60, 10):
            clock.now += 20
            log(jobs[0], step, **{"train/ce": 2.0})
            board.update(jobs[0])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a seed0: started, step 0 of 400"
    assert lines[1] == "a seed0: step 20 of 400  loss 2.000  left 13 min"
    assert lines[2] == "a seed0: step 40 of 400  loss 2.000  left 12 min"


def test_a_state_that_cannot_be_stored_ends_nothing(tmp_path, capsys, monkeypatch):
    def full(jobs):
        raise OSError(28, "No space left on device", "sweep.json")

    monkeypatch.setattr(sweep_progress, "write_record", full)
    jobs = plan([config("a")], tmp_path)
    with open_board(jobs, 1, False) as board:
        for state in (FINISHED, FAILED):
            jobs[0].state = state
            board.turn()
    assert capsys.readouterr().out.count("No space left on device") == 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (89, "89 s"), (600, "10 min"), (5399, "90 min"), (9000, "2.5 h"), (2e5, "2.3 days")],
)
def test_times_are_easy_to_read(seconds, words):
    assert in_words(seconds) == words

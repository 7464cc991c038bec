"""What a sweep costs is told before it starts, by the formulas of the budget and by speeds that were measured."""

import re
from dataclasses import replace

import pytest
from sweep_child import config, fork

from msa_lab.budget import flops_per_token
from msa_lab.cli import main
from msa_lab.config import RunConfig
from msa_lab.cost import Assumed, Speeds, makespan, measured_speed, own_cost
from msa_lab.demo import runs as demo
from msa_lab.dry_run import format_plan
from msa_lab.runs import Run


def finish(run: RunConfig, root, speed: float) -> Run:
    folder = Run.of(run, root)
    folder.write_config(run)
    folder.write_json("result.json", {"tokens_per_second": speed})
    (folder.path / "last.ckpt").touch()
    return folder


def test_a_fork_costs_what_it_trains_itself_dense_in_its_warm_up():
    stem, msa, *_ = demo()
    per_step = 4 * 1024
    dense = flops_per_token(stem.model, 1024).training.total
    assert own_cost(stem) == (240 * per_step, pytest.approx(240 * per_step * dense))
    warm, sparse = (flops_per_token(msa.model, 1024, phase=phase).training.total for phase in ("warmup", "sparse"))
    assert own_cost(msa) == (180 * per_step, pytest.approx(per_step * (40 * warm + 140 * sparse)))
    assert warm != sparse


def test_a_warm_up_longer_than_the_run_is_not_counted_beyond_its_end():
    run = config("a", steps=10, proxy_warmup_steps=40, warmup_steps=0)
    warm = flops_per_token(run.model, 1024, phase="warmup").training.total
    assert own_cost(run).flops == pytest.approx(10 * 8 * 1024 * warm)


def test_speed_is_stated_else_the_arms_own_else_scaled_by_flops(tmp_path):
    stem, msa, dense, _ = demo()
    study = [(run, Run.of(run, tmp_path)) for run in (stem, msa, dense)]
    assert Speeds(study).estimate(msa).seconds is None
    finish(stem, tmp_path, 1000.0)
    assert Speeds(study).estimate(stem) == (240 * 4096 / 1000, "the speed measured on the arm itself")
    ratio = own_cost(msa).flops / own_cost(stem).flops
    scaled = Speeds(study).estimate(msa)
    assert scaled.seconds == pytest.approx(240 * 4096 / 1000 * ratio)
    assert scaled.basis == "FLOPs at the rate measured on stem"
    stated = Speeds(study, Assumed(tokens_per_second=500.0)).estimate(stem)
    assert stated == (240 * 4096 / 500, "the stated tokens/s")
    share = Speeds(study, Assumed(mfu=0.25, gpu="NVIDIA H200")).estimate(msa)
    assert share.seconds == pytest.approx(own_cost(msa).flops / (0.25 * 989e12))


def test_an_unfinished_run_gives_the_speed_it_has_logged_without_its_start(tmp_path):
    run = Run.of(config("a"), tmp_path)
    run.write_config(config("a"))
    assert measured_speed(run) is None
    rows = "".join(f"{n},tokens_per_second,{speed}\n{n},train/ce,9.0\n" for n, speed in enumerate((10, 80, 90, 100)))
    (run.path / "metrics.csv").write_text(f"step,name,value\n{rows}4,tokens_per_second,1")
    assert measured_speed(run) == 95.0


@pytest.mark.parametrize(
    ("assumed", "said"),
    [
        (Assumed(tokens_per_second=0.0), "tokens_per_second=0.0: must be above 0; try 100000"),
        (Assumed(tokens_per_second=float("nan")), "tokens_per_second=nan: must be above 0"),
        (Assumed(mfu=30.0, gpu="H100"), "mfu=30.0: is a share of the GPU's peak, above 0 and up to 1; try 0.3"),
        (Assumed(mfu=0.3, gpu="Abacus"), "gpu='Abacus': is no GPU whose peak is known; try H100"),
        (Assumed(mfu=0.3, tokens_per_second=1.0), "mfu=0.3: cannot go together with tokens_per_second"),
    ],
)
def test_a_speed_that_makes_no_sense_is_refused(assumed, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Speeds([], assumed)


@pytest.mark.parametrize(
    ("slots", "seconds"),
    [(1, 10.0), (2, 7.0), (9, 6.0)],  # a stem of 3, forks of 1, 2 and 3, and a run of 1
)
def test_time_left_counts_slots_and_waits_for_stems(slots, seconds):
    assert makespan([1.0, 2.0, 3.0, 3.0, 1.0], [2, 2, None, 2, None], slots) == seconds


def test_no_jobs_take_no_time():
    assert makespan([], [], 3) == 0.0


def test_the_plan_says_what_is_left_and_what_the_minutes_rest_on(tmp_path):
    study = demo(seeds=(0, 1))
    finish(study[0], tmp_path, 4096.0)
    text, problems = format_plan(study, root=tmp_path, slots=2)
    assert problems == []
    lines = {line[:13].strip(): line.split() for line in text.splitlines()}
    assert lines["stem seed0"][2:5] == ["dense", "stem", "finished"]
    assert lines["msa seed0"][2:5] == ["msa", "fork", "queued"]
    assert lines["msa seed1"][4] == "waiting"
    costs = [own_cost(run) for run in study]
    everything, left = (next(line.split() for line in text.splitlines() if line.startswith(s)) for s in ("all", "left"))
    assert everything[1] == f"{sum(cost.tokens for cost in costs):,}"
    assert left[3] == f"{sum(cost.tokens for cost in costs[1:]):,}"
    assert everything[2] == f"{sum(cost.flops for cost in costs):.3e}"
    assert float(everything[3]) - float(left[5]) == pytest.approx(240 / 60, abs=0.11)
    assert "minutes rest on the speed measured on the arm itself (stem)" in text
    assert "FLOPs at the rate measured on stem (msa, dense, window)" in text
    assert "with 2 at a time" in text


def test_the_plan_names_what_stands_in_its_way(tmp_path):
    stem = config("stem", stop_at=200)
    lost = config("lost", fork_from="s/nothing-01234567", fork_step=200)
    narrow = replace(config("narrow"), model=replace(stem.model, mlp_width=64))
    text, problems = format_plan([stem, fork("msa", stem), lost, narrow], root=tmp_path)
    assert [problem.split(":")[0].rpartition("/s/")[2].split("-")[0] or problem for problem in problems][:1] == ["lost"]
    assert any(
        problem.startswith("narrow: ") and "let runs() return msa_lab.budget.match" in problem for problem in problems
    )
    assert " cannot " in text
    assert "?" in text


def test_a_dry_run_trains_nothing_and_needs_no_file_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.py").write_text("from msa_lab.demo import runs\n")
    assert main(["sweep", "study", "--dry-run", "--tokens_per_second", "4096", "--slots", "3"]) == 0
    out = capsys.readouterr().out
    assert "slot-minutes" in out
    assert "about 7 min with 3 at a time" in out
    assert [path.name for path in tmp_path.iterdir()] == ["study"]


def test_problems_of_a_plan_give_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "from msa_lab.config import *\ndef runs():\n    train = TrainConfig(fork_from='s/x-1', fork_step=9)\n"
    (tmp_path / "study.py").write_text(f"{text}    return [RunConfig(arm='a'), RunConfig(arm='b', train=train)]\n")
    assert main(["sweep", ".", "--dry-run"]) == 1
    assert "no finished run there (seed 0); train the stem first" in capsys.readouterr().err

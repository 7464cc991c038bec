import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from msa_lab.cli import main
from msa_lab.cli_arguments import make_parser
from msa_lab.config import RunConfig
from msa_lab.config_io import to_dict
from msa_lab.runs import Run

REPOSITORY = Path(__file__).parents[2]
COMMANDS = (
    *("demo", "prepare", "train", "sweep", "evaluate", "report"),
    *("analyze", "intervene", "inspect", "budget", "doctor"),
)


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command(capsys):
    text = help_of(capsys)
    assert all(f"\n    {command} " in text for command in COMMANDS)
    assert tuple(make_parser()[1]) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command, capsys):
    assert "--help" in help_of(capsys, command)


def test_help_teaches_every_field_of_a_run(capsys):
    text = " ".join(help_of(capsys, "train").split())

    def walk(plain, at=""):
        for name, value in plain.items():
            if isinstance(value, dict):
                walk(value, f"{at}{name}.")
            else:
                assert re.search(rf"--{re.escape(at + name)} \S+ [A-Z`a-z0-9]", text), name

    walk(to_dict(RunConfig()))
    assert "Blocks (not tokens) that a query may read" in text


def test_help_is_quick_because_nothing_heavy_is_imported():
    command = [sys.executable, "-X", "importtime", "-m", "msa_lab.cli", "--help"]
    errors = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    imported = {line.split("|")[-1].strip().split(".")[0] for line in errors.splitlines() if "|" in line}
    assert "jsonargparse" in imported
    assert not imported & {"torch", "lightning", "wandb", "pandas", "numpy", "matplotlib", "cutlass", "msa_kernels"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--model.num_layrs", "3"], "model.num_layrs: unknown key; did you mean model.num_layers?"),
        (["train", "--rot", "x"], "rot: unknown key; did you mean root?"),
        (["demo", "--seed", "3"], "seed: unknown key; did you mean seeds?"),
        (["budget", "--model.d_modle", "3"], "model.d_modle: unknown key; did you mean model.d_model?"),
        (["train", "--model.num_layers", "x"], "model.num_layers='x': must be a whole number"),
        (["train", "--train.compile", "maybe"], "train.compile='maybe': must be true or false"),
        (["train", "--model.num_kv_heads", "3"], "model.num_kv_heads=3: must divide num_query_heads=4"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["trian"], "trian: must be one of demo, prepare, train"),
        ([], "no command: must be one of demo"),
        (["sweep", "nowhere.py"], "nowhere.py: no such study file"),
        (["report", "nowhere"], "nowhere: holds no finished run"),
        (["evaluate", "nowhere"], "nowhere"),
        (["analyze", "nowhere"], "nowhere: holds no run"),
        (["analyze", "x", "--format", "json"], "format='json': must be one of csv, parquet"),
        (["analyze", "x", "--formt", "csv"], "formt: unknown key; did you mean format?"),
        (["intervene", "nowhere"], "nowhere: "),
        (["intervene", "nowhere", "--layers", "some"], "layers='some': must be one of all, each, both"),
        (["inspect", "nowhere", "--text", "gone.txt"], "gone.txt: "),
        (["inspect", "nowhere"], "text"),
        (["train", "--backend", "flux"], "backend='flux': must be one of auto, reference, flex, cute"),
        (["train", "--train.lr", "inf"], "train.lr='inf': must be a finite number; try 0.003"),
        (["train", "--train.lr", ".inf"], "train.lr=inf: must be a finite number; try 0.003"),
        (["train", "--train.steps", "1000.0"], "train.steps='1000.0': must be a whole number; try 1000"),
        (["train", "--wandb", "nope"], "wandb='nope': must be one of offline, online, disabled"),
        (["train", "--devices", "x"], "devices='x': must be a whole number; try 1"),
        (["sweep", "x", "--executor", "pbs"], "executor='pbs': must be one of local, slurm"),
        (["sweep", "x", "--slurm.time", "x"], "slurm.time='x': must be a whole number; try 240"),
        (["sweep", "x", "--slots", "x"], "slots='x': must be a whole number; leave it out"),
        (["demo", "--seeds", "x"], "seeds='x': must be a whole number; try [0]"),
        (["intervene", "x", "--proxies", "none"], "proxies='none': must be one of all, each"),
        (["inspect", "x", "--text", "x", "--max_mb", "x"], "max_mb='x': must be a finite number; try 50.0"),
    ],
)
def test_a_wrong_request_is_told_in_one_line_with_exit_code_2(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, *arguments)
    assert code == 2
    assert complaint in err
    assert err.startswith("msa-lab: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model: {num_layrs: 3}", "model.num_layrs: unknown key; did you mean model.num_layers?"),
        ("modle: {num_layers: 3}", "modle.num_layers: unknown key; did you mean model.num_layers?"),
        ("train: {lr: fast}", "train.lr='fast': must be a finite number; try 0.003"),
        ("a: [", "run.yaml: is no valid YAML"),
    ],
)
def test_a_wrong_config_file_is_told_in_one_line(text, complaint, capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    code, _, err = said(capsys, "train", "--config", str(path))
    assert (code, err.count("\n")) == (2, 1)
    assert complaint in err


def test_flags_go_on_top_of_the_config_file_and_both_are_printed(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(to_dict(RunConfig(arm="from_file", seed=3))))
    flags = ["--seed", "4", "--model.attention", "[msa, dense, msa, dense]", "--model.mlp_width", "[8, 9, 10, 11]"]
    with pytest.raises(SystemExit):
        main(["train", "--config", str(path), *flags, "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["arm"], shown["seed"]) == ("from_file", 4)
    assert shown["model"]["attention"] == ["msa", "dense", "msa", "dense"]
    assert shown["model"]["mlp_width"] == [8, 9, 10, 11]


def test_a_full_disk_is_told_in_one_line(capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "runs/x/metrics.csv")

    monkeypatch.setattr("msa_lab.study.load_study", full)
    code, _, err = said(capsys, "sweep", "study.py")
    rest = "free some space and give the same command again: what is finished is kept"
    assert (code, err) == (2, f"msa-lab: runs/x/metrics.csv: No space left on device; {rest}\n")


def test_ctrl_c_says_how_to_go_on(capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("msa_lab.study.load_study", stop)
    code, _, err = said(capsys, "sweep", "study.py")
    assert code == 130
    assert "the same command goes on" in err


def test_failed_runs_give_exit_code_1_and_are_listed(capsys, monkeypatch, tmp_path):
    from msa_lab.sweep_jobs import Failure

    run = Run(tmp_path / "s" / "a-1" / "seed0")
    monkeypatch.setattr("msa_lab.study.load_study", lambda path: [RunConfig()])
    monkeypatch.setattr("msa_lab.sweep.sweep", lambda runs, **options: [Failure(run, "ValueError: it broke")])
    code, _, err = said(capsys, "sweep", "study.py")
    assert code == 1
    assert f"{run.path}: ValueError: it broke" in err
    assert "1 runs did not finish" in err


def test_budget_of_a_study_and_of_a_model(capsys, tmp_path):
    study = tmp_path / "study.py"
    study.write_text("from msa_lab.demo import runs\n")
    code, out, _ = said(capsys, "budget", str(study))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["arm", "stem", "msa", "dense", "window"]
    assert "not matched" not in out
    sizes = ["--model.num_layers=12", "--model.d_model=1024", "--model.num_query_heads=8", "--model.head_dim=128"]
    proxies = ["--model.num_proxies=4", "--model.proxy_dim=128", "--model.qk_norm=false"]
    code, out, _ = said(capsys, "budget", *sizes, *proxies, "--model.mlp_width=2816")
    assert "7,864,320" in out
    assert "MLP width 3032 x8, 3024 x4: +0 parameters" in out


def test_an_unmatched_study_is_called_so(capsys, tmp_path):
    study = tmp_path / "study.py"
    study.write_text(
        "from msa_lab.config import ModelConfig, RunConfig\n"
        "def runs():\n"
        "    return [RunConfig(arm=kind, model=ModelConfig(attention=kind)) for kind in ('msa', 'dense')]\n"
    )
    assert "not matched to 0.1%" in said(capsys, "budget", str(study))[1]


def test_the_summary_gives_blocks_tokens_and_density_and_calls_a_dense_run_dense():
    from msa_lab.config import DataConfig, ModelConfig
    from msa_lab.summary import summary

    data = DataConfig(context_length=4096)
    lines = summary(RunConfig(data=data))
    assert "selection: 16 blocks x 128 = 2048 tokens of 4096; density 0.734440" in lines
    assert lines[-1].startswith("kernels: reference, ") or lines[-1].startswith("kernels: flex, ")
    assert not [line for line in lines if "warning" in line]
    tokens = summary(RunConfig(data=data, model=ModelConfig(top_k_blocks=2048)))
    assert [line for line in tokens if line.startswith("warning: model.top_k_blocks=2048: counts blocks, not tokens")]
    assert "only 32 blocks of 128 exist in 4096 tokens, so attention is dense; try 16" in " ".join(tokens)
    assert not [line for line in summary(RunConfig(model=ModelConfig(attention="dense"))) if "selection" in line]


def test_prepare_builds_a_corpus_and_a_tokenizer(capsys, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text(f"text {i} says that what is said is said again " * 30)
    where = ["--data.source=text", f"--data.path={texts}", "--data.context_length=64", "--data.validation_fraction=0.3"]
    code, out, err = said(capsys, "prepare", *where, f"--cache={tmp_path / 'cache'}", "--bpe=260")
    assert (code, err) == (0, "")
    told = re.search(r"--data.tokenizer (\S+) --model.vocab_size 260", out)
    assert told
    assert Path(told[1]).exists()
    assert json.loads(out[out.index("{") : out.rindex("}") + 1])["vocab_size"] == 260


@pytest.mark.slow
def test_a_child_saves_and_ends_with_its_sweep(tmp_path):
    from tiny import tiny_run

    config = tiny_run(tmp_path / "texts", train={"steps": 4000, "checkpoint_every": 1000, "validate_every": 4000})
    run = Run.of(config, tmp_path / "runs")
    run.write_config(config)
    command = [sys.executable, "-m", "msa_lab.cli", "train", "--config", str(run.path / "config.yaml")]
    command += ["--root", str(tmp_path / "runs"), "--cache", str(tmp_path / "data"), "--wandb", "disabled"]
    environment = os.environ | {"MSA_LAB_SUPERVISED": "1"}
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    end = time.monotonic() + 60
    while not (run.path / "metrics.csv").exists() or (run.path / "metrics.csv").stat().st_size < 2000:
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "run the same command again to go on" in err
    assert "selection: 3 blocks x 8 = 24 tokens of 128" in out
    assert (run.path / "last.ckpt").exists()
    assert not run.finished


def test_the_console_script_is_this_main():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"msa-lab": "msa_lab.cli:main"}

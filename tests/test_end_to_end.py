"""A whole study in seconds, through the same command line, sweep, analysis, report and notebooks as a real one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from msa_lab.cli import main
from msa_lab.runs import find

pytestmark = pytest.mark.xdist_group("study")  # its study is trained once, not once a worker

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STUDY = "from msa_lab.demo import tiny_runs\n\n\ndef runs():\n    return tiny_runs()\n"


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny study's runs and report."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.py").write_text(STUDY)
    command = [sys.executable, "-m", "msa_lab.cli", "sweep", str(folder / "study.py"), "--root", str(folder / "runs")]
    done = subprocess.run([*command, "--cache", str(folder / "data")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def execute(notebook: Path, runs: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    monkeypatch.setenv("MSA_LAB_RUNS", str(runs))
    monkeypatch.setenv("MSA_LAB_DATA", str(data))
    node = nbformat.read(notebook, as_version=4)
    NotebookClient(node, timeout=200, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    return node


def test_a_study_ends_with_a_table_and_a_report(study: Path) -> None:
    printed = (study / "printed.txt").read_text()
    for arm in ("stem", "msa", "dense", "window"):
        assert arm in printed
    assert str(study / "runs" / "tiny" / "report.html") in printed


def test_the_report_is_one_file_that_loads_nothing(study: Path) -> None:
    html = (study / "runs" / "tiny" / "report.html").read_text()
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']([^"'#]+)""", html)
    assert all(target.startswith("data:") for target in loaded), [t[:80] for t in loaded]
    assert not re.search(r"@import|url\((?!['\"]?data:)", html)
    assert "undertrained" in html.lower()


def test_the_tables_numbers_come_from_the_run_folders(study: Path) -> None:
    from msa_analysis import quality

    table = quality.table(find(study / "runs")).set_index("arm")
    for run in find(study / "runs"):
        kept = json.loads((run.path / "result.json").read_text())
        assert table.loc[run.config.arm, "bits_per_byte"] == kept["bits_per_byte"]
        assert table.loc[run.config.arm, "parameters"] == kept["parameters"]["total"]
    totals = table.drop(index="stem").parameters
    assert (totals.max() - totals.min()) / totals.max() < 1e-3


def test_evaluating_a_finished_run_again_gives_its_result(study: Path) -> None:
    from msa_lab.evaluate import evaluate

    for run in find(study / "runs"):
        again = evaluate(run, cache=study / "data")
        assert again["bits_per_byte"] == pytest.approx(run.result["bits_per_byte"], rel=1e-6)
        assert again["attention"] == list(run.config.model.attention_kinds)


def test_a_finished_study_is_not_trained_again(study: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (study / "runs").rglob("result.json")}
    assert main(["sweep", str(study / "study.py"), "--root", str(study / "runs"), "--cache", str(study / "data")]) == 0
    assert {path: path.stat().st_mtime_ns for path in (study / "runs").rglob("result.json")} == before


def test_the_instruments_commands_work_on_a_study(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = next((study / "runs").glob("tiny/msa-*/seed0"))
    (tmp_path / "mine.txt").write_text("a text of mine, <b>not</b> the corpus'. " * 9)
    for command in (
        ["analyze", study / "runs", "--out", tmp_path / "tables", "--viewer"],
        ["intervene", run, "--rules", "shared", "recency", "--documents", "4", "--out", tmp_path / "costs.csv"],
        ["inspect", run, "--text", tmp_path / "mine.txt", "--out", tmp_path / "mine.html"],
        ["report", run, "--out", tmp_path / "report.html", "--viewer"],
    ):
        more = ["--cache", study / "data"] if command[0] == "intervene" else []
        assert main([str(word) for word in [*command, *more]]) == 0, command
    printed = capsys.readouterr().out
    assert "finds its heads' blocks" in printed
    assert "not measured: tiny/dense" in printed
    assert re.search(r"^shared +\S+ \(", printed, re.MULTILINE)
    tables = {path.stem: pd.read_csv(path) for path in (tmp_path / "tables").glob("*.csv")}
    assert set(tables["runs"]["arm"].str.slice(0, 8)) == {"tiny/ste", "tiny/msa", "tiny/den", "tiny/win"}
    assert set(pd.read_csv(tmp_path / "costs.csv")["rule"]) == {"shared", "recency"}
    for page in ("tables/viewer.html", "mine.html", "report-viewer.html"):
        html = (tmp_path / page).read_text()
        assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|<b>not""", html), page


def test_the_readmes_code_shows_the_runs(study: Path, capsys: pytest.CaptureFixture) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code.count('find("runs/demo")') == 1
    held: dict = {}
    exec(compile(code.replace('"runs/demo"', repr(str(study / "runs"))), "README.md", "exec"), held)
    printed = capsys.readouterr().out
    assert set(held["runs"]) == {"stem", "msa", "dense", "window"}
    assert str(held["runs"]["msa"].result["bits_per_byte"]) in printed
    dims = re.search(r"# xarray: (.*)", code)
    assert dims is not None
    assert f"({', '.join(dims[1].split(', '))})" in printed


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = execute(notebook, study / "runs", study / "data", monkeypatch)
    pictures = [o for cell in node.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert pictures


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_real_demo_and_its_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "msa_lab.cli", "demo", "--root", str(runs), "--cache", str(tmp_path / "data")]
    subprocess.run(command, check=True, timeout=1200, env={**os.environ, "OMP_NUM_THREADS": ""})
    html = (runs / "demo" / "report.html").read_text()
    assert "undertrained" not in html.lower()
    for notebook in NOTEBOOKS:
        execute(notebook, runs / "demo", tmp_path / "data", monkeypatch)

"""A whole study in seconds, through the same command line, sweep, analysis, report and notebooks as a real one."""

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import nbformat
import pandas as pd
import pytest
import torch
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from msa_lab.cli import main
from msa_lab.demo import tiny_runs
from msa_lab.runs import Run, find
from msa_lab.sweep import sweep
from msa_lab.train import train

pytestmark = pytest.mark.xdist_group("study")  # its study is trained once, not once a worker

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STUDY = "from msa_lab.demo import tiny_runs\n\n\ndef runs():\n    return tiny_runs()\n"


class Made(NamedTuple):
    """A study's folder, what its last sweep printed, and when each result had been written before that sweep."""

    folder: Path
    printed: str
    before: dict[Path, int]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The stem and the MSA fork trained by a sweep's own processes, the other forks here, which spares two of them; a
    second sweep, of the whole study, then has nothing to train and ends it."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.py").write_text(STUDY)
    places = {"root": folder / "runs", "cache": folder / "data"}
    runs = {run.arm: run for run in tiny_runs()}
    with redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        threads = torch.get_num_threads()  # they decide how sums are rounded: the processes shall have as many
        patch.setattr("os.cpu_count", lambda: threads)
        assert sweep([runs.pop("stem"), runs.pop("msa")], **places) == []
        for run in runs.values():
            train(run, **places, progress=False, wandb="disabled")
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("result.json")}
    options = [word for name, path in places.items() for word in (f"--{name}", str(path))]
    with redirect_stdout(io.StringIO()) as said:
        assert main(["sweep", str(folder / "study.py"), *options]) == 0
    return Made(folder, said.getvalue(), before)


@pytest.fixture(scope="module")
def study(made: Made) -> Path:
    """Folder of the tiny study's runs and report."""
    return made.folder


@pytest.fixture(scope="module")
def kernel(study: Path) -> Iterator[AsyncKernelManager]:
    """One kernel for all notebooks: a kernel of its own would import everything again for each."""
    manager = AsyncKernelManager()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSA_LAB_RUNS", str(study / "runs"))
        patch.setenv("MSA_LAB_DATA", str(study / "data"))
        yield manager  # started by the first notebook
    asyncio.run(manager.shutdown_kernel(now=True))


def execute(notebook: Path, kernel: AsyncKernelManager | None = None) -> nbformat.NotebookNode:
    """The notebook with what its cells print and draw; in `kernel`, where names of an earlier notebook are removed."""
    node = nbformat.read(notebook, as_version=4)
    if kernel is not None:
        node.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client = NotebookClient(node, kernel, timeout=200, resources={"metadata": {"path": str(notebook.parent)}})
    try:
        client.execute()
    finally:
        if client.kc is not None:  # it closes what it is connected by only where the kernel is its own
            client.kc.stop_channels()
    return node


def test_a_study_ends_with_a_table_and_a_report(made: Made) -> None:
    for arm in ("stem", "msa", "dense", "window"):
        assert arm in made.printed
    assert str(made.folder / "runs" / "tiny" / "report.html") in made.printed


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


def test_a_finished_study_is_not_trained_again(made: Made) -> None:
    assert len(made.before) == 4
    after = {path: path.stat().st_mtime_ns for path in (made.folder / "runs").rglob("result.json")}
    assert after == made.before


@pytest.mark.parametrize("arm", ["stem", "msa"])
def test_two_processes_give_the_same_losses(arm: str, study: Path, tmp_path: Path) -> None:
    (config,) = (run for run in tiny_runs() if run.arm == arm)
    if config.train.fork_from:
        shutil.copytree(study / "runs" / config.train.fork_from, tmp_path / config.train.fork_from)
    again = train(config, root=tmp_path, cache=study / "data", progress=False, wandb="disabled")
    ours, theirs = (run.metrics for run in (again, Run.of(config, study / "runs")))
    timed = ["tokens_per_second", "mfu"]
    assert len(ours) > 20
    pd.testing.assert_frame_equal(ours[~ours.name.isin(timed)], theirs[~theirs.name.isin(timed)])


def test_the_instruments_commands_work_on_a_study(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sweep has written a report already; here it is the viewer's turn.
    monkeypatch.setattr("msa_lab.cli._write_report", lambda runs, out: out.write_text("the report"))
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
def test_notebooks_run(notebook: Path, kernel: AsyncKernelManager) -> None:
    cells = execute(notebook, kernel).cells
    assert [output for cell in cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]


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
    monkeypatch.setenv("MSA_LAB_RUNS", str(runs / "demo"))
    monkeypatch.setenv("MSA_LAB_DATA", str(tmp_path / "data"))
    for notebook in NOTEBOOKS:
        execute(notebook)

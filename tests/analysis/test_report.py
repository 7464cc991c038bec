"""The page that a reader gets, and what lies beside it."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import folders
import pandas as pd
import planted
import pytest
from msa_analysis import heatmaps, quality, specialization
from msa_analysis.evidence import Evidence, collect, over_seeds
from msa_analysis.gallery import pictures, write_figures
from msa_analysis.report import selection_table, summary_table, write_report
from msa_analysis.verdict import judge
from msa_analysis.wording import duration, interval, number, quantity

from msa_lab.runs import Run, find
from msa_lab.selections import open_selections

pytestmark = pytest.mark.xdist_group("report")  # what it measures is made once, not once a worker

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags that must balance, text, and everything that could be loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.alts: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        held = dict(attrs)
        self.addresses += [held[name] or "" for name in ("src", "href", "data", "action") if name in held]
        if tag == "img":
            self.alts.append(held.get("alt") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("study")
    folders.study(root / "runs", seeds=1)
    return root


@pytest.fixture(scope="module")
def evidence(study: Path) -> Evidence:
    return collect(study / "runs")


@pytest.fixture(scope="module")
def page(evidence: Evidence, study: Path) -> Page:
    return Page(write_report(evidence, study / "report.html"))


def test_a_well_trained_study_is_compared(evidence: Evidence) -> None:
    verdict = judge(evidence)
    assert not verdict.undertrained, verdict.reasons
    assert len(verdict.checks) == 3 + 3  # bigram for each arm; recall, records and rows for the MSA run


def test_the_page_is_whole_and_loads_nothing(page: Page, study: Path) -> None:
    assert page.open == []
    assert page.addresses
    assert all(address.startswith(("#", "data:image/")) for address in page.addresses)
    assert "script" not in page.tags
    assert not re.search(r"(?:src|href)=[\"']?\s*(?:https?:)?//|url\(|@import", (study / "report.html").read_text())
    assert all(page.alts)
    assert len(page.alts) == 9  # heatmap, profile, found, alike, dynamics, kl, loss, quality, differences
    drawn = [base64.b64decode(a.split(",", 1)[1]) for a in page.addresses if a.startswith("data:")]
    assert {image[:5] for image in drawn} == {b"\x89PNG\r", b"<?xml"}


def test_the_page_carries_verdict_nulls_and_limits(page: Page) -> None:
    for words in (
        "Trained enough to compare",
        "minus dense",
        "bigram table",
        "null 0.500",
        "16 rows, one pair of models",
        "Null: 0.5 exactly",
        "Arms not run: random blocks, one proxy shared by all heads.",
        "One seed: intervals speak of these very models",
        "A report neither runs nor reads them: `msa-lab intervene` does",
        "quality.table(runs)",
        "model.attention",
        "no GPU here",
        "c0ffee00",
        "torch 2.13.0",
    ):
        assert words in re.sub(r"\s+", " ", page.text), words
    assert "Undertrained" not in page.text


def test_numbers_of_the_page_are_those_of_the_documented_calls(page: Page, study: Path) -> None:
    runs = find(study / "runs")
    text = re.sub(r"\s+", " ", page.text)
    for value in quality.table(runs)["bits_per_byte"]:
        assert number(value) in text
    for row in quality.compare(runs).itertuples():
        assert number(row.difference, sign=True) in text
        assert interval(row.low, row.high, sign=True) in text
    msa = next(run for run in runs if run.config.arm == "msa")
    frame = specialization.summary(open_selections(msa))
    whole = frame[frame["layer"].isna()].set_index("metric")
    for metric in ("recency", "excess_recency", "block_recall", "mutual_information", "kappa", "content"):
        assert number(whole.loc[metric, "value"]) in text
        assert interval(whole.loc[metric, "low"], whole.loc[metric, "high"]) in text


def test_the_null_over_seeds_is_the_mean_of_theirs() -> None:
    row = {"arm": "msa", "metric": "block_recall", "layer": pd.NA, "low": 0.5, "high": 0.7, "documents": 8}
    row |= {"p_value": 0.01, "reason": ""}
    seeds = [
        row | {"seed": i, "value": value, "null": null} for i, (value, null) in enumerate([(0.5, 0.2), (0.7, 0.4)])
    ]
    (found,) = over_seeds(pd.DataFrame(seeds)).to_dict("records")
    assert (found["value"], found["null"], found["n"], found["over"]) == pytest.approx((0.6, 0.3, 2, "seeds"))
    assert pd.isna(found["p_value"])
    (single,) = over_seeds(pd.DataFrame(seeds[:1])).to_dict("records")
    assert (single["null"], single["n"], single["over"]) == (0.2, 8, "documents")


def test_runs_that_did_not_finish_are_named_on_the_page(tmp_path: Path) -> None:
    done, gone = folders.config("dense", "dense"), folders.config("window", "window")
    folders.finished(tmp_path / "runs", done, quality=3.4)
    unfinished = Run.of(gone, tmp_path / "runs")
    unfinished.write_config(gone)
    rows = [{"run": str(unfinished.path.relative_to(unfinished.path.parents[1])), "state": "failed", "reason": "<nan>"}]
    (unfinished.path.parents[1] / "sweep.json").write_text(json.dumps(rows))
    page = Page(write_report(tmp_path / "runs", tmp_path / "report.html"))
    words = re.sub(r"\s+", " ", page.text)
    assert "Left out. 1 run of this study did not finish, and no number below is theirs:" in words
    assert f"{unfinished.path}: <nan>" in words
    folders.finished(tmp_path / "runs", gone, quality=3.6)
    assert "Left out." not in Page(write_report(tmp_path / "runs", tmp_path / "report.html")).text


def test_undertrained_runs_are_not_compared(tmp_path: Path) -> None:
    folders.finished(tmp_path / "runs", folders.config("dense", "dense"), quality=3.4)
    folders.finished(tmp_path / "runs", folders.config("window", "window"), quality=3.6)
    page = Page(write_report(tmp_path / "runs", tmp_path / "report.html"))
    assert "Undertrained." in page.text
    assert "window, seed 0: bits per byte must be below the bigram table's" in page.text
    assert "minus dense" not in page.text
    assert not any("Quality against" in alt or "Paired" in alt for alt in page.alts)
    table = summary_table(tmp_path / "runs")
    assert (table["minus dense"] == "").all()


def test_text_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script> & \"quoted\""
    folders.finished(tmp_path / "runs", folders.config("dense", "dense"), quality=2.0, path_reason=hostile)
    page = Page(write_report(tmp_path / "runs", tmp_path / "report.html"))
    assert "script" not in page.tags
    assert hostile in page.text


def test_dense_only_runs_say_what_is_not_defined(tmp_path: Path) -> None:
    folders.finished(tmp_path / "runs", folders.config("dense", "dense"), quality=2.0)
    page = Page(write_report(tmp_path / "runs", tmp_path / "report.html"))
    assert "not defined: none of these runs has proxies with recorded selections." in page.text
    assert selection_table(tmp_path / "runs").empty


@pytest.mark.slow
def test_one_proxy_has_no_specialization_in_the_page(tmp_path: Path) -> None:
    made = folders.config("p1", "msa", model={"num_proxies": 1})
    log = planted.log([planted.leaning(2)], layers=2, steps=tuple(range(0, 120, 10)))
    folders.finished(tmp_path / "runs", made, quality=2.0, log=log)
    evidence = collect(tmp_path / "runs")
    page = Page(write_report(evidence, tmp_path / "report.html"))
    assert "one proxy: nothing to tell apart" in page.text
    assert "one proxy: there is no pair" in page.text
    shown = selection_table(evidence).set_index("measure")
    assert shown.loc["mutual information", "value"] == "not defined"
    assert shown.loc["recency", "value"].startswith("0.")
    assert shown.loc["recency", "null"] == "0.500"


def test_a_budget_that_covers_everything_is_labelled_not_sparse(tmp_path: Path) -> None:
    made = folders.config("msa", "msa", data={"context_length": 64})
    assert made.hides_sparsity
    folders.finished(tmp_path / "runs", made, quality=2.0)
    page = Page(write_report(tmp_path / "runs", tmp_path / "report.html"))
    assert "not sparse" in page.text
    assert "dense in all but name" in page.text


def test_a_recall_task_without_bytes_shows_loss_and_accuracy_by_distance(tmp_path: Path) -> None:
    accuracy = {"1": {"accuracy": 0.9, "questions": 40}, "8": {"accuracy": 0.25, "questions": 12}}
    extra = {"bits_per_byte": None, "bigram_bits_per_byte": None, "accuracy_by_distance": accuracy}
    for arm in ("dense", "window"):
        run = folders.finished(tmp_path / "runs", folders.config(arm, arm), quality=2.0, **extra)
        rows = [{k: v for k, v in d.items() if k not in ("bytes", "bits_per_byte")} for d in run.result["rows"]]
        run.write_json("result.json", run.result | {"rows": rows})
    page = Page(write_report(tmp_path / "runs", tmp_path / "report.html"))
    assert "validation loss, nats per token" in page.text
    assert "0.90of 40" in page.text
    assert quality.compare(find(tmp_path / "runs")).iloc[0]["metric"] == "validation_loss"


def test_a_bigram_table_in_bits_never_stands_beside_losses_in_nats(tmp_path: Path) -> None:
    folders.finished(tmp_path / "runs", folders.config("text", "dense"), quality=2.0)
    assert summary_table(tmp_path / "runs")["bigram"].iloc[0]
    extra = {"bits_per_byte": None, "bigram_bits_per_byte": None}
    folders.finished(tmp_path / "runs", folders.config("recall", "dense"), quality=2.0, **extra)
    table = summary_table(tmp_path / "runs")
    assert "validation loss" in table
    assert table["bigram"].tolist() == ["", ""]


@pytest.mark.slow
def test_figures_and_their_numbers_lie_in_a_folder(study: Path, tmp_path: Path) -> None:
    stale = tmp_path / "figures" / "of-another-study.png"
    stale.parent.mkdir()
    stale.touch()
    written = write_figures(study / "runs", tmp_path / "figures")
    assert not stale.exists()
    drawn, vectors = ({path.stem for path in written if path.suffix == kind} for kind in (".png", ".svg"))
    tables = {path.stem for path in written if path.suffix == ".csv"}
    assert len(drawn) == 9
    assert drawn == vectors
    assert drawn <= tables
    assert all(path.stat().st_size > 0 for path in written)
    cells = pd.read_csv(tmp_path / "figures" / "selection-rate-msa-seed-0.csv")
    assert set(cells.columns) >= {"layer", "proxy", "query_block", "key_block", "selection_rate"}
    assert len(cells) == 2 * 2 * 32 * 33 // 2  # the future is no row
    assert cells.groupby(["layer", "proxy", "query_block"])["selection_rate"].sum().max() == pytest.approx(4.0)


@pytest.mark.slow
def test_figures_for_a_paper(evidence: Evidence, tmp_path: Path) -> None:
    write_figures(evidence, tmp_path)
    written = write_figures(evidence, tmp_path, size="column", kinds=["pdf"])
    assert {path.suffix for path in written} == {".pdf", ".csv"}
    assert sorted(written) == sorted(tmp_path.iterdir())
    for path in written:
        if path.suffix == ".pdf":
            (box,) = re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ", path.read_bytes())
            assert float(box) == pytest.approx(72 * 3.4)


def test_figures_of_no_such_kind_or_size_remove_nothing(evidence: Evidence, tmp_path: Path) -> None:
    (tmp_path / "kept.png").touch()
    with pytest.raises(ValueError, match=r"kinds: 'gif' must be one of png, svg, pdf"):
        write_figures(evidence, tmp_path, kinds=["png", "gif"])
    with pytest.raises(ValueError, match=r"size='poster': must be one of"):
        write_figures(evidence, tmp_path, size="poster")
    assert (tmp_path / "kept.png").exists()


def test_maps_of_all_arms_have_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arm in ("near", "wide"):
        folders.small_run(tmp_path, folders.small_log(), arm=arm)
    evidence = collect(tmp_path)
    rate = heatmaps.selection_rate
    tops = iter([0.2, 0.6, 0.2, 0.6])
    monkeypatch.setattr(heatmaps, "selection_rate", lambda data: rate(data) * next(tops))
    drawn = [picture.figure for picture in pictures(evidence, judge(evidence)) if picture.name.startswith("selection")]
    limits = [image.norm.vmax for figure in drawn for axis in figure.axes for image in axis.get_images()]
    assert limits == pytest.approx([0.6] * len(limits))
    assert len(limits) == 4


def test_nothing_to_report_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no finished run"):
        write_report(tmp_path, tmp_path / "report.html")
    with pytest.raises(ValueError, match="nothing to report"):
        collect([])


def test_numbers_as_words() -> None:
    assert number(-0.0004) == "0.000"
    assert number(-0.25, 2) == "\N{MINUS SIGN}0.25"
    assert number(0.25, 2, sign=True) == "+0.25"
    assert number(None) == number(float("nan")) == "not defined"
    assert interval(None, 1.0) == ""
    assert [quantity(v) for v in (26_750_000, 3.2e15, 640, None)] == ["26.8 M", "3.2 P", "640", "not defined"]
    assert [duration(v) for v in (61, 300, 9000)] == ["61 s", "5.0 min", "2.5 h"]

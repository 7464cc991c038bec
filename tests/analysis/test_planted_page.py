"""The page of planted answers, from drawing to figures, with few runs of two populations."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest


@pytest.mark.slow
def test_page_is_made_of_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import page
    import prove

    two = {name: prove.SCENARIOS[name] for name in ("random", "one collapsed")}
    for module in (prove, page):
        monkeypatch.setattr(module, "SCENARIOS", two)
    for name, few in {"FEW_DOCUMENTS": (3, 6), "POWER_DOCUMENTS": (6, 8), "SEED_DOCUMENTS": (6,)}.items():
        monkeypatch.setattr(prove, name, few)
    monkeypatch.setattr(prove, "STRENGTHS", (0.0, 4.0))
    frame = pd.concat([prove.work(job) for job in prove.jobs(24, 8, 0)], ignore_index=True)
    tables = prove.tables_of(frame)
    prove.write(tables, tmp_path, {"seed": 0, "command": "prove.py"})
    page.draw_page(tables, prove.pictures(0), tmp_path / "figures")
    page.write_page(tables, tmp_path / "tables.md", ["prove.py"])

    bias = pd.read_csv(tmp_path / "bias.csv").set_index(["scenario", "metric"])
    assert bias.loc[("random", "recency"), "truth"] == pytest.approx(0.5)
    assert bias.loc[("one collapsed", "mutual_information"), "mean"] == pytest.approx(0.4365, rel=0.1)
    assert set(pd.read_csv(tmp_path / "null.csv")["scenario"]) == {"random"}
    documents = pd.read_csv(tmp_path / "documents.csv").set_index(["documents", "metric"])
    assert documents.loc[(3, "recency"), "defined_share"] == 0
    assert documents.loc[(6, "recency"), "defined_share"] == 1
    power = pd.read_csv(tmp_path / "power.csv")
    assert power[(power["lean"] == 4.0) & (power["documents"] == 8) & (power["seeds"] == 1)]["power"].item() > 0.5
    text = (tmp_path / "tables.md").read_text()
    assert f"{bias.loc[('random', 'recency'), 'truth']:.4g}" in text
    assert "nan" not in text
    again = [job._replace(measures=(prove.MEASURES["likeness"],)) for job in prove.jobs(24, 8, 1)]
    again = [job for job in prove.some(again, ["random"], []) if job.part == "scenarios"]
    later = prove.tables_of(pd.concat([prove.work(job) for job in again], ignore_index=True))
    prove.write(later, tmp_path, {"seed": 1, "command": "prove.py --only random"}, keep=True)
    both, commands = prove.read(tmp_path)
    assert commands == ["prove.py", "prove.py --only random"]
    stored = both["bias"].set_index(["scenario", "metric"])
    assert list(stored.index) == list(bias.index)
    changed = stored["mean"] != bias["mean"]
    known = set(later["bias"]["metric"])
    assert set(stored[changed & stored["spread"].gt(0)].index) <= {("random", name) for name in known}
    assert changed[("random", "kappa")]
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(drawn) == 12
    assert all((tmp_path / "figures" / name).stat().st_size > 5000 for name in drawn)

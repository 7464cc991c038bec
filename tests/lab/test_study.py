import re
from pathlib import Path

import pytest

from msa_lab.budget import table
from msa_lab.study import load_study

GOOD = "from msa_lab.config import RunConfig\ndef runs():\n    return [RunConfig(arm='a'), RunConfig(arm='b')]\n"


def test_a_study_file_is_loaded(tmp_path):
    path = tmp_path / "study.py"
    path.write_text(GOOD)
    assert [run.arm for run in load_study(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def runs(:\n", ":1: invalid syntax"),
        ("import nothing_of_the_kind\n", ":1: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("def runs():\n    return 1 / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("x = 1\n", ": has no function runs()"),
        ("def runs():\n    return 7\n", ": runs() must return a list of RunConfig with at least one, not int"),
        ("def runs():\n    return []\n", r": runs() must return a list of RunConfig with at least one, not []"),
        (GOOD.replace("'b'", "'a'"), ": 2 runs share the folder scratch/a-"),
        (GOOD.replace("arm='b'", "arm='b', seed=-1"), ":3: seed=-1: must be at least 0; try 0"),
    ],
)
def test_a_study_file_that_cannot_be_used_is_named_in_one_line(tmp_path, text, complaint):
    path = tmp_path / "study.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(complaint)) as error:
        load_study(path)
    assert str(error.value).startswith(f"{path}{complaint}")
    assert "\n" not in str(error.value)


def test_the_study_that_the_page_on_studies_shows_is_one(tmp_path):
    page = Path(__file__).parents[2] / "experiments" / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "study.py").write_text(code)
    study = load_study(tmp_path)
    assert [(run.arm, run.seed) for run in study] == [(arm, seed) for seed in range(5) for arm in ("msa_p4", "dense")]
    assert all(abs(row.percent) < 0.1 for row in table(study))


def test_a_missing_study_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.py: no such study file"):
        load_study(tmp_path / "nowhere.py")

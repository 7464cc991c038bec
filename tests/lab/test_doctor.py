from importlib import metadata

import msa_kernels
import pytest
import torch
from msa_kernels.cute import library

from msa_lab import doctor
from msa_lab.cli import main
from msa_lab.config import RunConfig
from msa_lab.environment import describe


def test_dsl_version_skew_is_found_and_named():
    sound = {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-base": "4.8.1", "torch": "2.13.0"}
    assert doctor.dsl_skew(sound) == []
    assert doctor.dsl_skew({"torch": "2.13.0"}) == []
    rolled_back = sound | {"nvidia-cutlass-dsl-libs-cu13": "4.6.2"}
    assert doctor.dsl_skew(rolled_back) == [
        "nvidia-cutlass-dsl-libs-cu13 4.6.2 does not fit nvidia-cutlass-dsl 4.8.1; "
        "pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]==4.8.1'"
    ]


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "sound"),
    [
        ("13.0", (13, 0), True),
        ("12.8", (12, 4), True),
        ("12.8", (13, 0), True),
        ("13.0", (12, 8), False),
        (None, (12, 8), True),
        ("13.0", None, True),
    ],
)
def test_a_torch_newer_than_the_driver_is_found(torch_cuda, driver, sound):
    assert (doctor.cuda_skew(torch_cuda, driver) == []) == sound


def test_unmet_requirements_are_found_at_any_depth(monkeypatch):
    requires = {
        "msa-lab": ["torch>=2.7", "jsonargparse[signatures]>=4.41", "datasets>=3; extra == 'hf'"],
        "jsonargparse": ["typeshed-client>=2; extra == 'signatures'", "rich; extra == 'other'"],
        "torch": ["numpy>=2", "nothing; sys_platform == 'amiga'"],
    }
    versions = {"torch": "2.6.0+cpu", "jsonargparse": "4.53.0", "numpy": "2.4.6"}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "requires", lambda name: requires.get(name))
    monkeypatch.setattr(metadata, "version", version)
    assert sorted(doctor.conflicts("msa-lab")) == [
        "jsonargparse needs typeshed-client>=2, which is not installed; install it",
        "msa-lab needs torch>=2.7, but 2.6.0+cpu is installed; pip install 'torch>=2.7'",
    ]


def test_this_installation_is_sound():
    assert doctor.conflicts("msa-lab") == []
    assert doctor.dsl_skew(doctor.installed()) == []


def test_doctor_tells_versions_and_why_a_kernel_path_cannot_be_used(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MSA_KERNELS_CACHE", str(tmp_path))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in (
        "python 3.",
        "torch 2.",
        "lightning 2.",
        "GPU driver: ",
        "kernels: reference is usable",
        "kernels: a run",
        f"kernels: compiled ones in {tmp_path}: 0 for this version",
    ):
        assert word in out
    assert "backend='cute' cannot be used" in out or "cute is usable" in out


def test_doctor_exits_1_on_skew(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (11, 8))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert main(["doctor"]) == 1
    assert "PROBLEM: torch was built for CUDA 13.0" in capsys.readouterr().out


@pytest.fixture
def deterministic():
    """Sets the mode, which other tests of a process may have left either way, and sets it back."""
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("mode", [False, True])
def test_the_library_of_dense_attention_is_told_for_a_run_and_kept_by_each(monkeypatch, deterministic, mode):
    deterministic(mode)
    monkeypatch.setattr(library, "describe", lambda: f"deterministic {torch.are_deterministic_algorithms_enabled()}")
    monkeypatch.setattr(msa_kernels, "select_path", lambda **_: ("cute", "told"))
    (line,) = (line for line in doctor.kernel_paths() if "cute is usable" in line)
    assert "deterministic True" in line  # as runs train unless told otherwise
    assert describe(RunConfig(), torch.device("cpu"), {})["dense_attention"] == f"deterministic {mode}"
    monkeypatch.setattr(msa_kernels, "select_path", lambda **_: ("reference", "told"))
    assert describe(RunConfig(), torch.device("cpu"), {})["dense_attention"] is None

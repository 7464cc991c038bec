"""How the learner compiles its step."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_run

from msa_lab.attention import rotation
from msa_lab.config_io import to_dict
from msa_lab.learner import Learner


def test_kept_gradients_flex_and_cpus_do_without_cuda_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(torch, "compile", lambda _, **options: modes.append(options["mode"]))
    for cuda, path, accumulate in ((True, "cute", 1), (True, "cute", 2), (True, "flex", 1), (False, "reference", 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        fields = {"compile": True, "accumulate": accumulate, "batch_size": 4}
        Learner(to_dict(tiny_run(tmp_path, arm="one", train=fields)), path)
    assert modes == ["reduce-overhead", None, None, None]


def test_rotation_is_one_operation_to_a_compiler() -> None:
    positions = torch.arange(7)[None]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.msa_lab.rotation.default, (positions, 8, 1e4), test_utils=checks)
    cos, sin = rotation(positions, 8, 1e4)
    angle = 3 * 1e4 ** (-2 * torch.arange(4) / 8)
    torch.testing.assert_close(cos[0, 3, 0], angle.cos())
    torch.testing.assert_close(sin[0, 3, 0], angle.sin())

"""How the learner compiles its step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_run
from torch.fx.experimental.proxy_tensor import make_fx

from msa_lab.attention import rotation
from msa_lab.config_io import to_dict
from msa_lab.learner import Learner


@pytest.mark.parametrize(
    ("cuda", "path", "fields", "processes", "mode"),
    [
        (True, "cute", {}, False, "reduce-overhead"),
        (True, "cute", {"cuda_graphs": False}, False, None),
        (True, "cute", {"accumulate": 2}, False, None),
        (True, "cute", {"block_size": 64}, False, None),
        (True, "cute", {"document_mask": True}, False, None),
        (True, "flex", {}, False, None),
        (True, "cute", {}, True, None),
        (False, "reference", {}, False, None),
    ],
)
def test_which_runs_replay_cuda_graphs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuda: bool,
    path: str,
    fields: dict[str, Any],
    processes: bool,
    mode: str | None,
) -> None:
    asked, fields = [], dict(fields)
    monkeypatch.setattr(torch, "compile", lambda _, **options: asked.append(options["mode"]))
    model = {"block_size": fields.pop("block_size", 128)}
    data = {"document_mask": fields.pop("document_mask", False)}
    train = {"compile": True, "batch_size": 4} | fields
    learner = Learner(to_dict(tiny_run(tmp_path, arm="one", model=model, train=train, data=data)), path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes)
    assert learner.losses is learner.losses
    assert asked == [mode]


def test_rotation_is_one_operation_to_a_compiler() -> None:
    positions = torch.arange(7)[None]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.msa_lab.rotation.default, (positions, 8, 1e4), test_utils=checks)
    graph = make_fx(lambda x: rotation(x, 8, 1e4))(positions).graph
    called = next(node.target for node in graph.nodes if node.op == "call_function")
    assert called == torch.ops.msa_lab.rotation.default
    assert "cos" not in str(graph)
    cos, sin = rotation(positions, 8, 1e4)
    angle = 3 * 1e4 ** (-2 * torch.arange(4) / 8)
    torch.testing.assert_close(cos[0, 3, 0], angle.cos())
    torch.testing.assert_close(sin[0, 3, 0], angle.sin())

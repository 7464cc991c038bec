"""A user's own text on the viewer's page: what the run's model chooses there, and texts that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msa_analysis.inspect import inspect_text, read_text
from safetensors.torch import save_file
from test_viewer import EVIL, described, pieces, small

from msa_lab.model import Transformer
from msa_lab.runs import Run


def trained(root: Path, **changes: Any) -> Run:
    """A run with weights and no log."""
    model = {"d_model": 16, "head_dim": 8, "proxy_dim": 8, "mlp_width": 16} | changes.pop("model", {})
    config = small(model=model, **changes)
    run = Run.of(config, root)
    run.write_config(config)
    save_file(Transformer(config.model).state_dict(), run.path / "model.safetensors")
    return run


def test_a_users_text_is_read_by_the_runs_model(tmp_path: Path) -> None:
    from msa_lab.evaluate import load_model
    from msa_lab.selections import record

    run, text = trained(tmp_path), f"{EVIL} grüße\n" * 3
    page = inspect_text(run, text, tmp_path / "deep" / "page.html", name="mine.txt")
    held, about = pieces(page), described(page)
    assert held["t0"].decode() == text
    assert about["documents"] == ["mine.txt"]
    tokens = torch.tensor([[256, *text.encode()]])
    assert about["runs"][0]["context"] == tokens.shape[1]
    model = load_model(run)
    with torch.no_grad(), record(model) as seen:
        model(tokens)
    for layer in range(2):
        blocks = seen[f"layers.{layer}.attention.select"].selection.blocks[0].numpy()
        stored = np.frombuffer(held["r0d0-0"], np.uint8)[3 * 2 * 2 * blocks.size :]
        stored = stored[: 2 * blocks.size].reshape(2, *blocks.shape)[layer].astype(int)
        np.testing.assert_array_equal(np.where(stored == 255, -1, stored), blocks)


def test_a_text_longer_than_the_context_is_cut_and_that_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="401 tokens; the model's context holds the first 160"):
        page = inspect_text(trained(tmp_path), "abcd" * 100, tmp_path / "page.html", name="long.txt")
    assert described(page)["notice"].startswith("long.txt has 401 tokens")
    assert pieces(page)["t0"] == b"abcd" * 39 + b"abc"


def test_texts_that_cannot_be_inspected_are_told_in_one_line(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("gr\u00fc\u00dfe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt: is not UTF-8 \(byte 0xfc at 2\)"):
        read_text(latin)
    (tmp_path / "good.txt").write_bytes("grüße\r\n".encode())
    assert read_text(tmp_path / "good.txt") == "grüße\r\n"
    run, dense = trained(tmp_path), trained(tmp_path, model={"attention": "dense"})
    for chosen, text, said in ((run, " \n", "is empty"), (dense, "abc", "all its layers are dense")):
        with pytest.raises(ValueError, match=said):
            inspect_text(chosen, text, tmp_path / "page.html")
    (run.path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        inspect_text(run, "abc", tmp_path / "page.html")

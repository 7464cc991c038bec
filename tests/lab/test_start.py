"""What a run says before its first step, and what it does not say when it is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from pathlib import Path

import pytest
from tiny import tiny_run, write_corpus

from msa_lab.runs import Run
from msa_lab.train import train


def test_a_refused_run_is_not_warned_about_first(tmp_path: Path) -> None:
    config = tiny_run(write_corpus(tmp_path / "texts"), model={"top_k_blocks": 16, "vocab_size": 200})
    assert config.hides_sparsity
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"model\.vocab_size=200"):
            train(config, root=tmp_path / "runs", cache=tmp_path / "data", progress=False, wandb="disabled")


def test_a_file_system_without_locks_is_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"\.lock: this file system cannot lock a file \(No locks") as error:
        Run(tmp_path).lock().__enter__()
    assert "another process is training" not in str(error.value)
    assert "--root" in str(error.value)

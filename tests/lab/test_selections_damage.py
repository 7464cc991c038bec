"""A log whose writing was cut short, by a kill or a full disk, keeps its earlier records and goes on."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from selection_logs import TOKENS, config, values, written

from msa_lab.selection_store import SelectionStore, open_selections


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
@pytest.mark.parametrize("variable", ["selected", "teacher_mass"])
def test_a_torn_last_record_is_dropped_with_a_warning(tmp_path, damage, variable):
    store = written(tmp_path / "selections.zarr")
    chunk = store.path / variable / "c/2/0/0/0/0/0"
    whole = chunk.read_bytes()
    if damage == "missing":
        chunk.unlink()
    else:
        flipped = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
        chunk.write_bytes({"truncated": whole[: len(whole) // 2], "flipped": flipped, "empty": b""}[damage])
    with pytest.warns(UserWarning, match="record of step 9 is torn"):
        data = open_selections(tmp_path)
    assert data["step"].values.tolist() == [0, 5]
    with pytest.warns(UserWarning, match="record of step 9 is torn"):
        again = SelectionStore.resume(store.path, config(), TOKENS, 7)
    again.append(9, "sparse", values(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = open_selections(tmp_path)[variable]
    np.testing.assert_array_equal(found.values[2], values(9)[variable].astype(found.dtype))


@pytest.mark.parametrize("stop_before", ["mass", "step"])
def test_a_kill_in_the_middle_of_a_record_leaves_the_earlier_ones(tmp_path, stop_before):
    script = f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import zarr
        from selection_logs import values, written
        store = written(Path({str(tmp_path)!r}) / "selections.zarr")
        victim = store.arrays[{stop_before!r}]
        plain = zarr.Array.__setitem__
        def killed(array, key, value):
            if array is victim:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(array, key, value)
        zarr.Array.__setitem__ = killed
        store.append(12, "sparse", values(12))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    data = open_selections(tmp_path)
    assert data["step"].values.tolist() == [0, 5, 9]
    np.testing.assert_array_equal(data["selected"].values[2], values(9)["selected"])
    store = SelectionStore.resume(tmp_path / "selections.zarr", config(), TOKENS, 9)
    store.append(12, "sparse", values(3))
    np.testing.assert_array_equal(open_selections(tmp_path)["selected"].values[3], values(3)["selected"])


def test_a_full_disk_is_one_line_and_leaves_earlier_records(tmp_path):
    # The limit on a file's size stands for the disk: writing beyond it fails in the same call, with another number.
    store = written(tmp_path / "selections.zarr")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    line = r"could not record the selections of step 12 \(File too large\); earlier records are whole"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        with pytest.raises(OSError, match=line) as error:
            store.append(12, "sparse", values(12))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.__suppress_context__
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert open_selections(tmp_path)["step"].values.tolist() == [0, 5, 9]


@pytest.mark.parametrize("victim", ["selected", "step"])
def test_recording_goes_on_once_there_is_room(tmp_path, monkeypatch, victim):
    store = written(tmp_path / "selections.zarr")
    plain, array = zarr.Array.__setitem__, store.arrays[victim]

    def full(self, key, value):
        if self is array:
            raise OSError(28, "No space left on device")
        plain(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", full)
        with pytest.raises(OSError, match="free some space") as caught:
            store.append(12, "sparse", values(12))
    assert caught.value.errno == 28
    assert open_selections(tmp_path)["step"].values.tolist() == [0, 5, 9]
    store.append(12, "sparse", values(12))
    np.testing.assert_array_equal(open_selections(tmp_path)["teacher"].values[3], values(12)["teacher"])

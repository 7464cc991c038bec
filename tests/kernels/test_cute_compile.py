"""The kernels' compiler: what is kept on disk is found again, trusted only if whole, and safe to write twice at a time.

Everything runs in processes of its own: the target must be set before the CuTe DSL is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msa_kernels.cute import compile as compiling

HERE = Path(__file__).parent
PRELUDE = """
import sys
from pathlib import Path
from msa_kernels.cute import check, compile as compiling
from tiny_cute import Crowded, Product, Scale
"""

needs_compiler = pytest.mark.skipif(sys.platform != "linux", reason="the CuTe DSL is for Linux")


def start(code: str, cache: Path, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "MSA_KERNELS_CACHE": str(cache), "CUTE_DSL_ARCH": "sm_90a"}
    command = [sys.executable, "-W", "error:compiled kernel", "-c", code]
    environment = kept | own | variables
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def run(code: str, cache: Path, **variables: str) -> str:
    return finish(start(PRELUDE + code, cache, **variables))


def kept(cache: Path) -> list[Path]:
    """Every file in the cache, unfinished ones included."""
    return sorted(path for path in cache.rglob("*") if path.is_file())


@pytest.fixture
def alone(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("MSA_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    return tmp_path


@needs_compiler
def test_two_processes_that_compile_at_the_same_time_leave_one_whole_kernel_for_the_next(tmp_path):
    load = "assert callable(compiling.load(Scale(3)))"
    together = [start(PRELUDE + load, tmp_path, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    for process in together:
        finish(process)
    (made,) = kept(tmp_path)
    assert made.suffix == ".o"
    # The next one does not compile, and calls what it found: an argument that is no tensor is refused by the kernel.
    run(
        """
def never(*_): raise AssertionError("compiled again")
compiling.compile_now = never
try:
    compiling.load(Scale(3))(1, 2)
except TypeError as error:
    assert "x: Tensor([n0], float32)" in str(error)
else:
    raise AssertionError
assert compiling.load(Scale(3)) is compiling.load(Scale(3))
""",
        tmp_path,
        PYTHONHASHSEED="3",
    )
    assert kept(tmp_path) == [made]


@needs_compiler
def test_torn_changed_and_foreign_files_are_compiled_again_and_never_run(tmp_path):
    run(
        """
import threading
compiled = []
original = compiling.compile_now
compiling.compile_now = lambda *given: compiled.append(given) or original(*given)

def load_again(kernel):
    before = len(compiled)
    compiling._loaded.clear()
    assert callable(compiling.load(kernel))
    return len(compiled) - before

assert load_again(Scale(3)) == 1
(path,) = compiling.folder().glob("*.o")
whole = path.read_bytes()
for bad in (b"", whole[:-1], whole[:len(whole) // 2], whole[1:], whole[:-32], bytes(len(whole)),
            whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
    path.write_bytes(bad)
    assert load_again(Scale(3)) == 1, len(bad)
    assert path.read_bytes() != bad
    assert load_again(Scale(3)) == 0
# A whole kernel, but another one, under this one's name.
assert load_again(Scale(4)) == 1
(other,) = set(compiling.folder().glob("*.o")) - {path}
path.write_bytes(other.read_bytes())
assert load_again(Scale(3)) == 1
# Something that is no file at all.
path.unlink()
path.mkdir()
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert load_again(Scale(3)) == 1
assert any("cannot be kept" in str(one.message) for one in said)
path.rmdir()

# Threads that come at the same time compile once.
compiling._loaded.clear()
before = len(compiled)
got = []
threads = [threading.Thread(target=lambda: got.append(compiling.load(Scale(5)))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(compiled) == before + 1 and len(set(map(id, got))) == 1
""",
        tmp_path,
    )
    assert not [path for path in kept(tmp_path) if path.name.startswith(".")]


@needs_compiler
def test_a_folder_that_cannot_be_written_to_costs_time_but_no_result(tmp_path):
    (tmp_path / "file").write_text("")
    said = run(
        """
import warnings
warnings.simplefilter("always")
assert callable(compiling.load(Scale(3)))
""",
        tmp_path / "file",
    )
    assert "compiled kernels cannot be kept" in said
    assert "MSA_KERNELS_CACHE" in said


@needs_compiler
def test_the_name_of_a_kept_kernel_covers_all_that_decides_its_content(tmp_path):
    run(
        """
import os
seen = set()
def new():
    size = len(seen)
    seen.add(compiling.identity(Scale(3)))
    return len(seen) > size
assert new() and not new()
assert compiling.identity(Scale(4)) not in seen
os.environ["CUTE_DSL_LINEINFO"] = "1"
assert new()
del os.environ["CUTE_DSL_LINEINFO"]
assert not new()
for name, other in (("_processor", "another"), ("_version", "later"), ("architecture", "sm_999")):
    function = getattr(compiling, name)
    setattr(compiling, name, lambda: other)
    assert new(), name
    setattr(compiling, name, function)
source = Path(sys.modules["tiny_cute"].__file__)
import inspect
inspect.getfile = lambda cls: compiling.__file__
assert new()

from dataclasses import dataclass
@dataclass(frozen=True)
class Vague:
    rule: object
try:
    compiling.identity(Vague(object()))
except ValueError as error:
    assert "plain values" in str(error)
else:
    raise AssertionError
""",
        tmp_path,
    )


@needs_compiler
def test_a_compiler_that_was_imported_for_another_target_is_noticed(tmp_path):
    code = """
import os, cutlass
os.environ["CUTE_DSL_ARCH"] = "sm_90a"
from msa_kernels.cute import compile as compiling
from tiny_cute import Scale
try:
    compiling.load(Scale(3))
except ValueError as error:
    assert "compiles for sm_100" in str(error) and "CUTE_DSL_ARCH=sm_90a" in str(error), error
else:
    raise AssertionError
"""
    finish(start(code, tmp_path, CUTE_DSL_ARCH="sm_100a"))
    assert kept(tmp_path) == []


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "kernel.o"
    compiling.write(path, b"old")

    def torn(part: Path, content: bytes) -> None:
        part.open("wb").write(content[:2])
        raise OSError("no space left")

    def refused(part: Path, target: Path) -> None:
        raise OSError("not permitted")

    for name, failing, message in (("write_bytes", torn, "no space"), ("replace", refused, "not permitted")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, failing)
            with pytest.raises(OSError, match=message):
                compiling.write(path, b"new")
        assert path.read_bytes() == b"old"
        assert kept(tmp_path) == [path]
    compiling.write(path, b"new")
    assert path.read_bytes() == b"new"
    assert kept(tmp_path) == [path]


def test_only_devices_that_the_kernels_are_made_for_are_compiled_for(alone, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no CUDA device.*CUTE_DSL_ARCH=sm_90a"):
        compiling.architecture()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    for capability, known in (((9, 0), True), ((8, 0), False), ((10, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        if known:
            assert compiling.architecture() == "sm_90a"
        else:
            with pytest.raises(ValueError, match=r"made for sm_90a only"):
                compiling.architecture()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    assert compiling.architecture() == "sm_90a"
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    with pytest.raises(ValueError, match=r"CUTE_DSL_ARCH='sm_100a'.*sm_90a"):
        compiling.architecture()


def test_a_missing_package_is_named_before_anything_is_compiled(alone, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(compiling.util, "find_spec", lambda name: None if name == "tvm_ffi" else real(name))
    monkeypatch.setattr(compiling.sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "tvm_ffi", raising=False)
    with pytest.raises(ValueError, match=r"apache-tvm-ffi is not installed; pip install apache-tvm-ffi"):
        compiling.load(3)
    assert "cannot compile: apache-tvm-ffi is not installed" in compiling.describe()[0]


def test_what_is_kept_is_described_and_where(alone, monkeypatch):
    assert compiling.describe()[-1].startswith(
        f"kernels: compiled ones in {alone}: 0 for this version, 0 for others, 0.0"
    )
    for folder, name in ((compiling.folder(), "a.o"), (compiling.folder(), "a.json"), (alone / "old", "b.o")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(2**20))
    assert "1 for this version, 1 for others, 2.0 MiB" in compiling.describe()[-1]
    monkeypatch.delenv("MSA_KERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compiling.folder().parent == Path("/somewhere/msa_kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiling.folder().parent == Path.home() / ".cache" / "msa_kernels"


def test_asking_for_the_cache_does_not_import_the_compiler(tmp_path):
    code = "from msa_kernels.cute import check, compile; compile.describe(); import sys; print(*sys.modules)"
    assert "cutlass" not in finish(start(code, tmp_path)).split()

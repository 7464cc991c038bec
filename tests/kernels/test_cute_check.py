"""What looks at compiled kernels finds their faults, and every kernel is looked at."""

import ast
from pathlib import Path

from msa_kernels.cute import check
from msa_kernels.cute import compile as compiling
from test_cute_compile import needs_compiler, run

SOURCES = sorted(Path(compiling.__file__).parent.glob("*.py"))


@needs_compiler
def test_the_check_finds_local_memory_serialised_products_and_missing_ones(tmp_path):
    run(
        """
def look(kernel, tensor_cores=False):
    first, again = check.examine(kernel), check.examine(kernel)
    assert first == again
    print("\\n".join(check.table(first, tensor_cores)))
    return first, first.faults(tensor_cores)

found, faults = look(Product(broken=False), True)
(function,) = found.functions
assert faults == [] and function.wgmma == 4 and function.shared == 16384 and function.name == "kernel"
assert 48 <= function.registers <= 128 and function.local == 0

found, faults = look(Product(broken=True), True)
assert any("C75" in fault and "serialized" in fault for fault in faults)

found, faults = look(Crowded(8))
crowd, turn = found.functions
assert faults == [] and (crowd.name, turn.name) == ("crowd", "turn")
assert (crowd.shared, turn.shared) == (0, None)

found, faults = look(Crowded(200))
(fault,) = faults
assert found.functions[0].local > 500 and fault.startswith("crowd: ") and "local memory" in fault
assert found.functions[0].registers == 64

assert look(Scale(3))[1] == [] and look(Scale(3), True)[1] == ["no wgmma instruction"]
assert len(list(compiling.folder().glob("*.json"))) == 5
# What an earlier check wrote is read, unless it is torn.
check._compile = lambda kernel: "compiled"
assert check.examine(Scale(3)).functions[0].name == "kernel"
for path in compiling.folder().glob("Scale*"):
    path.write_text(path.read_text()[:50])
original, check.asdict = check.asdict, lambda finding: finding
assert check.examine(Scale(3)) == "compiled"
""",
        tmp_path,
    )


def test_every_module_with_kernels_is_checked():
    def has_kernels(path: Path) -> bool:
        return any(ast.unparse(node) == "cute.kernel" for node in ast.walk(ast.parse(path.read_text())))

    assert sorted(path.stem for path in SOURCES if has_kernels(path)) == sorted(check.MODULES)


@needs_compiler
def test_one_variant_of_every_kernel_compiles_for_hopper_without_a_gpu(tmp_path):
    command = "import sys; from msa_kernels.cute import check; sys.argv[1:] = ['--first', '--jobs', '1']; check.main()"
    said = run(f"if __name__ == '__main__':\n    {command}", tmp_path)
    assert said.splitlines()[-1] == f"{len(check.MODULES)} kernels, 0 faults", said


@needs_compiler
def test_variants_are_different_plain_values(tmp_path):
    run(
        """
import pickle
for module, kernels in check.variants().items():
    assert len(set(kernels)) == len(kernels) > 0, module
    assert pickle.loads(pickle.dumps(kernels)) == kernels
    assert not [kernel for kernel in kernels if " at 0x" in repr(kernel)]
""",
        tmp_path,
    )

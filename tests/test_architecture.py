"""Rules of the source tree, and that no config field is accepted without being used."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from msa_lab.config import DataConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.config_io import config_hash, from_dict, to_dict
from msa_lab.config_model import ModelConfig

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {
    "msa_kernels": REPOSITORY / "kernels" / "msa_kernels",
    "msa_lab": REPOSITORY / "msa_lab",
    "msa_analysis": REPOSITORY / "analysis" / "msa_analysis",
}
SOURCES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
OTHERS = sorted(path for name in ("experiments", "tests") for path in (REPOSITORY / name).rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def imports(path: Path) -> set[str]:
    """Top packages that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_imports_go_one_way(path):
    forbidden = {"msa_kernels": {"msa_lab", "msa_analysis"}, "msa_lab": {"msa_analysis"}, "msa_analysis": set()}
    package = next(name for name, folder in PACKAGES.items() if folder in path.parents)
    not_allowed = forbidden[package] | {"experiments", "notebooks", "tests"}
    if label(path) == "msa_lab/cli.py":
        not_allowed.remove("msa_analysis")
    assert not imports(path) & not_allowed


@pytest.mark.parametrize("path", [path for path in SOURCES if PACKAGES["msa_lab"] in path.parents], ids=label)
def test_the_library_draws_nothing(path):
    assert not imports(path) & {"matplotlib", "seaborn", "plotly"}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        (
            "import msa_lab.cli, msa_lab.config, msa_lab.sweep, msa_lab.demo, msa_lab.budget, msa_lab.runs",
            "torch numpy",
        ),
        (
            "import msa_lab.cli, msa_lab.config, msa_lab.doctor, msa_kernels, msa_lab.model",
            "lightning wandb pandas matplotlib cutlass",
        ),
    ],
)
def test_nothing_heavy_is_imported_where_it_is_not_used(statement, unwanted):
    """What `msa_lab.train` imports is in tests/lab/test_ddp.py, where processes start that need it."""
    code = f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert not set(unwanted.split()) & set(loaded)


@pytest.mark.parametrize(
    "path", [path for path in SOURCES + OTHERS if "kernels" not in path.relative_to(REPOSITORY).parts], ids=label
)
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_functions_are_short(path):
    """At most 50 lines, docstring not counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node)
            told_lines = (first.end_lineno or 0) - first.lineno + 1 if told else 0
            assert (node.end_lineno or 0) - node.lineno + 1 - told_lines <= 50, node.name


def test_nothing_is_called_utils():
    assert not [path for path in SOURCES + OTHERS if path.stem in ("utils", "util", "helpers", "common", "misc")]


def test_commands_of_the_readme_exist():
    text = "".join(
        (REPOSITORY / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "experiments/README.md")
    )
    targets = set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "test-slow", "test-gpu", "bench", "clean"} <= targets
    used = set(re.findall(r"(?:^ *|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test"} <= used <= targets
    from msa_lab.cli_arguments import make_parser

    used = set(re.findall(r"(?:^ *|`|bin/)msa-lab ([a-z]+)", text, re.MULTILINE))
    assert used
    assert used <= set(make_parser()[1])
    for folder in re.findall(r"^\| `([\w./]+)/?` \|", (REPOSITORY / "README.md").read_text(), re.MULTILINE):
        assert (REPOSITORY / folder).exists() or folder in ("runs/", "data/"), folder


def test_files_named_in_the_readme_exist():
    text = (REPOSITORY / "README.md").read_text()
    for target in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (REPOSITORY / target).exists() or target == "docs/report.png", target


CHANGED = {
    ModelConfig: {
        "vocab_size": 61,
        "num_layers": 3,
        "d_model": 40,
        "num_query_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 12,
        "mlp_width": (40, 56),
        "rope_theta": 100.0,
        "qk_norm": False,
        "tie_embeddings": False,
        "attention": ("window", "msa"),
        "block_size": 8,
        "top_k_blocks": 2,
        "num_local_blocks": 2,
        "num_sink_blocks": 1,
        "num_proxies": 4,
        "num_proxy_kv_heads": 2,
        "proxy_dim": 12,
        "proxy_rope": False,
        "detach_proxy_input": False,
    },
    DataConfig: {
        "source": "text",
        "path": "texts",
        "text_field": "content",
        "max_bytes": 1000,
        "tokenizer": "bpe.json",
        "context_length": 512,
        "document_mask": True,
        "validation_fraction": 0.2,
        "expected_hash": "0123abcd",
    },
    TrainConfig: {
        "steps": 500,
        "stop_at": 300,
        "batch_size": 16,
        "accumulate": 2,
        "lr": 1e-3,
        "schedule": "cosine",
        "warmup_steps": 20,
        "decay_fraction": 0.2,
        "min_lr_ratio": 0.2,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "clip": 0.5,
        "proxy_lr": 1e-3,
        "proxy_clip": 0.5,
        "kl_weight": 0.5,
        "proxy_warmup_steps": 20,
        "fork_from": "study/arm-01234567",
        "fork_step": 100,
        "precision": "bf16",
        "compile": True,
        "cuda_graphs": False,
        "deterministic": False,
        "activation_checkpointing": True,
        "log_every": 5,
        "validate_every": 50,
        "validation_batches": 4,
        "checkpoint_every": 50,
    },
    SelectionConfig: {"records": 20, "documents": 4, "query_stride": 2, "teacher": False},
}
TOGETHER = {"fork_from": "fork_step", "fork_step": "fork_from", "source": "path"}
"""Fields that are refused without another one."""
SMALL = ModelConfig(
    vocab_size=60, num_layers=2, d_model=32, head_dim=8, mlp_width=48, proxy_dim=8, block_size=4, top_k_blocks=3
)


def config_classes(cls: type = RunConfig) -> list[type]:
    inner = [field.default_factory for field in fields(cls) if is_dataclass(field.default_factory)]
    return [cls, *(found for one in inner for found in config_classes(one))]


def test_every_field_has_another_value_here_to_be_tried():
    for cls, values in CHANGED.items():
        expected = {field.name for field in fields(cls) if not is_dataclass(field.default_factory)}
        assert set(values) == expected, f"add the new field of {cls.__name__} to CHANGED"
        default = cls()
        assert not [name for name, value in values.items() if getattr(default, name) == value]


@pytest.mark.parametrize("cls", [DataConfig, TrainConfig, SelectionConfig])
def test_every_field_changes_the_hash_and_survives_yaml(cls):
    section = {DataConfig: "data", TrainConfig: "train", SelectionConfig: "selections"}[cls]
    for name, value in CHANGED[cls].items():
        both = {name: value} | ({TOGETHER[name]: CHANGED[cls][TOGETHER[name]]} if name in TOGETHER else {})
        config = replace(RunConfig(), **{section: cls(**both)})
        assert config_hash(config) != config_hash(RunConfig()), name
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("cls", config_classes(), ids=lambda cls: cls.__name__)
def test_every_field_is_read_by_the_library(cls):
    """Read as an attribute somewhere outside the configs."""
    read = set()
    for path in PACKAGES["msa_lab"].glob("*.py"):
        if not path.stem.startswith("config"):
            nodes = ast.walk(ast.parse(path.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    through_property = {"attention_kinds": "attention", "mlp_widths": "mlp_width", "last_step": "stop_at"}
    read |= {field for name, field in through_property.items() if name in read}
    assert not {field.name for field in fields(cls)} - read


def behaviour(config: ModelConfig) -> list:
    """Shapes, outputs and gradients of the model that a config describes, on fixed tokens."""
    import torch

    from msa_lab.model import Transformer

    tokens = torch.randint(0, 60, (2, 33), generator=torch.Generator().manual_seed(0))
    model = Transformer(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            # At their initial size, weights leave attention so flat that a change of it drowns in rounding.
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    logits, kl = model(tokens[:, :-1], sparse=True, with_kl=True)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss + (0 if kl is None else kl.sum())).backward()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    gradient = model.embedding.weight.grad
    assert gradient is not None
    return [shapes, loss.item(), None if kl is None else kl.tolist(), gradient.norm().item()]


def differs(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) > 1e-5
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return any(differs(a, b) for a, b in zip(one, other, strict=True))
    return one != other


def test_every_field_of_the_model_changes_its_shapes_or_its_numbers():
    plain = behaviour(SMALL)
    assert not differs(plain, behaviour(replace(SMALL)))
    same = [
        name
        for name, value in CHANGED[ModelConfig].items()
        if not differs(plain, behaviour(replace(SMALL, **{name: value})))
    ]
    assert same == []


def test_head_sizes_come_from_the_config_alone():
    from msa_lab.model import Transformer

    config = ModelConfig(head_dim=128, proxy_dim=48, num_proxies=4, num_proxy_kv_heads=2, num_kv_heads=2, d_model=96)
    attention = Transformer(config).layers[0].attention
    assert attention.query.projection.weight.shape == (4 * 128, 96)
    assert attention.key.projection.weight.shape == attention.value.projection.weight.shape == (2 * 128, 96)
    assert attention.output.weight.shape == (96, 4 * 128)
    assert attention.proxy.query.projection.weight.shape == (4 * 48, 96)
    assert attention.proxy.key.projection.weight.shape == (2 * 48, 96)

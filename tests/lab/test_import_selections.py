"""Selections of other models: the same Dataset as a run's log, and nothing that is no selection gets in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msa_kernels import Selection, select_blocks
from safetensors.numpy import save_file
from torch import nn

from msa_lab.import_selections import from_arrays, from_file, from_record
from msa_lab.selections import record

BLOCK, LENGTH, TOP_K = 4, 64, 4
BLOCKS = LENGTH // BLOCK
OWN = np.arange(LENGTH) // BLOCK


def chosen(*, layers: int = 2, documents: int = 3, proxies: int = 2, unused: int = BLOCKS, seed: int = 0) -> np.ndarray:
    """Random (layer, document, proxy, query, slot), the own block first, the rest unordered, `unused` at the end."""
    rng = np.random.default_rng(seed)
    ids = np.full((layers, documents, proxies, LENGTH, TOP_K), unused)
    for query, own in enumerate(OWN):
        count = min(own, TOP_K - 1)
        ids[..., query, 0] = own
        order = rng.random((layers, documents, proxies, own)).argsort(-1)
        ids[..., query, 1 : count + 1] = order[..., :count]
    return ids


def expected(ids: np.ndarray) -> np.ndarray:
    """Ascending, then -1, by plain loops."""
    result = np.full(ids.shape, -1)
    for place in np.ndindex(ids.shape[:-1]):
        held = sorted(i for i in ids[place] if 0 <= i < BLOCKS)
        result[place][: len(held)] = held
    return result


@pytest.mark.parametrize("unused", [-1, -7, BLOCKS, 255])
def test_slots_of_any_sentinel_are_no_blocks(unused: int) -> None:
    ids = chosen(unused=unused)
    data = from_arrays(ids, block_size=BLOCK, unused=255)
    assert data["selected"].dims == ("step", "layer", "document", "proxy", "query", "slot")
    assert data["selected"].dtype == np.int16
    np.testing.assert_array_equal(data["selected"].values[0], expected(ids))
    assert (data["selected"].values < 0).sum() == (ids == unused).sum()


def test_the_dataset_is_like_that_of_a_run(tmp_path) -> None:
    from tiny import tiny_run

    from msa_lab.runs import Run
    from msa_lab.selections import SelectionStore, open_selections

    config = tiny_run(tmp_path / "texts")
    shape = (2, 2, 2, 128, 3)
    ids = np.sort(np.where(np.arange(3) < 1, np.arange(128)[:, None] // 8, -1) + np.zeros(shape, int), -1)[..., ::-1]
    values = {name: np.where(ids >= 0, 0.5, np.nan) for name in ("score", "mass", "teacher_mass")}
    values |= {"selected": ids, "teacher": ids}
    run = Run.of(config, tmp_path)
    run.write_config(config)
    store = SelectionStore.create(run.path / "selections.zarr", config, ["a", "b"], np.zeros((2, 128), int))
    optional = {name for name in store.arrays if name in ("mass_map", "divergence")}
    store.append(0, "sparse", values | {name: np.zeros(store.arrays[name].shape[1:]) for name in optional})
    log = open_selections(run)
    made = from_arrays(
        ids,
        block_size=8,
        **{name: values[name] for name in values if name not in ("selected",)},
        tokens=np.zeros((2, 128), int),
        documents=["a", "b"],
    )
    assert set(made.variables) <= set(log.variables)
    for name in made.data_vars:
        assert (made[name].dims, made[name].shape) == (log[name].dims, log[name].shape), name
        np.testing.assert_array_equal(made[name].values, log[name].values)
    for name in made.coords:
        np.testing.assert_array_equal(made[name].values, log[name].values)
    assert {key: log.attrs[key] for key in made.attrs} == made.attrs


def test_scores_follow_their_blocks() -> None:
    ids = chosen()
    data = from_arrays(ids, block_size=BLOCK, score=ids * 10.0)
    held = data["selected"].values
    np.testing.assert_array_equal(data["score"].values, np.where(held >= 0, held * 10.0, np.nan))


def test_layers_of_their_own_keep_their_numbers() -> None:
    ids = chosen()
    whole = from_arrays(ids, block_size=BLOCK)
    apart = from_arrays({7: ids[1], 2: ids[0]}, block_size=BLOCK)
    assert apart["layer"].values.tolist() == [2, 7]
    np.testing.assert_array_equal(apart["selected"].values, whole["selected"].values)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_file_gives_what_its_arrays_give(tmp_path, kind: str) -> None:
    ids = chosen()
    path = tmp_path / f"other.{kind}"
    plain = {"blocks.0": ids[0], "blocks.3": ids[1], "score.0": ids[0] * 1.0, "score.3": ids[1] * 1.0}
    if kind == "npz":
        np.savez(path, **plain, block_size=BLOCK, num_local_blocks=1, documents=["x", "y", "z"])
    else:
        made = {key: np.ascontiguousarray(value) for key, value in plain.items()}
        save_file(made, path, metadata={"format": "pt", "block_size": str(BLOCK)})
    data = from_file(path)
    wanted = from_arrays({0: ids[0], 3: ids[1]}, block_size=BLOCK, score={0: ids[0] * 1.0, 3: ids[1] * 1.0})
    np.testing.assert_array_equal(data["selected"].values, wanted["selected"].values)
    np.testing.assert_array_equal(data["score"].values, wanted["score"].values)
    assert data["layer"].values.tolist() == [0, 3]
    assert data.attrs == wanted.attrs | {"label": "other"}


def with_(change: str, ids: np.ndarray) -> np.ndarray:
    ids = ids.copy()
    at = (1, 0, 1, 63)
    if change == "future":
        ids[1, 0, 1, 40, 1] = 11
    elif change == "twice":
        ids[at] = [15, 3, 3, 5]
    elif change == "own":
        ids[at] = [1, 2, 3, 4]
    elif change == "empty":
        ids[:, 2] = -1
    elif change == "budget":
        ids[1, :, 0, :, 2:] = -1
    return ids


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("future", "block 11 of record 0, layer 1, document 0, proxy 1, query 40 lies after the query's own block"),
        ("twice", "block 3 of record 0, layer 1, document 0, proxy 1, query 63 stands twice in its row"),
        ("own", "block 15 .* query 63 is not chosen though it is forced; .* try num_local_blocks=0"),
        ("empty", "document 2 is empty, no row of it holds a block; leave it out"),
        ("budget", "layer 1, proxy 0 chooses at most 2 blocks, another 4: proxies of unlike budgets"),
    ],
)
def test_what_is_no_selection_is_refused(change: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^blocks: .*{said}"):
        from_arrays(with_(change, chosen()), block_size=BLOCK)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"block_size": 0}, "block_size=0: must be one whole number of at least 1; try 1"),
        ({"block_size": [4, 8]}, r"block_size=\[4, 8\]: must be one whole number"),
        ({"top_k_blocks": 3}, "top_k_blocks=3: a row of blocks holds 4 blocks; try 4"),
        ({"context_length": 60}, "context_length=60: with query_stride=1 it has 60 rows, and blocks has 64; try 64"),
        ({"num_sink_blocks": 1}, "block 0 .* is not chosen though it is forced; .* try num_sink_blocks=0"),
        ({"blocks": np.zeros((2, 3))}, r"blocks has shape \(2, 3\): must be"),
        ({"blocks": np.zeros((1, 0, 1, 4, 2), int)}, "none of them 0"),
        ({"blocks": chosen() * 1.0}, "blocks is float64: must hold whole numbers"),
        ({"blocks": {0: chosen()[0], 1: chosen()[0, :, :1]}}, "import unlike layers apart"),
        ({"blocks": {}}, "it has no layer"),
        ({"score": np.zeros((2, 3, 2, 64, 3))}, "score has shape .*: must be as blocks"),
        ({"score": np.where(chosen() == 7, np.nan, 0.0)}, "score: block 7 .* has a score that is not finite"),
        ({"score": np.where(chosen() == 7, np.inf, 0.0)}, "score: block 7 .* has a score that is not finite"),
        ({"teacher_mass": np.zeros((2, 3, 2, 64, 4))}, "teacher_mass: needs the blocks that it belongs to"),
        ({"teacher": with_("future", chosen())}, "teacher: block 11 .* lies after"),
        ({"tokens": np.zeros((3, 8))}, r"tokens has shape \(3, 8\): must be \(3, 64\)"),
        ({"steps": [1, 2]}, r"steps=\[1, 2\]: must be 1 ascending"),
        ({"documents": ["a"]}, "documents: 1 names for 3 documents"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_arrays(**{"blocks": chosen(), "block_size": BLOCK} | arguments)


def test_a_layer_without_scores_is_no_fault() -> None:
    ids = chosen()
    score = np.stack([ids[0] * 1.0, np.full(ids[0].shape, np.nan)])
    assert np.isnan(from_arrays(ids, block_size=BLOCK, score=score)["score"].values[0, 1]).all()


@pytest.mark.parametrize(
    ("name", "held", "said"),
    [
        ("a.npz", {"block": 1}, "block: unknown key; did you mean blocks"),
        ("a.npz", {"blocks": chosen()}, "has no block_size; its keys are blocks"),
        ("a.npz", {"blocks": chosen(), "blocks.0": chosen()[0]}, "stands beside blocks"),
        ("a.npz", {"blocks.0": chosen()[0], "blocks": chosen()}, "stands beside blocks"),
        ("a.npz", {"blocks": chosen(), "block_size": [4, 8]}, r"block_size=\[4, 8\]: must be one whole number"),
        ("a.npz", {"blocks": np.array([{}], dtype=object), "block_size": 4}, "allow_pickle"),
        ("a.npz", b"no zip", "is no .npz file|allow_pickle"),
        ("a.npz", b"", "is no .npz file"),
        ("a.safetensors", b"no tensors", "is no .safetensors file"),
        ("a.bin", b"", "must be an existing file that ends in .npz or .safetensors"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, name: str, held: object, said: str) -> None:
    path = tmp_path / name
    if isinstance(held, dict):
        np.savez(path, **held)
    else:
        path.write_bytes(held)
    with pytest.raises(ValueError, match=said) as error:
        from_file(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


class Choose(nn.Module):
    """As another code base has it: its selection comes out of a module of its own."""

    def forward(self, q_proxy: torch.Tensor, k_proxy: torch.Tensor) -> Selection:
        return select_blocks(q_proxy, k_proxy, top_k_blocks=TOP_K, block_size=BLOCK)


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose, self.core = Choose(), Core()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 8))
        self.choose(heads[:, :, :2], heads[:, :, :1])
        return self.core(heads, heads[:, :, :2]).flatten(2)


def test_a_users_own_modules_are_recorded_with_scores_and_teacher() -> None:
    from msa_kernels import block_scores

    from msa_lab.teacher import block_mass, top_blocks

    model, x = nn.Sequential(Layer(), Layer()), torch.randn(3, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    batches = []
    with record(model) as seen:
        for part in (x[:2], x[2:]):
            model(part)
            batches.append(dict(seen))
    data = from_record(batches, tokens=torch.zeros(3, LENGTH))
    assert data.sizes == {"step": 1, "layer": 2, "document": 3, "proxy": 2, "query": 64, "slot": 4, "token": 64}
    assert data.attrs["modules"] == ["0.choose", "1.choose"]
    heads = x.unflatten(-1, (4, 8))
    wanted = select_blocks(heads[:, :, :2], heads[:, :, :1], top_k_blocks=TOP_K, block_size=BLOCK).blocks
    np.testing.assert_array_equal(data["selected"].values[0, 0], wanted.numpy())
    scores = block_scores(heads[:, :, :2], heads[:, :, :1], block_size=BLOCK)
    last = data.isel(step=0, layer=1, document=1, proxy=1, query=50)
    for slot in range(4):
        assert last["score"].values[slot] == pytest.approx(scores[1, 1, 50, int(last["selected"][slot])].item())
    mass = block_mass(heads, heads[:, :, :2], block_size=BLOCK, num_groups=2)
    teacher = top_blocks(mass, top_k_blocks=TOP_K, block_size=BLOCK).blocks
    np.testing.assert_array_equal(data["teacher"].values[0, 0], teacher.numpy())
    assert 0 < float(data["teacher_mass"].sum()) <= 3 * 2 * 2 * LENGTH


@pytest.mark.parametrize("top_k", [TOP_K, TOP_K + 2])
def test_the_recorded_teacher_has_the_proxies_budget(top_k: int) -> None:
    model = nn.Sequential(Layer())
    with record(model) as seen:
        model(torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0)))
    data = from_record(seen, top_k_blocks=top_k)
    assert data.attrs["top_k_blocks"] == data.sizes["slot"] == top_k
    assert ((data["teacher"].values >= 0).sum(-1) == np.minimum(OWN + 1, top_k)).all()
    assert (data["teacher"].values == OWN[:, None]).any(-1).all()


def test_modules_of_unlike_block_sizes_are_refused() -> None:
    class Finer(Choose):
        def forward(self, q_proxy, k_proxy):
            return select_blocks(q_proxy, k_proxy, top_k_blocks=TOP_K, block_size=2)

    model = nn.Sequential(Layer(), Layer())
    model[1].choose = Finer()
    with record(model) as seen:
        model(torch.randn(1, LENGTH, 32))
    with pytest.raises(ValueError, match=r"all of one block size; it has .*'0\.choose': 4, '1\.choose': 2"):
        from_record(seen)


def test_a_record_that_is_none_is_refused() -> None:
    model = nn.Sequential(Layer())
    with record(model) as seen:
        pass
    with pytest.raises(ValueError, match="seen: holds no selection"):
        from_record(seen)

    class Packed(Choose):
        def forward(self, q_proxy, k_proxy):
            return super().forward(q_proxy, k_proxy)._replace(cu_seqlens=torch.tensor([0, 32, 64]))

    model[0].choose = Packed()
    with record(model) as seen:
        model(torch.randn(1, LENGTH, 32))
    with pytest.raises(ValueError, match=r"0\.choose: has several documents in a row"):
        from_record(seen)

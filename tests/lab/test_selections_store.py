import os
import time

import numpy as np
import pytest
from selection_logs import IDS, TOKENS, config, values, written

from msa_lab.runs import Run
from msa_lab.selection_layout import per_record
from msa_lab.selection_store import SelectionStore, open_selections


def test_what_is_written_is_read_back(tmp_path):
    store = written(tmp_path / "selections.zarr")
    heads = np.full((2, 2, 4, 10, 3), 2, np.int32)
    store.write_heads(9, {"head_teacher": heads, "head_teacher_mass": heads / 8})
    data = open_selections(tmp_path)
    assert data["selected"].dims == ("step", "layer", "document", "proxy", "query", "slot")
    assert data["selected"].dtype == np.int16
    assert data["mass"].dtype == np.float16
    assert data["step"].values.tolist() == [0, 5, 9]
    assert data["phase"].values.tolist() == ["warmup", "sparse", "sparse"]
    assert data["layer"].values.tolist() == [0, 2]
    assert data["document"].values.tolist() == list(IDS)
    assert data["query"].values.tolist() == list(range(0, 40, 4))
    assert data["proxy"].values.tolist() == [0, 1]
    for name, value in values(5).items():
        np.testing.assert_array_equal(data[name].sel(step=5).values, value.astype(data[name].dtype))
    np.testing.assert_array_equal(data["tokens"].values, TOKENS)
    assert data["head_teacher"].dims == ("layer", "document", "head", "query", "slot")
    np.testing.assert_array_equal(data["head_teacher"].values, heads)
    wanted = {"block_size": 8, "top_k_blocks": 3, "num_local_blocks": 1, "num_sink_blocks": 0, "context_length": 40}
    assert wanted.items() <= data.attrs.items()
    assert {"num_query_heads", "config_hash", "code_version", "tokenizer"} <= set(data.attrs)


def test_unrecorded_steps_and_heads_are_absent(tmp_path):
    store = SelectionStore.create(tmp_path / "selections.zarr", config(), IDS, TOKENS)
    assert open_selections(tmp_path).sizes["step"] == 0
    store.append(0, "warmup", values())
    data = open_selections(store.path)
    assert data.sizes["step"] == 1
    assert not [name for name in data.variables if str(name).startswith("head")]


def test_heads_of_another_record_are_not_shown(tmp_path):
    store = written(tmp_path / "selections.zarr", steps=(0, 5))
    heads = np.zeros((2, 2, 4, 10, 3), np.int32)
    store.write_heads(5, {"head_teacher": heads, "head_teacher_mass": heads})
    SelectionStore.resume(store.path, config(), TOKENS, 4)
    assert "head_teacher" not in open_selections(tmp_path)


def test_opening_reads_no_record(tmp_path):
    store = written(tmp_path / "selections.zarr")
    for index in (0, 1):
        chunk = store.path / "selected" / "c" / str(index) / "0/0/0/0/0"
        chunk.write_bytes(b"damaged" * 9)
    data = open_selections(tmp_path)
    np.testing.assert_array_equal(data["selected"].isel(step=2).values, values(9)["selected"])
    with pytest.raises(ValueError, match="checksum"):
        data["selected"].isel(step=0).load()


def test_records_newer_than_the_resumed_step_are_dropped(tmp_path):
    path = tmp_path / "selections.zarr"
    written(path)
    store = SelectionStore.resume(path, config(), TOKENS, 5)
    assert store.steps == [0, 5]
    assert open_selections(tmp_path)["step"].values.tolist() == [0, 5]
    store.append(9, "sparse", values(1))
    np.testing.assert_array_equal(open_selections(tmp_path)["selected"].values[2], values(1)["selected"])


def test_a_log_of_another_config_or_corpus_is_refused(tmp_path):
    path = tmp_path / "selections.zarr"
    written(path)
    with pytest.raises(ValueError, match="was recorded with config"):
        SelectionStore.resume(path, config(model={"d_model": 64}), TOKENS, 5)
    with pytest.raises(ValueError, match="other probe documents"):
        SelectionStore.resume(path, config(), TOKENS + 1, 5)


def test_block_ids_that_do_not_fit_int16_are_refused(tmp_path):
    path = tmp_path / "selections.zarr"
    fits = config(model={"block_size": 1}, data={"context_length": 32768}, selections={"query_stride": 1})
    SelectionStore.create(path, fits, IDS, np.zeros((2, 4)))
    more = config(model={"block_size": 1}, data={"context_length": 32769}, selections={"query_stride": 1})
    with pytest.raises(ValueError, match=r"model\.block_size=1: makes 32769 blocks.*try 2"):
        SelectionStore.create(path, more, IDS, np.zeros((2, 4)))
    assert len(open_selections(path)["query"]) == 32768, "a refused log must not touch the one that is there"
    bad = values()
    bad["selected"] = bad["selected"] + 70_000
    store = written(tmp_path / "other.zarr")
    with pytest.raises(ValueError, match="selected holds block ids"):
        store.append(12, "sparse", bad)
    assert open_selections(store.path)["step"].values.tolist() == [0, 5, 9]


@pytest.mark.parametrize(
    ("step", "phase", "change", "message"),
    [
        (9, "sparse", {}, "step=9: the log already holds step 9"),
        (12, "dense", {}, "phase='dense'"),
        (12, "sparse", {"mass": None}, r"variables \['score"),
        (12, "sparse", {"mass": np.zeros((2, 2, 2, 9, 3))}, "mass has shape"),
    ],
)
def test_records_that_do_not_belong_are_refused(tmp_path, step, phase, change, message):
    store = written(tmp_path / "selections.zarr")
    given = {name: value for name, value in (values() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        store.append(step, phase, given)
    assert open_selections(tmp_path)["step"].values.tolist() == [0, 5, 9]


def test_a_full_log_says_so(tmp_path):
    store = SelectionStore.create(tmp_path / "selections.zarr", config(records=2), IDS, TOKENS)
    store.append(0, "sparse", values())
    store.append(1, "sparse", values())
    with pytest.raises(ValueError, match="has room for 2 records"):
        store.append(2, "sparse", values())


def test_a_record_has_the_size_that_its_dims_say(tmp_path):
    model = {"num_layers": 12, "attention": "msa", "num_query_heads": 4, "num_kv_heads": 4, "num_proxies": 4}
    large = config(
        records=2,
        model={**model, "block_size": 128, "top_k_blocks": 16},
        data={"context_length": 4096},
        selections={"documents": 8, "query_stride": 1},
    )
    store = SelectionStore.create(tmp_path / "a.zarr", large, [str(i) for i in range(8)], np.zeros((8, 4096)))
    int32 = 100_663_296
    assert store.arrays["selected"].nbytes == 2 * int32 // 2
    assert store.arrays["selected"].chunks == (1, *store.arrays["selected"].shape[1:])


def test_one_record_of_three_thousand_is_read_quickly(tmp_path):
    store = SelectionStore.create(tmp_path / "selections.zarr", config(records=3000), IDS, TOKENS)
    one = values()
    store.append(0, "sparse", one)
    # The first record's files under other names: a long run's log without its minutes.
    for name, array in store.arrays.items():
        if not per_record(array):
            continue
        rest = "/".join("0" * (array.ndim - 1))
        first = store.path / name / "c/0" / rest
        for index in range(1, 3000) if name == "selected" else (2999,):
            chunk = store.path / name / "c" / str(index) / rest
            chunk.parent.mkdir(parents=True)
            os.link(first, chunk)
    store.steps = list(range(3000))
    store._commit()
    spent = []
    for index in (1500, 7, 2999):
        start = time.perf_counter()
        data = open_selections(tmp_path)
        record = data["selected"].isel(step=index).values
        spent.append(time.perf_counter() - start)
        np.testing.assert_array_equal(record, one["selected"])
    assert data.sizes["step"] == 3000
    print(f"opened and read in {min(spent):.4f} s")


def test_a_folder_without_a_log_says_what_it_is(tmp_path):
    run = Run(tmp_path / "seed0")
    run.write_config(config())
    with pytest.raises(ValueError, match=r"has no selections\.zarr: nothing was recorded"):
        open_selections(run)
    with pytest.raises(ValueError, match="neither a run folder nor a selection log"):
        open_selections(tmp_path / "nowhere")
    written(run.path / "selections.zarr")
    assert open_selections(run).sizes["step"] == 3


def test_without_a_teacher_only_the_choice_is_kept(tmp_path):
    plain = config(selections={"teacher": False})
    store = SelectionStore.create(tmp_path / "selections.zarr", plain, IDS, TOKENS)
    store.append(0, "sparse", {name: values()[name] for name in ("selected", "score")})
    data = open_selections(tmp_path)
    assert set(data.data_vars) == {"selected", "score", "tokens"}

from dataclasses import replace

import pytest

from msa_lab.budget import Unmatched, count_parameters, flops_per_token, format_table, match, table
from msa_lab.config import RunConfig, TrainConfig
from msa_lab.config_model import ModelConfig
from msa_lab.cost import peak_flops
from msa_lab.dry_run import unmatched
from msa_lab.runs import arm_folder

SMALL = ModelConfig(attention="dense")


def large(**changes) -> ModelConfig:
    """A model of which each proxy's worth is easily worked by hand: d 1024, 4 proxies and one key of dim 128."""
    values = {"num_layers": 12, "d_model": 1024, "num_query_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    proxies = {"num_proxies": 4, "num_proxy_kv_heads": 1, "proxy_dim": 128, "mlp_width": 2816}
    return ModelConfig(**(values | proxies | {"vocab_size": 32_000} | changes))


def arm(name: str, model: ModelConfig, **train) -> RunConfig:
    return RunConfig(study="s", arm=name, model=model, train=TrainConfig(**train))


def test_matched_parameters_are_matched():
    proxies = large(qk_norm=False)
    assert count_parameters(proxies).proxy == 7_864_320 == 12 * 655_360
    assert count_parameters(replace(proxies, attention="dense")).proxy == 0
    assert round(655_360 / (3 * 1024), 2) == 213.33

    msa, dense = match([arm("msa", proxies), arm("dense", replace(proxies, attention="dense"))])
    assert msa.model == proxies
    widths = dense.model.mlp_widths
    assert widths == (2816 + 216,) * 8 + (2816 + 208,) * 4
    left = [3 * 1024 * (width - 2816) - 655_360 for width in widths]
    assert left == [8_192] * 8 + [-16_384] * 4
    assert count_parameters(dense.model).total == count_parameters(msa.model).total


def test_the_norm_gains_of_proxies_are_matched_too_and_what_is_left_is_reported():
    msa, dense = match([arm("msa", large()), arm("dense", large(attention="dense"))])
    first, second = table([msa, dense])
    assert (first.difference, second.difference) == (0, -12 * 2 * 128)
    assert second.percent == pytest.approx(100 * -3072 / first.total)
    assert (first.proxy, second.proxy) == (7_864_320 + 3072, 0)
    assert first.total - first.non_embedding == 32_000 * 1024


@pytest.mark.parametrize("kinds", ["dense", "window", "random", ("dense", "msa", "window", "msa")])
def test_every_arm_comes_within_a_thousandth_in_widths_divisible_by_eight_where_possible(kinds):
    runs = match([arm("msa", ModelConfig()), arm("other", ModelConfig(attention=kinds))])
    rows = table(runs)
    assert all(abs(row.difference) < 1e-3 * rows[0].total for row in rows)
    widths = runs[1].model.mlp_widths
    assert sorted(widths, reverse=True) == list(widths)
    assert max(widths) - min(widths) <= 8
    assert match(runs) == runs


def test_smaller_steps_are_taken_only_when_eight_is_too_coarse():
    tiny = ModelConfig(num_layers=1, d_model=64, mlp_width=128, proxy_dim=10)
    dense = match([arm("msa", tiny), arm("dense", replace(tiny, attention="dense"))])[1]
    need = count_parameters(tiny).proxy
    added = dense.model.mlp_widths[0] - 128
    assert added % 8
    assert abs(3 * 64 * added - need) < 1e-3 * count_parameters(tiny).total


def test_an_arm_that_widths_cannot_match_is_named_and_the_others_are_matched():
    coarse = ModelConfig(vocab_size=2, num_layers=1, d_model=64, mlp_width=8, proxy_dim=2, head_dim=2)
    runs = [arm("msa", coarse), arm("dense", replace(coarse, attention="dense")), arm("same", coarse)]
    first, dense, same = match(runs)
    assert (first, same) == (runs[0], runs[2])
    assert isinstance(dense, Unmatched)
    assert dense.model == runs[1].model
    assert dense.reason.startswith("model.mlp_width=8: no width comes within 0.1%")
    assert replace(dense, seed=3).reason == dense.reason  # a study's seeds are made so
    text = format_table([first, dense, same])
    assert f"dense: cannot be matched: {dense.reason}" in text
    assert "let runs() return" not in text
    assert unmatched([first, dense, same]) == []  # a plan tells it once, as a run that cannot be trained
    assert [line.split(":")[0] for line in unmatched(runs)] == ["dense"]


def test_stems_stay_as_they_are_and_forks_are_only_wider():
    stem = arm("stem", SMALL, stop_at=200)
    fork = {"fork_from": arm_folder(stem), "fork_step": 200}
    runs = [stem, arm("msa", replace(SMALL, attention="msa"), **fork), arm("dense", SMALL, **fork)]
    matched = match(runs)
    assert matched[0] == stem
    assert [run.train.fork_from for run in matched[1:]] == [arm_folder(stem)] * 2
    assert min(matched[2].model.mlp_widths) > 352
    assert [row.is_stem for row in table(matched)] == [True, False, False]
    narrow = match([stem, arm("narrow", replace(SMALL, mlp_width=344), **fork)])[1]
    assert isinstance(narrow, Unmatched)
    assert narrow.reason == "model.mlp_width=344: a fork may only be wider than its stem stem; try 352"


def test_seeds_of_an_arm_get_the_same_widths_and_one_row():
    runs = [replace(arm(n, ModelConfig(attention=n)), seed=seed) for seed in (0, 1) for n in ("msa", "dense")]
    matched = match(runs)
    assert matched[1].model == matched[3].model
    assert [row.arm for row in table(matched)] == ["msa", "dense"]


def test_causal_attention_counts_half_and_sparse_attention_its_visible_pairs():
    sequence, heads = 4096, 4 * 32
    dense = flops_per_token(SMALL, sequence).forward
    assert dense.attention * sequence == 4 * heads * 4 * (sequence * (sequence + 1) // 2)
    msa = flops_per_token(ModelConfig(block_size=128, top_k_blocks=16), sequence).forward
    assert msa.attention * sequence == pytest.approx(4 * heads * 4 * 6_162_432, rel=1e-12)
    assert msa.proxy_scoring * sequence == 4 * 2 * 2 * 32 * (sequence * (sequence + 1) // 2)
    assert (dense.proxy_scoring, dense.proxy_projections, dense.kl, msa.kl) == (0, 0, 0, 0)


@pytest.mark.parametrize(("sequence", "published"), [(2**15, 6.4), (2**17, 16.0), (2**19, 25.6), (2**20, 28.44)])
def test_reduction_over_dense_is_the_published_one(sequence, published):
    """The paper counts a full own block and full rows at a document's start, which weighs most where S is short."""
    model = large(num_query_heads=64, num_kv_heads=4, proxy_dim=128)
    dense = flops_per_token(replace(model, attention="dense"), sequence).forward
    msa = flops_per_token(model, sequence).forward
    ratio = dense.attention / (msa.attention + msa.proxy_scoring)
    assert ratio == pytest.approx(published, rel=0.01 + 2000 / sequence)
    assert ratio >= published * 0.999


def test_training_counts_the_backward_of_what_has_one():
    counted = flops_per_token(ModelConfig(), 4096)
    once, all_in = counted.forward, counted.training
    assert all_in.mlp == 3 * once.mlp
    assert all_in.attention == 3 * once.attention
    assert all_in.proxy_scoring == once.proxy_scoring > 0
    assert all_in.proxy_projections == 2 * once.proxy_projections
    attached = flops_per_token(ModelConfig(detach_proxy_input=False), 4096).training
    assert attached.proxy_projections == 3 * once.proxy_projections
    visible = once.attention / (4 * 4 * 32)
    assert all_in.kl == pytest.approx(visible * (2 * 4 * 32 + 3 * 2 * 2 * 32))


def test_warm_up_attends_densely_selects_nothing_and_takes_the_kl_over_all_keys():
    warm, sparse = (flops_per_token(ModelConfig(), 4096, phase=phase).training for phase in ("warmup", "sparse"))
    dense = flops_per_token(SMALL, 4096).training
    assert warm.attention == dense.attention > sparse.attention
    assert warm.proxy_scoring == 0
    assert warm.kl == pytest.approx(sparse.kl * dense.attention / sparse.attention)
    window = ModelConfig(attention="window")
    assert flops_per_token(window, 4096, phase="warmup") == flops_per_token(window, 4096)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peak_of_known_devices(name, tera):
    assert peak_flops(name) == tera * 1e12


def test_unknown_devices_have_no_peak():
    assert peak_flops("NVIDIA GeForce GTX 1080") is None
    assert peak_flops("cpu") is None


def test_parameters_of_every_shape_are_those_of_the_built_model():
    from msa_lab.model import Transformer

    for changes in (
        {},
        {"attention": "dense", "tie_embeddings": False},
        {"attention": ("dense", "msa", "window"), "num_layers": 3, "mlp_width": (64, 72, 80), "qk_norm": False},
        {"num_proxies": 4, "num_proxy_kv_heads": 2, "proxy_dim": 16, "num_kv_heads": 4, "head_dim": 24},
    ):
        config = ModelConfig(**({"d_model": 96} | changes))
        sizes = {name: p.numel() for name, p in Transformer(config).named_parameters()}
        count = count_parameters(config)
        assert sum(sizes.values()) == count.total
        assert sum(n for name, n in sizes.items() if ".proxy." in name) == count.proxy


@pytest.mark.parametrize("kind", ["dense", "msa"])
def test_flops_of_matmuls_with_weights_are_those_of_the_built_model(kind):
    """Attention itself is left out: the counter takes causal attention for full."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from msa_lab.model import Transformer

    config = ModelConfig(attention=kind, num_layers=2, d_model=64, block_size=16, top_k_blocks=2)
    model, tokens = Transformer(config), torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    flops = flops_per_token(config, 64).forward
    expected = flops.projections + flops.proxy_projections + flops.mlp + flops.logits
    assert products == expected * tokens.numel()

"""Configs: every rule has a line that names field, value, rule and a way out; plain values come back unchanged."""

import math
from dataclasses import fields, replace

import pytest

from msa_lab.config import DataConfig, ModelConfig, RecallConfig, RunConfig, SelectionConfig, TrainConfig, density
from msa_lab.config_io import config_hash, from_dict, to_dict
from msa_lab.runs import arm_folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelConfig(num_proxies=3),
            r"model\.num_proxies=3: must divide num_query_heads=4; try one of 1, 2, 4",
        ),
        (lambda: ModelConfig(num_query_heads=12, num_kv_heads=3, num_proxies=4), r"num_proxies=4: .* divide one anot"),
        (lambda: ModelConfig(num_kv_heads=3), r"model\.num_kv_heads=3: must divide num_query_heads=4"),
        (lambda: ModelConfig(num_proxy_kv_heads=3), r"model\.num_proxy_kv_heads=3: must divide num_proxies=2"),
        (lambda: ModelConfig(head_dim=7), r"model\.head_dim=7: RoPE needs an even dimension; try 64"),
        (lambda: ModelConfig(top_k_blocks=0), r"model\.top_k_blocks=0: must be at least 1"),
        (lambda: ModelConfig(top_k_blocks=2, num_local_blocks=2, num_sink_blocks=1), r"try top_k_blocks=3"),
        (lambda: ModelConfig(attention=("msa",)), r"one per layer \(num_layers=4\)"),
        (lambda: ModelConfig(attention="mas"), r"model\.attention='mas': must be one of dense, msa, window, random,"),
        (lambda: ModelConfig(mlp_width=(1, 2)), r"model\.mlp_width=\(1, 2\): needs one value, or one per layer"),
        (lambda: RecallConfig(near_fraction=2.0), r"data\.recall\.near_fraction=2\.0: is a share"),
        (lambda: RecallConfig(pairs=100), r"data\.recall\.pairs=100: .* num_keys=64; try 64"),
        (lambda: DataConfig(source="text"), r"data\.path='': source=text reads from a path"),
        (lambda: DataConfig(source="txt"), r"data\.source='txt': must be one of python, text, recall, hf"),
        (lambda: DataConfig(validation_fraction=1.0), r"data\.validation_fraction=1\.0"),
        (lambda: TrainConfig(accumulate=3), r"train\.accumulate=3: must divide batch_size=8"),
        (lambda: TrainConfig(stop_at=1500), r"train\.stop_at=1500: must lie within steps=1000"),
        (lambda: TrainConfig(fork_from="x"), r"train\.fork_step=0: goes together with fork_from"),
        (lambda: TrainConfig(fork_from="x", fork_step=1000), r"the fork must come before the end, step 1000"),
        (lambda: TrainConfig(beta2=1.0), r"train\.beta2=1\.0"),
        (lambda: SelectionConfig(records=1), r"selections\.records=1"),
        (lambda: RunConfig(arm="a/b"), r"arm='a/b': names a folder"),
        (lambda: RunConfig(seed=-1), r"seed=-1"),
        (lambda: RunConfig(seed=2**63), r"seed=9223372036854775808: must lie below 2\*\*32; try 0"),
        (
            lambda: RunConfig(selections=SelectionConfig(query_stride=128)),
            r"selections\.query_stride=128: must lie below a block's tokens in a row \(128\).*; try 64",
        ),
        (
            lambda: RunConfig(data=DataConfig(context_length=50), selections=SelectionConfig(query_stride=50)),
            r"selections\.query_stride=50: must lie below a block's tokens in a row \(50\).*; try 25",
        ),
        (lambda: RunConfig(train=TrainConfig(lr=math.inf)), r"train\.lr=inf: must be a finite number; try 0\.003"),
        (lambda: RunConfig(train=TrainConfig(kl_weight=math.inf)), r"train\.kl_weight=inf: must be a finite number"),
        (lambda: RunConfig(model=ModelConfig(rope_theta=math.inf)), r"model\.rope_theta=inf: must be a finite number"),
        (lambda: TrainConfig(schedule="cosine", decay_fraction=0.5), r"decay_fraction=0\.5: is not read with .*cosine"),
        (lambda: RunConfig(data=DataConfig(source="recall")), r"data\.recall\.block_size=16: must equal .*=128"),
    ],
)
def test_an_impossible_value_is_named_with_its_rule_and_a_way_out(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_misspelt_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"model\.num_proxis: unknown key; did you mean model\.num_proxies\?"):
        from_dict({"model": {"num_proxis": 3}})
    with pytest.raises(ValueError, match=r"model\.num_layers='a': must be a whole number; try 4"):
        from_dict({"model": {"num_layers": "a"}})
    with pytest.raises(ValueError, match=r"train\.compile=1: must be true or false; try False"):
        from_dict({"train": {"compile": 1}})


def test_plain_values_come_back_as_the_same_config() -> None:
    config = RunConfig(
        model=ModelConfig(attention=("dense", "msa", "window", "random"), mlp_width=(8, 16, 24, 32)),
        train=TrainConfig(lr=1, schedule="cosine"),
    )
    assert from_dict(to_dict(config)) == config


def test_names_and_seed_do_not_change_an_arms_hash_and_everything_else_does() -> None:
    config = RunConfig()
    assert config_hash(replace(config, study="a", arm="b", seed=3)) == config_hash(config)
    assert arm_folder(replace(config, seed=1)) == arm_folder(config)
    assert config_hash(replace(config, train=replace(config.train, lr=1.0))) != config_hash(config)


@pytest.mark.parametrize("name", [f.name for f in fields(TrainConfig) if f.type == "float"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_of_a_run_may_be_infinite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"train\.{name}="):
        RunConfig(train=replace(TrainConfig(), **{name: value}))


def test_every_stride_below_a_block_is_taken() -> None:
    assert RunConfig(selections=SelectionConfig(query_stride=127)).selections.query_stride == 127
    assert RunConfig(model=ModelConfig(block_size=1)).selections.query_stride == 1


def test_density_counts_visible_pairs() -> None:
    assert density(2048, 128, 16) == 1.0
    assert density(4096, 128, 16) == pytest.approx(0.734440, abs=1e-6)
    assert density(2048, 128, 4) == pytest.approx(0.390922, abs=1e-6)
    assert density(4096, 128, 16) * 4096 * 4097 / 2 == 6_162_432
    assert density(512, 128, 1) * 512 * 513 / 2 == 33_024
    assert density(300, 128, 16) == 1.0


def test_a_budget_that_covers_the_context_is_marked() -> None:
    model, data = ModelConfig(top_k_blocks=16), DataConfig(context_length=2048)
    assert RunConfig(model=model, data=data).hides_sparsity
    assert not RunConfig(model=replace(model, attention="dense"), data=data).hides_sparsity
    assert not RunConfig(model=replace(model, top_k_blocks=4), data=data).hides_sparsity


@pytest.mark.parametrize(("blocks", "dense"), [(16, False), (2048, True)])
def test_a_budget_given_in_tokens_in_place_of_blocks_is_marked(blocks: int, dense: bool) -> None:
    """16 blocks of 128 are 2,048 tokens: half of 4,096. 2,048 blocks are all of its 32."""
    run = RunConfig(model=ModelConfig(top_k_blocks=blocks), data=DataConfig(context_length=4096))
    assert run.hides_sparsity == dense
    assert (run.density == 1.0) == dense

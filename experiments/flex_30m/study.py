"""An MSA model of 30M parameters and its matched dense model at 4,096 tokens, from scratch, on the flex path."""

from dataclasses import replace
from pathlib import Path

from msa_lab.budget import match
from msa_lab.config import DataConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.config_model import ModelConfig


def runs(steps: int = 4000, cache: str = "data") -> list[RunConfig]:
    """Dense and MSA at equal parameters, the same tokens in the same order."""
    tokenizers = sorted(Path(cache, "tokenizers").glob("*-8192.json"))
    if len(tokenizers) != 1:
        raise ValueError(
            f"{cache}: holds {len(tokenizers)} tokenizers of 8192; make one with `msa-lab prepare --data.max_bytes "
            "200000000 --bpe 8192`"
        )
    msa = RunConfig(
        study="flex_30m",
        arm="msa",
        model=ModelConfig(
            vocab_size=8192,
            num_layers=8,
            d_model=512,
            num_query_heads=8,
            num_kv_heads=2,
            head_dim=64,
            mlp_width=1408,
            attention="msa",
            block_size=128,
            top_k_blocks=4,
            num_proxies=4,
            proxy_dim=64,
        ),
        data=DataConfig(max_bytes=200_000_000, tokenizer=str(tokenizers[0]), context_length=4096),
        train=TrainConfig(
            steps=steps,
            batch_size=8,
            lr=1.5e-3,
            proxy_lr=3e-3,
            warmup_steps=100,
            proxy_warmup_steps=steps // 10,
            precision="bf16",
            compile=True,
            log_every=20,
            validate_every=500,
            validation_batches=16,
            checkpoint_every=250,
        ),
        selections=SelectionConfig(records=40, documents=16, query_stride=4),
    )
    return match([msa, replace(msa, arm="dense", model=replace(msa.model, attention="dense"))])

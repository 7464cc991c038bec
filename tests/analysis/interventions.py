"""Models and run folders on which the cost of another selection is known beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import torch
from msa_analysis.replacement import replaced
from msa_analysis.rules import Rule
from msa_kernels import Selection, select_blocks, sparse_attention
from safetensors.torch import save_file
from tiny import MODEL, TRAIN
from torch import Tensor, nn
from torch.nn import functional as F

from msa_lab.batch import Batch
from msa_lab.config import DataConfig, RecallConfig, RunConfig
from msa_lab.data import open_data
from msa_lab.model import Transformer
from msa_lab.runs import Run
from msa_lab.selections import record

BLOCK, LENGTH, VOCAB = 8, 96, 20
NEAR, FAR = BLOCK, 4 * BLOCK
"""Tokens back to what even and odd positions must repeat: one block, and four."""
PATHS = ("layers.0.attention.select", "layers.1.attention.select")
TOKENS = torch.randint(257, (3, 100), generator=torch.Generator().manual_seed(0))
"""Three rows for `model_of`, whose selections are at PATHS."""


class Select(nn.Module):
    """Own block and the best other one."""

    def forward(self, q_proxy: Tensor, k_proxy: Tensor) -> Selection:
        return select_blocks(q_proxy, k_proxy, top_k_blocks=2, block_size=BLOCK)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> Tensor:
        return sparse_attention(q, k, v, selection)[0]


class NearAndFar(nn.Module):
    """Repeats at even positions the token one block back, read by head 0, and at odd ones that four back, by head 1.

    Each head's proxy wants the block that its head reads, so any other choice costs what it should.
    """

    def __init__(self) -> None:
        super().__init__()
        self.select, self.core = Select(), Core()
        self.sharpness = nn.Parameter(torch.tensor(400.0))

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        position = torch.arange(length)
        wanted = torch.stack([position - NEAR, position - FAR], 1)
        q = F.one_hot(wanted.clamp(min=0), length).float() * (wanted >= 0)[..., None] * self.sharpness
        k = F.one_hot(position, length).float()[:, None]
        q, k = q.expand(batch, *q.shape), k.expand(batch, *k.shape)
        v = F.one_hot(tokens, VOCAB).float()[:, :, None]
        read = self.core(q, k, v, self.select(q, k))
        return 10 * read[torch.arange(batch)[:, None], position, position % 2]


def repeating(documents: int, seed: int = 0) -> Batch:
    """Rows of random tokens for `NearAndFar`, scored where both heads have a source."""
    tokens = torch.randint(VOCAB, (documents, LENGTH), generator=torch.Generator().manual_seed(seed))
    position = torch.arange(LENGTH)
    back = torch.where(position % 2 == 0, NEAR, FAR)
    scored = position >= FAR
    targets = torch.where(scored, tokens[:, (position - back).clamp(min=0)], -100)
    return Batch(tokens, targets, None, torch.where(scored, back, -1).expand(documents, -1))


def recall_run(root: Path, *, model: dict[str, Any] | None = None, finish: bool = True) -> Run:
    """A folder with an untrained model of the recall task, finished or not."""
    recall = RecallConfig(block_size=8, num_keys=16, pairs=8)
    return folder(root, DataConfig(source="recall", context_length=128, recall=recall), model, root, finish=finish)


def text_run(root: Path, corpus: Path, *, model: dict[str, Any] | None = None, **data: Any) -> Run:
    """The same for text, whose tokens are kept in `root / "cache"`."""
    text = DataConfig(source="text", path=str(corpus), context_length=128, validation_fraction=0.3, **data)
    return folder(root, text, model, root / "cache")


def folder(
    root: Path, data: DataConfig, model: dict[str, Any] | None, cache: Path, *, finish: bool = True, **train: Any
) -> Run:
    """A folder with an untrained model of sharp weights, finished or not."""
    opened = open_data(data, cache)
    changed = replace(MODEL, vocab_size=opened.vocab_size, **(model or {}))
    config = RunConfig(study="tiny", model=changed, train=replace(TRAIN, **train), data=data)
    run = folders.finished(root, config, quality=2.0, corpus_hash=opened.hash)
    run.write_json("environment.json", {"corpus": {"hash": opened.hash}})
    save_file(sharp(Transformer(changed)).state_dict(), run.path / "model.safetensors")
    if not finish:
        (run.path / "result.json").unlink()
    return run


def sharp(model: Transformer) -> Transformer:
    """The model with weights so large that its queries and answers differ from one another."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def model_of(**changes: object) -> Transformer:
    """An untrained model of sharp weights with four proxies on two KV heads, four blocks of eight tokens a query."""
    plain = {"num_proxies": 4, "num_kv_heads": 2, "num_proxy_kv_heads": 2, "top_k_blocks": 4}
    return sharp(Transformer(replace(MODEL, **(plain | changes)))).eval()  # pyright: ignore[reportArgumentType]


def own_blocks(model: nn.Module, tokens: Tensor = TOKENS, *rest: Tensor) -> dict[str, Tensor]:
    """What the model itself selects, by path."""
    with torch.no_grad(), record(model) as seen:
        model(tokens, *rest)
    return {path: one.selection.blocks for path, one in seen.items()}


@torch.no_grad()
def under(model: Transformer, rule: Rule | str, *rest: Tensor, **where: object) -> tuple[Tensor, dict[str, Selection]]:
    """Logits for TOKENS with the rule's selections in place, and these selections by path."""
    with replaced(model, rule, **where) as put:  # pyright: ignore[reportArgumentType]
        logits = model(TOKENS, *rest).logits
    return logits, dict(put)

"""Recording while training: the callback that fills the selection log, and the one forward pass behind each record."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Float, Int64
from msa_kernels.reference import block_scores
from msa_kernels.selection import row_keys
from torch import Tensor, nn

from msa_lab.callbacks import stepped
from msa_lab.config import RunConfig
from msa_lab.evaluate import autocast
from msa_lab.learner import Learner
from msa_lab.model import Transformer
from msa_lab.runs import Run
from msa_lab.selection_layout import REGROUPINGS
from msa_lab.selection_store import FILE, SelectionStore
from msa_lab.selections import Enough, Seen, never_selected, record, record_steps, selection_rate
from msa_lab.teacher import at_blocks, block_mass, divergence, entropy, regrouped_divergence, top_blocks

if TYPE_CHECKING:
    from msa_lab.data import Data

QUERIES = 4096
"""Queries of a row whose scores and masses of all blocks are held at one time."""
PER_QUERY_BLOCK = ("newest_mass", "divergence", "entropy", "regrouped_divergence")
"""What is recorded as the mean over the recorded queries of a block."""
LAST = ("head_teacher", "head_teacher_mass", "regrouped_divergence")
"""What only the last record holds."""


@torch.no_grad()
def observe(
    model: Transformer,
    tokens: Int64[Tensor, "document sequence"],
    config: RunConfig,
    *,
    sparse: bool = True,
    draw: Int64[Tensor, " document"] | None = None,
    rows: int = 1,
    heads: bool = False,
) -> dict[str, np.ndarray]:
    """What `open_selections` describes, for the model as it is: name to (layer, document, proxy, query, slot), or
    (layer, document, proxy, query_block, ...) for `newest_mass`, `divergence` and `entropy`.

    Args:
        model: An uncompiled model in the mode and precision that it is to be seen in.
        tokens: One document a row.
        config: The model's run.
        sparse: False for would-be choices of the warm-up phase (in eval mode).
        draw: A number per document for random layers.
        rows: Documents per forward.
        heads: Also `head_teacher` and `head_teacher_mass`, (layer, document, head, query, slot), and
            `regrouped_divergence`, (layer, document, regrouping, query_block).

    Raises:
        ValueError: A layer's selection has a number of proxies that does not divide the config's.
    """
    device = next(model.parameters()).device
    layers = [i for i, kind in enumerate(config.model.attention_kinds) if kind != "dense"]
    draw = torch.arange(len(tokens)) if draw is None else draw
    documents: list[dict[str, np.ndarray]] = []
    # What the last layer that chooses makes of its choice, and all after it, is nowhere in a record.
    with record(model, until=f"layers.{layers[-1]}.attention.core" if layers else "") as seen:
        for start in range(0, len(tokens), rows):
            part = slice(start, start + rows)
            with suppress(Enough):
                model(tokens[part].to(device), sparse=sparse, draw=draw[part].to(device))
            found = [_describe(seen[f"layers.{i}.attention.select"], config, heads) for i in layers]
            # Only now is the device waited for.
            documents.append({name: torch.stack([layer[name] for layer in found]).cpu().numpy() for name in found[0]})
    return {name: np.concatenate([part[name] for part in documents], 1) for name in documents[0]}


def _describe(seen: Seen, config: RunConfig, heads: bool) -> dict[str, Tensor]:
    """One layer's part of a record, by query ranges so that memory stays linear in the sequence."""
    groups, sequence = config.model.num_proxies, seen.selection.blocks.shape[2]
    if groups % seen.selection.blocks.shape[1]:
        raise ValueError(
            f"a selection has {seen.selection.blocks.shape[1]} proxies: they must divide model.num_proxies={groups}"
        )
    stride, size = config.selections.query_stride, config.model.block_size
    span = max(QUERIES // stride, 1) * stride
    ranges = [(start, min(start + span, sequence)) for start in range(0, sequence, span)]
    parts = [_describe_queries(seen, config, heads, queries) for queries in ranges]
    own = torch.arange(0, sequence, stride, device=seen.selection.blocks.device) // size
    found = {}
    for name in parts[0]:
        values = torch.cat([part[name] for part in parts], 2)
        if name in PER_QUERY_BLOCK:
            values = _by_query_block(values, own, -(-sequence // size))
        found[name] = values
    return found


def _by_query_block(
    values: Float[Tensor, "batch group query *rest"], own: Int64[Tensor, " query"], count: int
) -> Float[Tensor, "batch group query_block *rest"]:
    """Mean over the queries of each block; NaN where there is none."""
    total = values.new_zeros(*values.shape[:2], count, *values.shape[3:]).index_add_(2, own, values)
    queries = torch.bincount(own, minlength=count).to(values.dtype)
    return total / queries.masked_fill(queries == 0, torch.nan).view(-1, *[1] * (values.ndim - 3))


def _describe_queries(seen: Seen, config: RunConfig, heads: bool, queries: tuple[int, int]) -> dict[str, Tensor]:
    """Of every `query_stride`-th query in a range."""
    model, groups, stride = config.model, config.model.num_proxies, config.selections.query_stride
    served = seen.selection.blocks[:, :, slice(*queries, stride)]
    # One choice that serves several groups is written once for each.
    selected = served.repeat_interleave(groups // served.shape[1], 1)
    found = {"selected": selected, "score": _scores(seen, model.block_size, queries, stride, selected)}
    if not config.selections.teacher:
        return found
    if seen.q is None or seen.k is None:
        raise ValueError(
            "selections.teacher=True: a layer shows no q and k of its `core`; try selections.teacher=False"
        )
    of_queries = {"block_size": model.block_size, "queries": queries, "stride": stride}
    rules = {
        "top_k_blocks": model.top_k_blocks,
        "num_local_blocks": model.num_local_blocks,
        "num_sink_blocks": model.num_sink_blocks,
        **of_queries,
    }
    by_head = block_mass(seen.q, seen.k, num_groups=model.num_query_heads, **of_queries)
    mass = by_head.unflatten(1, (groups, -1)).mean(2)
    teacher = top_blocks(mass, **rules).blocks
    found |= {"mass": at_blocks(mass, selected), "teacher": teacher, "teacher_mass": at_blocks(mass, teacher)}
    newest = torch.arange(*queries, stride, device=mass.device)[:, None] // model.block_size
    newest = (newest - torch.arange(model.top_k_blocks, device=mass.device)).expand(*mass.shape[:2], -1, -1)
    found |= {"newest_mass": at_blocks(mass, newest).nan_to_num()}
    spread = entropy(mass)
    found |= {"divergence": divergence(spread, entropy(by_head)), "entropy": spread}
    if heads:
        own = top_blocks(by_head, **rules).blocks
        found |= {"head_teacher": own, "head_teacher_mass": at_blocks(by_head, own)}
        found |= {"regrouped_divergence": regrouped_divergence(by_head, groups, REGROUPINGS)}
    return found


def _scores(seen: Seen, block_size: int, queries: tuple[int, int], stride: int, selected: Tensor) -> Tensor:
    """The proxies' scores of what was selected; NaN for a rule without proxies."""
    if seen.q_proxy is None or seen.k_proxy is None:
        return torch.full(selected.shape, torch.nan, device=selected.device)
    scores = block_scores(seen.q_proxy, seen.k_proxy, block_size=block_size, queries=queries, stride=stride)
    return at_blocks(scores.repeat_interleave(selected.shape[1] // scores.shape[1], 1), selected)


class SelectionRecorder(L.Callback):
    """Fills `selections.zarr` on the probe documents at the start, the end and evenly between.

    Training is the same with and without it, bit for bit: the forward is the plain model's, in eval mode, without
    gradients, and leaves random states and modes as they were. Only the first process computes and writes; nothing here
    waits for the others. A record is written while training goes on. The next record and the next checkpoint, which is
    also made at the end, wait for it and raise what went wrong: a checkpoint's own record exists, if this comes before
    the callback that writes it.

    Args:
        run: The run's folder.
        config: What and how often to record.
        data: Has the probe documents.
    """

    def __init__(self, run: Run, config: RunConfig, data: Data) -> None:
        self.run, self.config, self.data = run, config, data
        self.first = config.train.fork_step
        self.steps = record_steps(self.first, config.train.last_step, config.selections.records)
        self.store: SelectionStore | None = None
        self._writer = ThreadPoolExecutor(1, "selections")
        self._writing: Future[None] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Make the log, or reopen it where training goes on; record the untrained model."""
        if not trainer.is_global_zero:
            return
        path, step = self.run.path / FILE, trainer.global_step
        self.probe = self.data.probe(self.config.selections.documents)
        tokens = self.probe.tokens.numpy()
        if step > self.first and path.exists():
            self.store = SelectionStore.resume(path, self.config, tokens, step)
        else:
            if step > self.first:
                warnings.warn(f"{path}: is gone; the log starts again at step {step}", stacklevel=2)
            self.store = SelectionStore.create(path, self.config, self.probe.ids, tokens)
        if self.store.attrs["tokenizer"] == "tokenizer.json":
            shutil.copyfile(self.config.data.tokenizer, self.run.path / "tokenizer.json")
        self._record_if_due(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record when the optimizer has made the step that is due."""
        if self._writing is not None and self._writing.done():
            self._settle()
        if self.store is not None and stepped(pl_module, batch_idx):
            self._record_if_due(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Have the records of all steps before it on disk."""
        self._settle()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Leave nothing that still writes; that it failed, too, is not what ended training."""
        wait([self._writing] if self._writing else [])

    def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _record_if_due(self, trainer: L.Trainer, learner: Learner) -> None:
        step, store = trainer.global_step, self.store
        if store is None or step not in self.steps or step in store.steps:
            return
        with learner.clock.paused():
            self._record(trainer, learner, store, step)

    def _record(self, trainer: L.Trainer, learner: Learner, store: SelectionStore, step: int) -> None:
        # A log that older code began has no room for what is recorded since.
        values = {name: value for name, value in self._observe(learner, step).items() if name in store.arrays}
        phase = "sparse" if self._sparse(learner) else "warmup"
        self._settle()
        self._writing = self._writer.submit(_write, store, step, phase, values)
        self._log(trainer, values["selected"], step)

    def _observe(self, learner: Learner, step: int) -> dict[str, np.ndarray]:
        config, train, documents = self.config, self.config.train, len(self.probe.ids)
        # A training step keeps what all layers made of its rows, a forward without gradients what one did.
        rows = train.batch_size // train.accumulate // learner.trainer.world_size
        rows = 1 if train.activation_checkpointing else rows * max(config.model.num_layers // 2, 1)
        draw = row_keys(config.seed, step, 0, torch.arange(documents))
        with _undisturbed(learner.model, learner.device), autocast(learner.device, train.precision):
            return observe(
                learner.model,
                self.probe.tokens,
                config,
                sparse=self._sparse(learner),
                draw=draw,
                rows=rows,
                heads=config.selections.teacher and step == self.steps[-1],
            )

    def _sparse(self, learner: Learner) -> bool:
        """Rules without proxies choose from the first step on."""
        return learner.sparse or not self.config.model.proxy_layers

    def _log(self, trainer: L.Trainer, selected: np.ndarray, step: int) -> None:
        """The collapse alarm at every record; the selection maps at the last one, where the logger shows images."""
        model, data = self.config.model, self.config.data
        layers = [i for i, kind in enumerate(model.attention_kinds) if kind != "dense"]
        query = np.arange(0, data.context_length, self.config.selections.query_stride)
        forced = {"num_local_blocks": model.num_local_blocks, "num_sink_blocks": model.num_sink_blocks}
        never = never_selected(selected, query, block_size=model.block_size, **forced).sum((1, 2))
        show = getattr(trainer.logger, "log_image", None)
        if trainer.logger is not None:
            numbers = {f"selections/never_selected/layer{i}": float(n) for i, n in zip(layers, never, strict=True)}
            trainer.logger.log_metrics(numbers, step)
        if show is None or step != self.steps[-1]:
            return
        blocks = -(-data.context_length // model.block_size)
        rate = selection_rate(selected, query, block_size=model.block_size, num_blocks=blocks).mean(1)
        for layer, maps in zip(layers, np.nan_to_num(rate), strict=True):
            for proxy, image in enumerate(maps):
                show(f"selections/rate/layer{layer}/proxy{proxy}", image, step)


def _write(store: SelectionStore, step: int, phase: str, values: Mapping[str, np.ndarray]) -> None:
    store.append(step, phase, {name: value for name, value in values.items() if name not in LAST})
    if heads := {name: value for name, value in values.items() if name in LAST}:
        store.write_heads(step, heads)


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode inside; every module's own mode and all random states are put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode

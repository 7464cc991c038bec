"""What a run is: frozen dataclasses, checked when they are made, written to `config.yaml`, read back from it.

A study is a Python function that returns a list of `RunConfig`; YAML is only how one is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msa_lab.config_model import ModelConfig, at_least, divisors, finite, require, share


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """The synthetic task: key-value pairs whose distance from their question is controlled in blocks."""

    num_keys: int = 64
    """Distinct keys; as many distinct values."""
    pairs: int = 48
    """Key-value pairs shown in one context."""
    near_fraction: float = 0.5
    """Share of questions whose answer lies within near_blocks; the others are farther away."""
    near_blocks: int = 2
    """Distance in blocks up to which an answer counts as near (never the question's own block)."""
    two_hop_fraction: float = 0.0
    """Share of questions whose answer is the value of the key that the first value names."""
    overwrite_fraction: float = 0.0
    """Share of keys shown twice with different values; the later one is the answer."""
    distances: tuple[int, ...] = ()
    """Distances in blocks that answers lie at, each as likely, in rows whose blocks all show equally many pairs at the
    same places: where an answer lies can then be told by distance and by key alone. Empty: near_fraction decides."""
    coded_from: int = 0
    """With distances: an answer at this distance or beyond is given in code, value i as value i + num_keys / 2 (modulo
    num_keys), so that a head cannot read near and far answers alike; 0 gives every answer plainly."""
    block_size: int = 16
    """Tokens per block; must equal the model's, so that distances mean the same."""

    def __post_init__(self) -> None:
        share(self, "data.recall", "near_fraction", "two_hop_fraction", "overwrite_fraction")
        at_least(1, self, "data.recall", "num_keys", "pairs", "near_blocks", "block_size")
        rule = f"a key is shown once per context, so pairs cannot exceed num_keys={self.num_keys}"
        require(self.pairs <= self.num_keys, "data.recall.pairs", self.pairs, rule, str(self.num_keys))
        self._check_distances()

    def _check_distances(self) -> None:
        distinct = tuple(sorted({distance for distance in self.distances if distance >= 1}))
        rule = "must be 1 or more blocks each, ascending, none twice"
        require(self.distances == distinct, "data.recall.distances", self.distances, rule, str(distinct or (1, 2, 3)))
        at_least(0, self, "data.recall", "coded_from")
        for name in ("near_fraction", "near_blocks", "two_hop_fraction", "overwrite_fraction"):
            value, default = getattr(self, name), getattr(RecallConfig, name)
            rule = f"is not read with distances={self.distances}"
            require(not self.distances or value == default, f"data.recall.{name}", value, rule, repr(default))
        rule = "is read with distances only"
        require(bool(self.distances) or not self.coded_from, "data.recall.coded_from", self.coded_from, rule, "0")
        ok = self.num_keys > 1 or not self.coded_from
        require(ok, "data.recall.num_keys", self.num_keys, f"coded_from={self.coded_from} needs a second value", "2")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens a run sees. Batch i is a pure function of (seed, i), so arms of a study see the same tokens."""

    source: Literal["python", "text", "recall", "hf"] = "python"
    """python: the source of every module importable here. text: files under `path`. recall: the synthetic task.
    hf: a Hugging Face dataset named by `path`."""
    path: str = ""
    """text: a folder, file or glob (.txt .md .jsonl[.gz|.zst] .parquet). hf: `name` or `name:config`."""
    text_field: str = "text"
    """The column that holds the text, for jsonl, parquet and hf."""
    max_bytes: int = 0
    """Stop reading the corpus after this many bytes of text; 0 reads all of it."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json that `msa-lab prepare --bpe SIZE` trained."""
    context_length: int = 1024
    """Tokens per row."""
    document_mask: bool = False
    """Confine attention to a row's own documents (block grid and RoPE restart at each); otherwise a row is one
    document made of whatever lies next to each other in the corpus."""
    validation_fraction: float = 0.1
    """Share of the corpus' packages (python), files or documents kept for validation."""
    expected_hash: str = ""
    """Refuse a corpus whose hash differs from this one; empty accepts any."""
    recall: RecallConfig = field(default_factory=RecallConfig)
    """The recall task's shape; used by source=recall only."""

    def __post_init__(self) -> None:
        sources = ("python", "text", "recall", "hf")
        require(self.source in sources, "data.source", self.source, f"must be one of {', '.join(sources)}", "python")
        at_least(2, self, "data", "context_length")
        at_least(0, self, "data", "max_bytes")
        rule = f"source={self.source} reads from a path"
        require(self.source not in ("text", "hf") or bool(self.path), "data.path", self.path, rule, "--data.path DIR")
        value = self.validation_fraction
        require(0.0 < value < 1.0, "data.validation_fraction", value, "must lie between 0 and 1", "0.1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how to train. All step numbers are optimizer steps counted from the stem's first one."""

    steps: int = 1000
    """Length of the learning-rate schedule; a run ends here unless stop_at is earlier."""
    stop_at: int = 0
    """End before the schedule does, as a stem does whose forks go on; 0 means `steps`."""
    batch_size: int = 8
    """Rows per optimizer step over all devices and accumulated parts."""
    accumulate: int = 1
    """Parts that a batch is split into to save memory; the gradient is the same."""
    lr: float = 3e-3
    """Peak learning rate of the base parameters."""
    schedule: Literal["cosine", "wsd"] = "wsd"
    """cosine to min_lr_ratio, or warm-up, stable, decay (linear over the last decay_fraction of steps)."""
    warmup_steps: int = 40
    """Steps of linear learning-rate warm-up."""
    decay_fraction: float = 0.3
    """wsd: share of `steps` in which the rate falls."""
    min_lr_ratio: float = 0.1
    """The rate at the end, as a share of the peak."""
    beta2: float = 0.95
    """AdamW's second moment decay (the first is 0.9)."""
    weight_decay: float = 0.1
    """On matrices of the base parameters; gains, embeddings and proxies have none."""
    clip: float = 1.0
    """Gradient-norm limit of the base parameters; 0 turns clipping off."""
    proxy_lr: float = 3e-3
    """Peak learning rate of the proxies, whose schedule starts at the fork."""
    proxy_clip: float = 1.0
    """Gradient-norm limit of the proxies, apart from the base; 0 turns clipping off."""
    kl_weight: float = 1.0
    """Weight of the KL in the loss: cross-entropy + kl_weight x sum over layers of the proxies' mean KL."""
    proxy_warmup_steps: int = 40
    """Steps after the start (or the fork) with dense main attention and the KL over the full support."""
    fork_from: str = ""
    """Start from another run's end: `study/arm-hash` (the run of the same seed), or a run folder."""
    fork_step: int = 0
    """The stem's last step; needed with fork_from and checked against the stem."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32, or bf16 autocast over fp32 weights."""
    compile: bool = False
    """torch.compile the model (GPU)."""
    cuda_graphs: bool = True
    """Replay compiled steps as CUDA graphs, so that a small model does not wait for the host that launches it: on path
    cute and one device, without `accumulate` and `document_mask`, with blocks of 128. Their memory is theirs alone:
    validation and recording need some beside it."""
    deterministic: bool = True
    """Give bit-identical losses for the same run on the same kind of machine; costs some speed on a GPU."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward to save memory."""
    log_every: int = 10
    """Steps between rows of metrics.csv."""
    validate_every: int = 100
    """Steps between validations; the end is always validated."""
    validation_batches: int = 8
    """Batches per validation (always the same ones)."""
    checkpoint_every: int = 100
    """Steps between checkpoints from which a killed run resumes."""

    def __post_init__(self) -> None:
        at_least(1, self, "train", "steps", "batch_size", "accumulate", "log_every", "validate_every")
        at_least(1, self, "train", "validation_batches", "checkpoint_every")
        at_least(0, self, "train", "lr", "proxy_lr", "clip", "proxy_clip", "kl_weight", "weight_decay")
        at_least(0, self, "train", "proxy_warmup_steps", "fork_step", "stop_at", "warmup_steps")
        share(self, "train", "decay_fraction", "min_lr_ratio")
        read = self.schedule == "wsd" or self.decay_fraction == TrainConfig.decay_fraction
        rule = f"is not read with schedule={self.schedule}"
        require(read, "train.decay_fraction", self.decay_fraction, rule, str(TrainConfig.decay_fraction))
        rule = f"must divide batch_size={self.batch_size}"
        fix = divisors(self.batch_size)
        require(self.batch_size % self.accumulate == 0, "train.accumulate", self.accumulate, rule, fix)
        rule = f"must lie within steps={self.steps}"
        require(self.stop_at <= self.steps, "train.stop_at", self.stop_at, rule, str(self.steps))
        require(self.warmup_steps <= self.steps, "train.warmup_steps", self.warmup_steps, rule, "0")
        require(0.0 < self.beta2 < 1.0, "train.beta2", self.beta2, "must lie between 0 and 1", "0.95")
        paired = bool(self.fork_from) == (self.fork_step > 0)
        require(paired, "train.fork_step", self.fork_step, "goes together with fork_from", "the stem's last step")
        rule = f"the fork must come before the end, step {self.last_step}"
        require(self.fork_step < self.last_step, "train.fork_step", self.fork_step, rule, str(self.last_step - 1))

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.stop_at or self.steps

    @property
    def sparse_step(self) -> int:
        """First step of the sparse phase; before it the main attention is dense and the KL has full support."""
        return self.fork_step + self.proxy_warmup_steps


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """What is recorded of the proxies' choices while training, on fixed validation documents."""

    records: int = 40
    """Records a run, spread evenly; the start and the end are always among them. 0 records nothing, whatever the other
    fields of the log say."""
    documents: int = 8
    """Probe documents, one row each."""
    query_stride: int = 1
    """Record every n-th query position; 1 records all. Below model.block_size: blocks are seen at several places."""
    teacher: bool = True
    """Also record the groups' own top blocks from dense attention on the same weights, and what they would see."""

    def __post_init__(self) -> None:
        rule = "must be 0, or at least 2: the start and the end"
        require(self.records == 0 or self.records >= 2, "selections.records", self.records, rule, "40")
        at_least(1, self, "selections", "documents", "query_stride")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run: everything that decides its numbers."""

    study: str = "scratch"
    """Folder that collects the runs of one question."""
    arm: str = "msa"
    """Name of this variant in tables and figures; runs of an arm differ only in seed."""
    seed: int = 0
    """Decides initial weights, data order and random blocks; below 2**32."""
    backend: Literal["auto", "reference", "flex", "cute"] = "auto"
    """Kernel path; auto takes the best that works here, and the run's environment.json says which and why."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = field(default_factory=DataConfig)
    """The tokens."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The optimisation."""
    selections: SelectionConfig = field(default_factory=SelectionConfig)
    """The selection log."""

    def __post_init__(self) -> None:
        for name in ("study", "arm"):
            value = getattr(self, name)
            ok = bool(value) and all(c.isalnum() or c in "._-" for c in value) and value[0] not in ".-"
            require(ok, name, value, "names a folder: letters, digits, '.', '_' and '-'", "msa_p4")
        require(self.seed >= 0, "seed", self.seed, "must be at least 0", "0")
        require(self.seed < 2**32, "seed", self.seed, "must lie below 2**32", str(self.seed % 2**32))
        finite(self)
        self._check_stride()
        if self.data.source == "recall":
            rule = f"must equal model.block_size={self.model.block_size}, so that distances mean the same"
            value = self.data.recall.block_size
            require(value == self.model.block_size, "data.recall.block_size", value, rule, str(self.model.block_size))

    def _check_stride(self) -> None:
        stride, size = self.selections.query_stride, min(self.model.block_size, self.data.context_length)
        rule = f"must lie below a block's tokens in a row ({size}), or one query of a block is recorded at most"
        require(stride == 1 or stride < size, "selections.query_stride", stride, rule, str(max(size // 2, 1)))

    @property
    def density(self) -> float:
        """Share of causal (query, key) pairs that the block budget covers in a full row; 1.0 is dense."""
        return density(self.data.context_length, self.model.block_size, self.model.top_k_blocks)

    @property
    def hides_sparsity(self) -> bool:
        """True when a sparse run would be dense in all but name (over 95 % of causal pairs are read)."""
        return self.density > 0.95 and any(kind != "dense" for kind in self.model.attention_kinds)


def density(sequence: int, block_size: int, top_k_blocks: int) -> float:
    """Visible (query, key) pairs of a selection that includes the own block, over all causal pairs."""
    visible = 0
    for own in range((sequence + block_size - 1) // block_size):
        queries = min(block_size, sequence - own * block_size)
        earlier = min(top_k_blocks - 1, own) * block_size
        visible += queries * earlier + queries * (queries + 1) // 2
    return visible / (sequence * (sequence + 1) // 2)

"""What a Slurm job asks for. Apart from `msa_lab.slurm` because the command line's help is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from msa_lab.config_model import require


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Passed to sbatch as they are, for each run's job."""

    partition: str = ""
    """Partition; the cluster's default if empty."""
    account: str = ""
    """Account that pays; the user's default if empty."""
    time: int = 240
    """Minutes after which a job is saved and put back into the queue."""
    gpus: int = 1
    """GPUs of a job, which share each batch; 0 asks for none."""
    cpus: int = 0
    """CPU cores of a job; 0 leaves it to the cluster."""
    more: dict[str, str | int | bool] = field(default_factory=dict)
    """Any other option of sbatch, such as {qos: high, mem: 32G, no-requeue: true}."""

    def __post_init__(self) -> None:
        require(self.time >= 1, "slurm.time", self.time, "counts minutes and must be at least 1", "240")
        for name in ("gpus", "cpus"):
            require(getattr(self, name) >= 0, f"slurm.{name}", getattr(self, name), "must be at least 0", "1")

    def parameters(self) -> dict[str, object]:
        """As submitit's executor takes them."""
        asked: dict[str, object] = {
            "partition": self.partition or None,
            "account": self.account or None,
            "time": self.time,
            "gpus_per_node": self.gpus or None,
            "cpus_per_task": self.cpus or None,
        }
        # A fork whose stem failed must not wait for ever; a lost node or a preemption puts the job back in the queue.
        more = {"kill-on-invalid-dep": "yes"} | ({} if "no-requeue" in self.more else {"requeue": True}) | self.more
        return {name: value for name, value in asked.items() if value is not None} | {"additional_parameters": more}

"""Where numbers go: `metrics.csv` is the record, wandb a mirror that nothing reads back."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from msa_lab.runs import Run, complete_lines, naming, write_atomically


class MetricsLog(Logger):
    """Appends `step,name,value` rows to the run's metrics.csv and passes them on to wandb when there is one.

    Args:
        run: The folder.
        mirror: A wandb run or None.
    """

    def __init__(self, run: Run, mirror: Any | None = None) -> None:
        super().__init__()
        self.path, self.mirror = run.path / "metrics.csv", mirror
        self.latest: dict[str, float] = {}

    @property
    def name(self) -> str:
        """The folder of the arm."""
        return self.path.parent.parent.name

    @property
    def version(self) -> str:
        """The folder of the seed."""
        return self.path.parent.name

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Drop what was logged after `step`, which a resumed run is about to do again, and any torn last line."""
        header, *lines = complete_lines(self.path).splitlines(keepends=True) or ["step,name,value\n"]
        kept = [line for line in lines if int(line.split(",", 1)[0]) <= step]
        write_atomically(self.path, header + "".join(kept))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one row per number, in one write."""
        self.latest |= metrics
        text = "".join(f"{step},{name},{float(value)!r}\n" for name, value in metrics.items())
        with naming(self.path), self.path.open("a") as file:
            file.write(text)
        if self.mirror is not None:
            self.mirror.log({**metrics, "step": step})

    @rank_zero_only
    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Show an array of shares from 0 to 1 in wandb; its numbers are in the selection log."""
        if self.mirror is not None:
            import wandb

            self.mirror.log({name: wandb.Image((255 * np.clip(image, 0, 1)).astype(np.uint8)), "step": step})

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Nothing: config.yaml holds them."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close wandb."""
        if self.mirror is not None:
            self.mirror.finish(exit_code=0 if status == "success" else 1)
            self.mirror = None


def wandb_mirror(run: Run, plain_config: dict[str, Any], mode: str, identity: str) -> Any | None:
    """A wandb run that mirrors this one; None when `mode` is `disabled`.

    Every row carries its own `step`, which is the x axis: wandb's internal counter may then only increase, as it
    insists, also when a resumed run does some steps again.
    """
    if mode == "disabled":
        return None
    import wandb

    mirror = wandb.init(
        project="msa-lab",
        group=plain_config["study"],
        name=f"{run.path.parent.name}-{run.path.name}",
        id=identity,
        resume="allow",
        mode="online" if mode == "online" else "offline",
        dir=str(run.path),
        config=plain_config,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    mirror.define_metric("step")
    mirror.define_metric("*", step_metric="step")
    return mirror

"""The command `sweep`: trains a study here or on a cluster, or says what that would cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from msa_lab.config import RunConfig

if TYPE_CHECKING:
    from msa_lab.sweep_jobs import Failure


def run_study(runs: list[RunConfig], args: Namespace, complain: Callable[[str], None]) -> list[Failure]:
    """Train the study as the arguments of `sweep` (or of `demo`) say; returns what failed."""
    from msa_lab.dry_run import unmatched

    for line in unmatched(runs):
        complain(f"not matched: {line}")
    if args.get("executor", "local") == "local":
        from msa_lab.sweep import sweep

        return sweep(runs, root=args.root, cache=args.cache, slots=args.slots)
    from msa_lab.slurm import sweep_on_slurm
    from msa_lab.slurm_options import SlurmOptions

    if args.slots is not None:
        raise ValueError(f"slots={args.slots}: is for this machine; Slurm decides how many runs go at a time")
    return sweep_on_slurm(runs, SlurmOptions(**args.slurm.as_dict()), root=args.root, cache=args.cache)


def dry_run(runs: list[RunConfig], args: Namespace, complain: Callable[[str], None]) -> int:
    """Print the plan and its cost; exit code 1 where something stands in its way."""
    from msa_lab.cost import Assumed
    from msa_lab.dry_run import format_plan
    from msa_lab.sweep import places, visible_gpus

    here = args.executor == "local"
    gpus = visible_gpus() if here else []
    slots = places(args.slots, gpus, len(runs)) if here else len(runs)
    unit = "GPU" if gpus or (not here and args.slurm.gpus) else "slot"
    assumed = Assumed(args.tokens_per_second, args.mfu, args.gpu or (_gpu_here() if args.mfu is not None else ""))
    text, problems = format_plan(runs, root=args.root, slots=slots, unit=unit, assumed=assumed)
    print(text)
    sys.stdout.flush()
    for problem in problems:
        complain(problem)
    return 1 if problems else 0


def _gpu_here() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

"""Makes the tests' own helpers importable and keeps every test off the network and off a display."""

import os
import sys
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
for folder in ("lab", "kernels", "analysis"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
for study in ("", "planted", "recall_division"):
    sys.path.append(str(Path(__file__).parents[1] / "experiments" / study))

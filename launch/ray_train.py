"""Ray Train: a recipe on each worker of a Ray cluster.

    pip install "ray[train]"
    python launch/ray_train.py --config recipes/configs/gb1.yaml

What follows the file are flags of the recipe; run it from the root of the repository. A worker that dies is started
again, up to MAX_FAILURES times, and goes on from OUTPUT_DIR, which every node must see. Ray trains in a thread, where
Python handles no signals: nothing is saved on SIGTERM, so the last checkpoint counts (--save_minutes), and
`--max_hours` stops in time. Each checkpoint is also copied to STORAGE, as Ray's callback does it.
"""

import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.huggingface.transformers import RayTrainReportCallback
from ray.train.torch import TorchTrainer
from transformers.trainer import DEFAULT_CALLBACKS

# ---- edit ----
NUM_WORKERS, USE_GPU = 4, True
OUTPUT_DIR = str(Path("outputs/affinity").resolve())
STORAGE = str(Path("outputs/ray").resolve())
MAX_FAILURES = 3
# ---- end of what to edit ----


def train(config: dict[str, Any]) -> None:
    """Trains in each worker; Ray has connected them before."""
    sys.path.insert(0, config["root"])
    from recipes.max_speed import main

    DEFAULT_CALLBACKS.append(RayTrainReportCallback)  # tells Ray of metrics and checkpoints
    main(config["flags"])


def make_trainer(flags: list[str]) -> TorchTrainer:
    """The Ray trainer of a run with these flags of the recipe."""
    config = {"root": str(Path(__file__).resolve().parent.parent), "flags": ["--output_dir", OUTPUT_DIR, *flags]}
    return TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS, use_gpu=USE_GPU),
        run_config=RunConfig(storage_path=STORAGE, failure_config=FailureConfig(max_failures=MAX_FAILURES)),
    )


if __name__ == "__main__":
    make_trainer(sys.argv[1:]).fit()

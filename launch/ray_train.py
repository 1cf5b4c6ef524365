"""Ray Train: a recipe on each worker of a Ray cluster.

    pip install "ray[train]"
    python launch/ray_train.py --config recipes/configs/gb1.yaml

What follows the file are flags of the recipe; run it from the root of the repository. When a worker dies, all are
started again, up to MAX_FAILURES times, and go on from OUTPUT_DIR, which every node must see. Ray trains in a thread,
where Python handles no signals: nothing is saved on SIGTERM, so the last checkpoint counts (--save_minutes), and
`--max_hours` stops in time. Run with two workers on one machine's CPU (ray 2.60), a killed worker included; not on
several machines.
"""

import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig, report
from ray.train.torch import TorchTrainer
from transformers import TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS

# ---- edit ----
NUM_WORKERS, USE_GPU = 4, True
OUTPUT_DIR = str(Path("outputs/affinity").resolve())
STORAGE = str(Path("outputs/ray").resolve())  # what Ray itself keeps
MAX_FAILURES = 3
# ---- end of what to edit ----


class ReportToRay(TrainerCallback):
    """Tells Ray of the newest metrics at each save.

    Ray's own RayTrainReportCallback also has every worker copy the newest checkpoint to STORAGE. Here that is of no
    use, since the run goes on from OUTPUT_DIR, and no checkpoint is sure to stay while it is copied: they are written,
    and old ones removed, beside training.
    """

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        report({name: value for entry in state.log_history for name, value in entry.items()})


def train(config: dict[str, Any]) -> None:
    """Trains in each worker; Ray has connected them before."""
    from hf_ext.affinity.task import main

    DEFAULT_CALLBACKS.append(ReportToRay)
    main(config["flags"])


def make_trainer(flags: list[str]) -> TorchTrainer:
    """The Ray trainer of a run with these flags of the recipe."""
    device = [] if USE_GPU else ["--use_cpu", "true"]  # Ray names the device, so hf_ext does not look for one
    flags = ["--output_dir", OUTPUT_DIR, *device, *flags]
    return TorchTrainer(
        train,
        train_loop_config={"flags": flags},
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS, use_gpu=USE_GPU),
        run_config=RunConfig(storage_path=STORAGE, failure_config=FailureConfig(max_failures=MAX_FAILURES)),
    )


if __name__ == "__main__":
    make_trainer(sys.argv[1:]).fit()

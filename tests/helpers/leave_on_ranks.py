"""What each process of `test_two_processes_train.py` runs: `python leave_on_ranks.py FOLDER` under torchrun.

Writes to FOLDER what `train_on_ranks.py` says, and `leave-RANK.json`: what the launch became without `use_cpu`, and
what is left of it after `end`.
"""

import json
import os
import sys
import weakref
from pathlib import Path

import pytest
from token_rows import RecordingCollator
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from train_on_ranks import make_model, make_rows, settings, write_report
from transformers import TrainerCallback, TrainingArguments

from hf_ext.errors import PlanRefused
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))


def make_trainer(folder: Path) -> FastTrainer:
    given = {**settings(folder, max_steps=2), "use_cpu": False, "per_device_train_batch_size": 2}
    return FastTrainer(make_model(), FastTrainingArguments(**given), RecordingCollator(), make_rows(8))


class Saves(TrainerCallback):
    """Notes what is in place when a save is over."""

    def __init__(self):
        self.found = []

    def on_save(self, args, state, control, **kwargs):
        self.found.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "manifest.json").is_file())


def train_with_callback_of_one_rank(folder: Path) -> list[bool] | None:
    """A run in which the second process alone has a callback that reads checkpoints."""
    saves = Saves() if RANK == 1 else None
    given = settings(folder, max_steps=3, save_strategy="steps", save_steps=1, per_device_train_batch_size=2)
    callbacks = [saves] if saves else []
    FastTrainer(
        make_model(), FastTrainingArguments(**given), RecordingCollator(), make_rows(12), callbacks=callbacks
    ).train()
    return saves and saves.found


def count_gloo_threads() -> int:
    """Threads of this process that work for gloo, by the name that torch gives them."""
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def main(folder: Path) -> None:
    alone = TrainingArguments(str(folder / "stock"), report_to="none").world_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        patch.setenv("FSDP_VERSION", "2")
        with pytest.raises(PlanRefused) as refused:
            make_trainer(folder / "fsdp")
    seen = train_with_callback_of_one_rank(folder / "seen")
    first, trainer = make_trainer(folder / "first"), make_trainer(folder / "run")
    first.train()  # stays alive, and so would its DDP model
    trainer.train()
    write_report(folder)
    wrapped = [weakref.ref(one.model_wrapped) for one in (first, trainer)]
    before = [isinstance(one(), DistributedDataParallel) for one in wrapped], count_gloo_threads()
    trainer.end()
    report = {
        "seen": seen,
        "stock": alone,
        "refused": str(refused.value),
        "world": trainer.args.world_size,
        "use_cpu": trainer.args.use_cpu,
        "explicit": sorted(trainer.args.explicit_fields & {"use_cpu"}),
        "wrapped": before[0],
        "threads": [before[1], count_gloo_threads()],
        "left": [one() is not None for one in wrapped] + [distributed.is_initialized()],
    }
    (folder / f"leave-{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

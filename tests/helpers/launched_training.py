"""A training that launchers start: `launched_training.py --output_dir DIR --step_s 0.2` is one of its processes.

Ten steps of eight rows on any number of processes. What process R of start N (SLURM_RESTART_COUNT) collated, and the
losses so far, are in DIR/seen-N-R.json when it ends, also by a stop. DIR/step-K is there once step K is done.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

from run_outcomes import losses
from safetensors.torch import save_file
from token_rows import RecordingCollator
from train_on_ranks import make_model, make_rows, settings
from transformers import TrainerCallback

from hf_ext.errors import NotFiniteError, exit_on_errors
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK, START = int(os.environ.get("RANK", "0")), os.environ.get("SLURM_RESTART_COUNT", "0")
STEPS, ROWS_PER_STEP, ROWS_PER_BATCH, NUM_ROWS = 10, 8, 2, 40  # five steps a pass


class Slow(TrainerCallback):
    """Takes its time for each step, and says which is done; ends as `fails` says."""

    def __init__(self, folder: Path, step_s: float, fails: str | None):
        self.folder, self.step_s, self.fails = folder, step_s, fails

    def on_step_end(self, args, state, control, **kwargs):
        (self.folder / f"step-{state.global_step}").touch()
        time.sleep(self.step_s)
        if self.fails == "nan" and state.global_step == 3:
            raise NotFiniteError("on purpose")
        if self.fails == "killed" and state.global_step == 3 and RANK == 1:
            os.kill(os.getpid(), 9)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path)
    parser.add_argument("--step_s", type=float, default=0.0)
    parser.add_argument("--fails")
    given = parser.parse_args(argv)
    given.output_dir.mkdir(parents=True, exist_ok=True)
    gc.freeze()
    fixed = {"per_device_train_batch_size": ROWS_PER_BATCH, "effective_batch_size": ROWS_PER_STEP, "max_steps": STEPS}
    saving = {"save_strategy": "steps", "save_steps": 100, "logging_steps": 1, "learning_rate": 1e-2}
    args = FastTrainingArguments(**settings(given.output_dir / "run", **fixed, **saving, resume="auto"))
    slow = Slow(given.output_dir, given.step_s, given.fails)
    trainer = FastTrainer(make_model(), args, RecordingCollator(), make_rows(NUM_ROWS), callbacks=[slow])
    try:
        trainer.train()
        if RANK == 0:
            save_file(dict(trainer.model.named_parameters()), given.output_dir / "weights.safetensors")
    finally:
        seen = {
            "batches": trainer.data_collator.batches,
            "losses": losses(trainer),
            "step": trainer.state.global_step,
        }
        (given.output_dir / f"seen-{START}-{RANK}.json").write_text(json.dumps(seen))
    trainer.end()


if __name__ == "__main__":
    with exit_on_errors():
        main(sys.argv[1:])

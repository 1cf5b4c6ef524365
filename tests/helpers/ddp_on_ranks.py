"""What each process of a nightly test runs: `python ddp_on_ranks.py FOLDER TASK`, under torchrun.

Rows that do not divide, so that the last step of each of the three epochs is short, in steps of
`--effective_batch_size`. TASK `train`: every case and the broken twins, whole. `kill:CASE`: a run that saves and is
killed later. `resume`: those go on, and so do the runs of one process in FOLDER/alone. `three`: masked language
modelling on three processes.
"""

import gc
import os
import signal
import sys
from pathlib import Path

from equal_cases import CASES, NUM_STEPS, make_trainer, save_numbers
from ranks import leave
from transformers import TrainerCallback

from hf_ext.trainer import FastTrainer

PACKED = {"speedups": ["attention", "packing"], "max_tokens_per_batch": 64}
DATA = {  # of masked language modelling: what else than rows in random order
    "packed": {**PACKED, "effective_batch_size": None, "per_device_train_batch_size": 8},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "stream": {},
}
ALL_CASES = (*CASES, *DATA)
ROWS, NUM_ROWS, SAVED, KILLED = 8, 57, 10, 13  # eight steps an epoch, the last of one row; saved in the second


class Kill(TrainerCallback):
    """Ends this process as a crash would."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def build(case: str, folder: Path, encoders: Path, broken: bool = False, **given) -> FastTrainer:
    """20 steps of 8 rows, in passes of up to four rows per process, on as many processes as there are."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    fixed = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "effective_batch_size": ROWS}
    fixed |= {"gradient_accumulation_steps": 2 // world_size} if case == "packed" else {}
    given = {**fixed, **DATA.get(case, {}), **given}
    trainer = make_trainer("masked_lm" if case in DATA else case, folder, world_size, encoders, broken, **given)
    trainer.train_dataset = trainer.train_dataset.select(range(NUM_ROWS))
    if case == "stream":
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset(1)
    assert trainer.args.world_size == world_size
    return trainer


def train(case: str, folder: Path, encoders: Path, name: str, resume: str | None = None, **given) -> FastTrainer:
    """Trains, and writes losses and weights to `name` in the folder above; `folder` is of this run."""
    trainer = build(case, folder, encoders, **given)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == NUM_STEPS
    save_numbers(folder.parent, name, trainer)
    return trainer


SAVING = {"save_strategy": "steps", "save_steps": SAVED}


def main(folder: Path, task: str) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    encoders = folder / "encoders"
    if task.startswith("kill:"):
        case = task.removeprefix("kill:")
        trainer = build(case, folder / f"killed-{case}", encoders, **SAVING)
        trainer.add_callback(Kill())
        trainer.train()
    elif task == "train":
        for case in ALL_CASES:
            trainer = train(case, folder / f"two-{case}", encoders, f"two-{case}")
        train("masked_lm", folder / "louder", encoders, "louder", broken=True)
        train("masked_lm", folder / "per-rank", encoders, "per-rank", average_tokens_across_devices=False)
    elif task == "resume":
        for case in ALL_CASES:
            train(case, folder / f"killed-{case}", encoders, f"resumed-{case}", resume="auto", **SAVING)
            checkpoint = str(folder / f"alone-{case}" / f"checkpoint-{SAVED}")
            trainer = train(case, folder / f"grown-{case}", encoders, f"grown-{case}", resume=checkpoint)
    else:
        sizes = {"per_device_train_batch_size": 2, "effective_batch_size": 12}
        trainer = train("masked_lm", folder / "three", encoders, "three", dataloader_num_workers=1, **sizes)
    leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

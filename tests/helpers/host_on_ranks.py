"""What each process of a two-process test runs: `python host_on_ranks.py FOLDER PLACE [killed]`, under torchrun.

Trains 20 steps of Muon and AdamW under DDP, clipped, in two passes a step, on the host or on the device (`PLACE`), from
the newest checkpoint in FOLDER if there is one; writes the weights there. With `killed`, process 1 dies in step 13.
"""

import gc
import os
import signal
import sys
from pathlib import Path

from muon_on_ranks import QUIET, RANK, make_model, make_rows, weights
from ranks import leave
from safetensors.torch import save_file
from token_rows import stack_rows
from transformers import TrainerCallback

from hf_ext.hardware import describe_hardware
from hf_ext.models.host_optimizer import find_host_optimizer
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

SETTINGS = {"max_steps": 20, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": 3}
STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 5, "resume": "auto"}


class Killer(TrainerCallback):
    """Dies without a word in a step."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 12 and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, place: str, *how: str) -> None:
    gc.freeze()
    words = {"host": ["muon", "cpu_offload"], "device": ["muon"]}[place]
    args = FastTrainingArguments(str(folder / "run"), **QUIET, **SETTINGS, **STEPS, speedups=words)
    model, rows = make_model(), make_rows()
    plan = make_plan(args, model, rows, stack_rows, hardware=describe_hardware("A100"))
    callbacks = [Killer()] if "killed" in how else []
    trainer = FastTrainer(model, args, stack_rows, rows, plan=plan, callbacks=callbacks)
    trainer.train()
    assert args.world_size == 2
    assert (find_host_optimizer(trainer.optimizer) is None) == (place == "device")
    save_file(weights(trainer), folder / f"weights-{RANK}.safetensors")
    leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

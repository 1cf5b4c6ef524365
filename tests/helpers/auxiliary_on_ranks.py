"""What each process of a two-process test runs: `python auxiliary_on_ranks.py FOLDER KIND [KILLED_AT]`, under torchrun.

Trains 10 steps from the newest checkpoint in FOLDER if there is one, and writes the weights there; process 1 dies in
step KILLED_AT.
"""

import gc
import os
import signal
import sys
from pathlib import Path

from auxiliary_runs import CountsBatches, DrawsGlobally, Fast, make_trainer
from ranks import leave
from safetensors.torch import save_file
from transformers import TrainerCallback

RANK = int(os.environ.get("RANK", "0"))
KINDS = {kind.__name__: kind for kind in (Fast, CountsBatches, DrawsGlobally)}


class Killer(TrainerCallback):
    """Dies without a word in a step."""

    def __init__(self, step: int):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, kind: str, killed_at: str = "") -> None:
    gc.freeze()
    callbacks = [Killer(int(killed_at))] if killed_at else []
    saving = {"save_strategy": "steps", "save_steps": 1, "resume": "auto"}
    trainer = make_trainer(KINDS[kind], folder / "run", 2, num_processes=2, callbacks=callbacks, **saving)
    trainer.train()
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    save_file(weights, folder / f"weights-{RANK}.safetensors")
    leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

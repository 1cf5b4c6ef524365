"""What each process of `test_zero_equals_one_process.py` runs: `zero_on_ranks.py FOLDER MODE`, under a ZeRO file.

"whole": 20 steps of each case, the model saved, a run that goes on from the tenth, a broken twin, what is refused.
"alone": one process tries to go on.
"""

import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import deepspeed
import pytest
import torch
from equal_cases import gathered, make_trainer, save_numbers, train
from run_outcomes import losses

from hf_ext.errors import CheckpointError, HfExtError, NotFiniteError, PlanRefused

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ENCODERS = FOLDER / "encoders"
SAVES = {"save_strategy": "steps", "save_steps": 10}
CASES = ("full", "lora", "frozen_cache", "masked_lm")


class InfiniteAtStep3:
    """The loss of the second process is infinite in the third step; its gradient is not."""

    def __init__(self, trainer):
        self.trainer, self.compute = trainer, trainer.compute_loss_func

    def __call__(self, *args, **kwargs):
        loss = self.compute(*args, **kwargs)
        return loss + torch.inf if RANK == 1 and self.trainer.state.global_step == 2 else loss


def save_gathered(name: str, trainer) -> dict[str, torch.Tensor]:
    """`save_numbers`, with the weights that ZeRO-3 split put together."""
    split = [weight for weight in trainer.model.parameters() if hasattr(weight, "ds_id")]
    with ExitStack() as stack:
        if split:
            stack.enter_context(deepspeed.zero.GatheredParameters(split))
        save_numbers(FOLDER, name, trainer)
        return gathered(trainer)


def run_case(case: str) -> dict:
    folder = FOLDER / case
    trainer = train(case, folder, WORLD, ENCODERS, **SAVES)
    weights = save_gathered(f"{case}-whole", trainer)
    trainer.save_model()
    resumed = make_trainer(case, folder, WORLD, ENCODERS)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-10"))
    again = save_gathered(f"{case}-resumed", resumed)
    return {
        "same_weights": all(torch.equal(weights[name], again[name]) for name in weights),
        "same_losses": losses(resumed) == losses(trainer),
        "share": sum(getattr(p, "ds_tensor", p).numel() for p in trainer.model.parameters())
        / sum(p.numel() for p in weights.values()),
        "optimizer": type(trainer.optimizer.optimizer.optimizer).__name__,
    }


def refused(error: type, action, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        action(*args, **kwargs)
    return str(caught.value)


def resume(folder: Path, checkpoint: Path, **given):
    make_trainer("masked_lm", folder, WORLD, ENCODERS, use_cpu=False, **given).train(str(checkpoint))


def refusals(trainer) -> dict[str, str]:
    source = FOLDER / "masked_lm" / "checkpoint-10"
    copy, damaged = FOLDER / "elsewhere" / "checkpoint-10", FOLDER / "damaged" / "checkpoint-10"
    if RANK == 0:
        shutil.copytree(source, copy)
        shutil.copytree(source, damaged)
        file = next(damaged.rglob("*optim_states.pt"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    trainer.accelerator.wait_for_everyone()
    found = {
        "muon": refused(PlanRefused, make_trainer, "muon", FOLDER / "muon", WORLD, ENCODERS),
        "elsewhere": refused(CheckpointError, resume, FOLDER / "other", copy),
        "damaged": refused(CheckpointError, resume, FOLDER / "damaged", damaged),
    }
    if trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:  # offloads
        found["sgd"] = refused(PlanRefused, make_trainer, "full", FOLDER / "sgd", WORLD, ENCODERS, optim="sgd")
    return found


def infinite_loss() -> dict:
    trainer = make_trainer("masked_lm", FOLDER / "stop", WORLD, ENCODERS, max_steps=4)
    trainer.compute_loss_func = InfiniteAtStep3(trainer)
    message = refused(NotFiniteError, trainer.train)
    finite = all(bool(weight.isfinite().all()) for weight in save_gathered("stop", trainer).values())
    return {"message": message, "finite": finite, "steps": trainer.state.global_step}


def main() -> None:
    if MODE == "alone":
        message = refused(HfExtError, resume, FOLDER / "masked_lm", FOLDER / "masked_lm" / "checkpoint-10")
        (FOLDER / "alone.json").write_text(json.dumps(message))
        return
    report = {case: run_case(case) for case in CASES}
    trainer = train("masked_lm", FOLDER / "broken", WORLD, ENCODERS, broken=True)
    save_gathered("broken", trainer)
    report |= {"refused": refusals(trainer), "stop": infinite_loss()}
    (FOLDER / f"report-{RANK}.json").write_text(json.dumps(report))
    trainer.end()


if __name__ == "__main__":
    main()

"""What each process of a nightly test runs: `python equal_on_ranks.py FOLDER TASK`, under torchrun: DDP, or FSDP2.

Rows that do not divide, so that the last step of each of the three epochs is short, in steps of
`--effective_batch_size`. TASK `train`: every case and the broken twins, whole. `kill:CASE`: a run that saves and is
killed later. `resume`: those go on, and so do the runs of one process in FOLDER/alone. `three`: masked language
modelling on three processes. FSDP2 also has `four`, where killed runs go on, and `half`, in bfloat16.
"""

import gc
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from equal_cases import CASES, LABELLED, NUM_STEPS, make_trainer, save_numbers
from ranks import leave
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from hf_ext.errors import CheckpointError
from hf_ext.trainer import FastTrainer

PACKED = {"speedups": ["attention", "packing"], "max_tokens_per_batch": 64}
DATA = {  # of masked language modelling: what else than rows in random order
    "packed": {**PACKED, "effective_batch_size": None, "per_device_train_batch_size": 8},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "stream": {},
}
ALL_CASES = (*CASES, *LABELLED, *DATA)
SHARDED_KILLS = ("full", "lora", "muon")  # the cases that FSDP2 kills
# Cases that FSDP2 also trains with recomputed activations, and what of them.
CHECKPOINTED = {"full": True, "lora": True, "masked_lm": "attention"}
ROWS, NUM_ROWS, SAVED, KILLED = 8, 57, 10, 13  # eight steps an epoch, the last of one row; saved in the second
SAVING = {"save_strategy": "steps", "save_steps": SAVED}
# The loss falls, so that the first checkpoint is the best where the highest is.
BEST = {**SAVING, "eval_strategy": "steps", "eval_steps": SAVED, "load_best_model_at_end": True}
BEST |= {"metric_for_best_model": "loss", "greater_is_better": True}


def copy_checkpoint(source: Path, folder: Path) -> str:
    """The checkpoint of a run in the folder of another, copied by the first process while the others wait."""
    name = f"checkpoint-{SAVED}"
    if os.environ.get("RANK", "0") == "0":
        shutil.copytree(source / name, folder / name)
    if distributed.is_initialized():
        distributed.barrier()
    return str(folder / name)


class Kill(TrainerCallback):
    """Ends this process as a crash would."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


class CountRounded(TrainerCallback):
    """Share of the numbers in the first gradient that bfloat16 holds exactly."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            found = [p.grad.to_local().flatten() for p in model.parameters() if p.grad is not None]
            exact = sum(int((part == part.bfloat16().float()).sum()) for part in found)
            self.share = exact / sum(part.numel() for part in found)


def build(case: str, folder: Path, encoders: Path, broken: bool = False, **given) -> FastTrainer:
    """20 steps of 8 rows, in passes of up to four rows per process, on as many processes as there are."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    fixed = {"per_device_train_batch_size": min(4, ROWS // world_size), "gradient_accumulation_steps": 1}
    fixed |= {"effective_batch_size": ROWS}
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


def train_sharded(folder: Path, encoders: Path) -> FastTrainer:
    """What FSDP2 has beside DDP: models saved whole, what the plan says, recomputed activations, the best model."""
    about = {}
    for case in CASES:
        trainer = train(case, folder / f"two-{case}", encoders, f"two-{case}")
        trainer.save_model(str(folder / f"two-{case}-saved"))
        decision = trainer.plan["sharding"]
        split = sum(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
        whole = len([*trainer.model.parameters()]) - split
        about[case] = {"status": decision.status, "reason": decision.reason, "split": split, "whole": whole}
        if case in CHECKPOINTED:
            again = {"activation_checkpointing": CHECKPOINTED[case]}
            train(case, folder / f"recomputed-{case}", encoders, f"recomputed-{case}", **again)
    (folder / "about.json").write_text(json.dumps(about))
    return train("full", folder / "best", encoders, "best", **BEST)


def train_half(folder: Path, encoders: Path) -> FastTrainer:
    """bfloat16: a step as hf_ext sums gradients, one as accelerate would; then every case."""
    found = {}
    for name in ("ours", "accelerate"):
        trainer = build("masked_lm", folder / name, encoders, max_steps=1, max_grad_norm=0.0)
        if name == "accelerate":  # the broken twin
            backend = trainer._ext_parts.backend
            backend.configure = lambda plugin=trainer.accelerator.state.fsdp_plugin: object.__setattr__(
                plugin.mixed_precision_policy, "reduce_dtype", plugin.mixed_precision_policy.param_dtype
            )
        trainer.add_callback(counter := CountRounded())
        trainer.train()
        found[name] = counter.share
    for case in CASES:
        trainer = train(case, folder / f"half-{case}", encoders, f"half-{case}")
    found["evidence"] = trainer.plan["sharding"].evidence
    (folder / "half.json").write_text(json.dumps(found))
    return trainer


def main(folder: Path, task: str, is_sharded: bool) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    encoders, cases = folder / "encoders", SHARDED_KILLS if is_sharded else ALL_CASES
    if task.startswith("kill:"):
        case = task.removeprefix("kill:")
        trainer = build(case, folder / f"killed-{case}", encoders, **SAVING)
        trainer.add_callback(Kill())
        trainer.train()
    elif task == "train":
        for case in () if is_sharded else ALL_CASES:
            train(case, folder / f"two-{case}", encoders, f"two-{case}")
        train("masked_lm", folder / "per-rank", encoders, "per-rank", average_tokens_across_devices=False)
        trainer = train("masked_lm", folder / "louder", encoders, "louder", broken=True)
        if is_sharded:
            trainer = train_sharded(folder, encoders)
    elif task == "resume":
        for case in cases:
            resumed = {"resume": "auto", **SAVING}
            trainer = train(case, folder / f"killed-{case}", encoders, f"resumed-{case}", **resumed)
            checkpoint = copy_checkpoint(folder / f"alone-{case}", folder / f"grown-{case}")
            if not is_sharded:
                train(case, folder / f"grown-{case}", encoders, f"grown-{case}", resume=checkpoint)
                continue
            with pytest.raises(CheckpointError, match="are in the files of Trainer, this run reads those of FSDP2"):
                build(case, folder / f"grown-{case}", encoders).train(resume_from_checkpoint=checkpoint)
    elif task == "four":
        for case in cases:
            checkpoint = copy_checkpoint(folder / f"killed-{case}", folder / f"four-{case}")
            trainer = train(case, folder / f"four-{case}", encoders, f"four-{case}", resume=checkpoint)
    elif task == "half":
        trainer = train_half(folder, encoders)
    else:
        sizes = {"per_device_train_batch_size": 2, "effective_batch_size": 12}
        trainer = train("masked_lm", folder / "three", encoders, "three", dataloader_num_workers=1, **sizes)
    leave(trainer)


if __name__ == "__main__":
    sharded = "ACCELERATE_USE_FSDP" in os.environ
    if sharded:
        import cpu_as_gpus.sitecustomize  # noqa: F401  # before accelerate looks for devices
    main(Path(sys.argv[1]), sys.argv[2], sharded)

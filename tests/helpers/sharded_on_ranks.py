"""What each process of the tests of sharded checkpoints runs: `python sharded_on_ranks.py SPEC.json` under torchrun.

SPEC is a list of runs, trained one after another; each writes its rows and losses, and the gathered weights and
optimizer state that it ended with, into its folder. See `Run`.
"""

import errno
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from miniature_esm import make_esm
from peft import LoraConfig, get_peft_model
from ranks import leave
from safetensors.torch import save_file
from token_rows import RecordingCollator
from torch.distributed.tensor import DTensor
from train_on_ranks import make_rows, settings
from transformers import EsmForTokenClassification, TrainerCallback

from hf_ext.checkpoints.manifest import Manifest, hash_file
from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.errors import HfExtError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))


@dataclass
class Run:
    """`name`: of what it writes. `dies`: all processes do, in the save at step 4. `given`: arguments.

    `source`: checkpoints that are copied into the folder first; `harm`: what is done to the last of them. `full`: whose
    disk takes nothing in the save at step 4. `record`: also write what it began with, and had after step 4.
    """

    folder: str
    name: str
    kind: str = "full"
    dies: bool = False
    source: list[str] = field(default_factory=list)
    harm: str = ""
    full: str = ""
    record: bool = False
    given: dict[str, Any] = field(default_factory=dict)


def make_model(kind: str) -> Any:
    """Heads of 3 and 1 labels have fewer rows than there are processes: some hold an empty part."""
    tokens = {"vocab_size": 24, "mask_token_id": 23, "num_labels": 3}
    model = make_esm(EsmForTokenClassification, num_hidden_layers=2, **tokens)
    model.esm.contact_head.requires_grad_(False)  # it never gets a gradient, and so no state of the optimizer
    if kind == "lora":
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
        )
    return model


class Recorder(TrainerCallback):
    """Writes gathered weights and optimizer state at two moments."""

    def __init__(self, run: Run):
        self.run = run
        self.trainer: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        write_tensors(self.run, self.trainer, "begin")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            write_tensors(self.run, self.trainer, "four")


def die() -> None:
    """SIGKILL for the launcher, the other processes, and this one last."""
    own = psutil.Process()
    launcher = own.parent()
    others = [process for process in launcher.children(recursive=True) if process.pid != own.pid]
    for process in (launcher, *others, own):
        process.send_signal(signal.SIGKILL)


def die_in_save(step: int) -> None:
    """Before the save at `step` is committed."""
    commit = CheckpointStore.commit
    CheckpointStore.commit = lambda self, number, *args: die() if number == step else commit(self, number, *args)


def copy_sources(run: Run) -> None:
    """By the first process, while the others wait."""
    if RANK == 0:
        copies = [shutil.copytree(path, Path(run.folder) / Path(path).name) for path in run.source]
        if run.harm:
            stale(*copies)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def stale(older: Path, newer: Path) -> None:
    """The optimizer of the older checkpoint, under a manifest that vouches for it."""
    shutil.copytree(older / "optimizer_0", newer / "optimizer_0", dirs_exist_ok=True)
    manifest = Manifest.read(newer)
    replace(manifest, files={name: hash_file(newer / name) for name in manifest.files}).write(newer)


def train(run: Run) -> FastTrainer:
    folder = Path(run.folder)
    if run.source:
        copy_sources(run)
    if run.full:
        fill_disk(4)
    fixed = {"use_cpu": False, "save_strategy": "steps", "save_steps": 2, "max_steps": 6, "logging_steps": 1}
    fixed |= {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_grad_norm": 1.0, "weight_decay": 0.1}
    fixed |= {"resume": "auto"} if run.source else {}
    fixed |= {"speedups": "muon"} if run.kind == "muon" else {}
    fixed |= {"eval_strategy": "steps", "eval_steps": 2} if "metric_for_best_model" in run.given else {}
    if run.dies:
        die_in_save(4)
    args = FastTrainingArguments(**{**settings(folder), **fixed, **run.given})
    trainer = FastTrainer(make_model(run.kind), args, RecordingCollator(), make_rows(40), make_rows(8))
    if run.record:
        recorder = Recorder(run)
        recorder.trainer = trainer
        trainer.add_callback(recorder)
    trainer.train()
    return trainer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The gathered values; all processes call it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().contiguous()


def gathered(trainer: FastTrainer) -> dict[str, torch.Tensor]:
    """Weights, and what the optimizer knows of each."""
    tensors = {name: whole(p) for name, p in trainer.model.named_parameters()}
    for i, state in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{name}": whole(value) for name, value in state.items()}
    return tensors


def no_room() -> OSError:
    """What a full disk says."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disk(step: int) -> None:
    """The disk of the second process is full for its own file of the save at `step`."""
    save = torch.save

    def save_or_fail(content, path, *args, **kwargs):
        if RANK == 1 and f"checkpoint-{step}" in str(path):
            raise no_room()
        save(content, path, *args, **kwargs)

    torch.save = save_or_fail


def write_tensors(run: Run, trainer: FastTrainer, name: str) -> None:
    tensors = gathered(trainer)
    if trainer.args.process_index == 0:
        save_file(tensors, Path(run.folder) / f"{name}.safetensors")


def write(run: Run, trainer: FastTrainer) -> None:
    write_tensors(run, trainer, run.name)
    report = {
        "batches": trainer.data_collator.batches,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "kind": str(trainer.accelerator.distributed_type),
        "world": trainer.args.world_size,
        "random": torch.rand(3).tolist(),
        "step": trainer.state.global_step,
        "best": trainer.state.best_global_step,
    }
    Path(f"{run.folder}/{run.name}-{RANK}.json").write_text(json.dumps(report))


def main(spec: Path) -> None:
    trainer = None
    for given in json.loads(spec.read_text()):
        run = Run(**given)
        try:
            trainer = train(run)
        except HfExtError as error:
            Path(f"{run.folder}/{run.name}-{RANK}.json").write_text(json.dumps({"error": str(error)}))
            continue
        write(run, trainer)
    if trainer is not None:
        leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

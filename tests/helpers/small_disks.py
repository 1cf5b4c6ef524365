"""Small disks, file operations inside a checkpoint that fail, and tiny runs that meet them."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from inside import LOCK
from miniature_esm import make_narrow_esm
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from token_rows import make_number_rows, stack_rows
from transformers import EsmForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_ext.checkpoints import CheckpointStore
from hf_ext.text import LOGGER
from hf_ext.text.progress import RunLog
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_STEPS, SAVE_STEPS = 8, 2
KINDS = ("full", "lora", "frozen")
SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False, "seed": 3}
SETTINGS |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 8, "learning_rate": 1e-2}
SETTINGS |= {"logging_steps": 1, "max_steps": NUM_STEPS, "save_steps": SAVE_STEPS}


def make_esm(**shape: Any) -> EsmForSequenceClassification:
    """From config: 0.1 M parameters, 1.3 MB a checkpoint; dropout, so that random states matter."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    return make_narrow_esm(**sizes | shape)


def make_model(kind: str, base: Path) -> Any:
    """`full`, or on the base saved at `base`: `lora`, or `frozen` but for the head."""
    if kind == "full":
        return make_esm()
    model = EsmForSequenceClassification.from_pretrained(base)
    torch.manual_seed(1)
    if kind == "lora":
        return get_peft_model(model, LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"]))
    model.esm.requires_grad_(False)
    return model


def make_trainer(folder: Path, model: Any = None, trainer: type[Trainer] = FastTrainer, **given: Any) -> Any:
    """A new trainer of 8 steps in `folder` that saves every second; `given` are arguments, or `callbacks`."""
    callbacks = given.pop("callbacks", [])
    arguments = FastTrainingArguments if issubclass(trainer, FastTrainer) else TrainingArguments
    args = arguments(output_dir=str(folder), **{**SETTINGS, **given})
    held_out = make_number_rows(8) if args.eval_strategy != "no" else None
    return trainer(
        model or make_esm(), args, stack_rows, make_number_rows(2 * NUM_STEPS), held_out, callbacks=callbacks
    )


def digest(model: Any) -> str:
    """sha256 over all weights."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    return hashlib.sha256(safetensors.torch.save(tensors)).hexdigest()


def hidden(folder: Path) -> list[str]:
    """Staging, trash and other half-done things that a run left in its folder and its checkpoints."""
    names = [name for _, folders, files in os.walk(folder) for name in [*folders, *files]]  # it may vanish meanwhile
    return [name for name in names if name != LOCK and (name.startswith(".") or name.endswith(".tmp"))]


class Digests(TrainerCallback):
    """Hashes of the weights by optimizer step."""

    def __init__(self) -> None:
        self.by_step: dict[int, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.by_step[state.global_step] = digest(kwargs["model"])


@contextmanager
def own_log() -> Iterator[None]:
    """hf_ext's log as in a new process, whatever recipe another test ran; put back afterwards, without run.log."""
    handlers, propagate = [*LOGGER.handlers], LOGGER.propagate
    LOGGER.handlers, LOGGER.propagate = [], True
    try:
        yield
    finally:
        for name in ("hf_ext", "transformers", "accelerate", "datasets", "py.warnings"):
            logger = LOGGER.manager.getLogger(name)
            for handler in [handler for handler in logger.handlers if isinstance(handler, RunLog)]:
                logger.removeHandler(handler)
                handler.close()
        LOGGER.handlers, LOGGER.propagate = handlers, propagate


class SmallDisk:
    """A tmpfs whose size can be changed."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def is_allowed(folder: Path) -> bool:
        """Whether this process may mount."""
        disk = SmallDisk(folder)
        try:
            disk.mount(4096)
        except (OSError, subprocess.CalledProcessError):
            return False
        disk.unmount()
        return True

    def mount(self, num_bytes: int) -> None:
        self._run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs")

    def remount(self, *options: str) -> None:
        """`size=BYTES`."""
        self._run("mount", "-o", ",".join(["remount", *options]))

    def unmount(self) -> None:
        if self.folder.is_mount():
            self._run("umount", "-l")

    def _run(self, *command: str) -> None:
        subprocess.run([*command, str(self.folder)], check=True, capture_output=True)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Mounted at `folder` while entered."""
    disk = SmallDisk(folder)
    disk.mount(num_bytes)
    try:
        yield disk
    finally:
        disk.unmount()
        shutil.rmtree(folder, ignore_errors=True)


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


class Faults:
    """Makes one kind of file operation inside a checkpoint's folder fail, while armed.

    Args:
        place: a key of `PLACES`.
        number: errno of what is raised; weights raise it as safetensors does, the optimizer as torch does: without.
    """

    PLACES = ("mkdir", "weights", "optimizer", "fsync", "rename", "deletion")

    def __init__(self, place: str, number: int, patch: pytest.MonkeyPatch):
        self.place, self.number = place, number
        self.is_armed = False
        self.count = 0
        self.name = {"weights": "model.safetensors", "optimizer": "optimizer.pt"}.get(place)
        patch.setattr(os, "mkdir", self._before(os.mkdir, lambda path, *_: place == "mkdir" and _is_staged(path)))
        patch.setattr(os, "fsync", self._before(os.fsync, lambda fd: place == "fsync" and _is_staged(_path_of(fd))))
        patch.setattr(os, "rename", self._before(os.rename, self._is_rename))
        patch.setattr(os, "unlink", self._before(os.unlink, self._is_deletion))
        patch.setattr(safetensors.torch, "serialize_file", self._tensors(safetensors.torch.serialize_file))
        patch.setattr(torch, "save", self._saves(torch.save))

    def fail(self) -> None:
        self.count += 1
        raise OSError(self.number, os.strerror(self.number))

    def _before(self, real: Callable[..., Any], is_meant: Callable[..., bool]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            if self.is_armed and is_meant(*args):
                self.fail()
            return real(*args, **kwargs)

        return act

    def _is_rename(self, source: Any, target: Any) -> bool:
        if self.place == "rename":
            return _is_staged(source) and os.path.basename(target).startswith("checkpoint-")
        return False

    def _is_deletion(self, path: Any, *_: Any) -> bool:
        return self.place == "deletion" and ".trash-checkpoint-" in str(path)

    def _tensors(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_armed and _is_staged(filename) and os.path.basename(filename) == self.name:
                self.count += 1
                Path(f"{filename}.half").write_bytes(b"half")
                text = os.strerror(self.number)
                raise SafetensorError(f"Error while serializing: I/O error: {text} (os error {self.number})")
            return real(tensors, filename, *args, **kwargs)

        return write

    def _saves(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def save(content: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_armed and _is_staged(path) and os.path.basename(path) == self.name:
                self.count += 1
                Path(path).write_bytes(b"half")
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
            return real(content, path, *args, **kwargs)

        return save


def _is_staged(path: Any) -> bool:
    return ".staging/checkpoint-" in str(path)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


class ArmAt(TrainerCallback):
    """Lets file operations fail from optimizer step `first` on, or in the save of that step alone.

    That save is over at the end of the next step. Notes, as each step begins, what a resume would start from and what
    is half done in the folder.
    """

    def __init__(self, faults: Faults, first: int, only_once: bool, but_not: tuple[int, ...] = ()):
        self.faults, self.first, self.only_once, self.but_not = faults, first, only_once, but_not
        self.newest: dict[int, int | None] = {}
        self.left: dict[int, list[str]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        newest = CheckpointStore(args.output_dir).find_newest()
        self.newest[state.global_step] = newest.step if newest else None
        self.left[state.global_step] = hidden(Path(args.output_dir))
        step = state.global_step + 1
        is_due = self.first <= step and (step <= self.first + 1 or not self.only_once)
        self.faults.is_armed = is_due and step not in self.but_not

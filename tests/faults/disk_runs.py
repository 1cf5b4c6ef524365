"""Tiny runs that fill their disk: small tmpfs mounts, failing file operations, and what a folder holds meanwhile."""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import EsmConfig, EsmForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_STEPS, SAVE_STEPS = 8, 2
KINDS = ("full", "lora", "frozen")
SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False, "seed": 3}
SETTINGS |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 8, "learning_rate": 1e-2}
SETTINGS |= {"logging_steps": 1, "max_steps": NUM_STEPS, "save_steps": SAVE_STEPS}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of one length, without padding."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows], dtype=torch.float32)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def make_rows(num: int = 2 * NUM_STEPS) -> Dataset:
    """Random tokens with a label."""
    ids = torch.randint(4, 24, (num, 6), generator=torch.Generator().manual_seed(1)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": [row[0] / 10 for row in ids]})


def make_esm(**shape: Any) -> EsmForSequenceClassification:
    """From config: 0.1 M parameters, 1.3 MB a checkpoint; dropout, so that random states matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, **shape}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
    rest = {"num_attention_heads": 2, "pad_token_id": 1, "mask_token_id": 23, "num_labels": 1}
    return EsmForSequenceClassification(EsmConfig(**sizes, **dropout, **rest, position_embedding_type="rotary"))


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
    held_out = make_rows(8) if args.eval_strategy != "no" else None
    return trainer(model or make_esm(), args, collate, make_rows(), held_out, callbacks=callbacks)


def digest(model: Any) -> str:
    """sha256 over all weights."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    return hashlib.sha256(safetensors.torch.save(tensors)).hexdigest()


def hidden(folder: Path) -> list[str]:
    """Staging, trash and other half-done things that a run left in its folder and its checkpoints."""
    return [path.name for path in folder.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]


def record(name: str, counts: dict[str, Any]) -> None:
    """Writes counts as JSON into the folder that HF_EXT_RESULTS names, if any."""
    results = os.environ.get("HF_EXT_RESULTS")
    if results:
        Path(results).mkdir(parents=True, exist_ok=True)
        (Path(results) / f"{name}.json").write_text(json.dumps(counts, indent=1) + "\n")


# --- small disks ----------------------------------------------------------------------------------------------------


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
        """`size=BYTES`, `ro`, `rw`."""
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


def in_child(act: Callable[[], Any], file_bytes: int) -> Any:
    """What `act` returns, JSON-able, from a silent forked process that may write files of so many bytes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for descriptor in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


# --- failing file operations ----------------------------------------------------------------------------------------


class FailingFile(io.FileIO):
    """Takes half of what is written, then fails."""

    def __init__(self, path: Any, fail: Callable[[], None]):
        super().__init__(path, "w")
        self._fail = fail

    def write(self, data: Any) -> int:
        super().write(memoryview(data)[: len(data) // 2])
        self._fail()
        raise AssertionError("unreachable")


class Faults:
    """Makes one kind of file operation inside a checkpoint's folder fail, while armed.

    Args:
        place: a key of `PLACES`.
        number: errno of what is raised; tensor files raise it as safetensors does.
    """

    PLACES = ("mkdir", "weights", "optimizer", "json", "fsync", "rename", "manifest", "deletion")

    def __init__(self, place: str, number: int, patch: pytest.MonkeyPatch):
        self.place, self.number = place, number
        self.is_armed = False
        self.count = 0
        name = {"weights": "model.safetensors", "optimizer": "optimizer.safetensors", "json": "progress.json"}
        self.name = {"manifest": "manifest.json.tmp", **name}.get(place)
        patch.setattr(os, "mkdir", self._before(os.mkdir, lambda path, *_: place == "mkdir" and _is_staged(path)))
        patch.setattr(os, "fsync", self._before(os.fsync, lambda fd: place == "fsync" and _is_staged(_path_of(fd))))
        patch.setattr(os, "rename", self._before(os.rename, self._is_rename))
        patch.setattr(os, "unlink", self._before(os.unlink, self._is_deletion))
        patch.setattr(safetensors.torch, "serialize_file", self._tensors(safetensors.torch.serialize_file))
        real_open = builtins.open
        for module in (builtins, io):
            patch.setattr(module, "open", self._opens(real_open))

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

    def _opens(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            is_meant = isinstance(path, str | Path) and os.path.basename(path) == self.name and _is_staged(path)
            if self.is_armed and "w" in mode and is_meant:
                return io.TextIOWrapper(io.BufferedWriter(FailingFile(path, self.fail)), encoding="utf-8")
            return real(path, mode, *args, **kwargs)

        return open_file


def _is_staged(path: Any) -> bool:
    return ".staging-checkpoint-" in str(path)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


class ArmAt(TrainerCallback):
    """Lets file operations fail from optimizer step `first` on, or in the save of that step alone.

    Notes, with the next step, what a resume would start from and what is half done in the folder.
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
        is_due = step == self.first or (step > self.first and not self.only_once)
        self.faults.is_armed = is_due and step not in self.but_not


class Digests(TrainerCallback):
    """Hashes of the weights by optimizer step."""

    def __init__(self) -> None:
        self.by_step: dict[int, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.by_step[state.global_step] = digest(kwargs["model"])


# --- what a folder holds --------------------------------------------------------------------------------------------


def allocated(folder: str) -> int:
    """Bytes allocated for a folder and all that is in it; what vanishes meanwhile is not counted."""
    total, waiting = 0, [folder]
    while waiting:
        place = waiting.pop()
        try:
            total += os.lstat(place).st_blocks * 512
            entries = list(os.scandir(place))
        except FileNotFoundError:
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Samples:
    """What a process of its own measured: most bytes ever seen, how often it looked, and for how long."""

    peak_bytes = num_samples = 0
    seconds = 0.0

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.num_samples / self.seconds


@contextmanager
def sampled(folder: Path, every_s: float = 0.001) -> Iterator[Samples]:
    """Measures `folder` every millisecond, or as often as the machine allows, in a forked process."""
    samples = Samples()
    stop_reading, stop_writing = os.pipe()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.set_blocking(stop_reading, False)
            os.write(writing, json.dumps(_sample(str(folder), every_s, stop_reading)).encode())
        finally:
            os._exit(0)
    try:
        yield samples
    finally:
        os.write(stop_writing, b"!")
        os.waitpid(child, 0)
        samples.peak_bytes, samples.num_samples, samples.seconds = json.loads(os.read(reading, 1000))
        for descriptor in (stop_reading, stop_writing, reading, writing):
            os.close(descriptor)


def _sample(folder: str, every_s: float, stop: int) -> tuple[int, int, float]:
    began = time.perf_counter()
    peak = count = 0
    while True:
        due = began + count * every_s
        peak = max(peak, allocated(folder))
        count += 1
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            os.read(stop, 1)
        except BlockingIOError:
            continue
        return max(peak, allocated(folder)), count, time.perf_counter() - began

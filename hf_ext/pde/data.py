"""Samples of the tasks: made once and kept in a cache, what is measured on them, and batches of them."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..data.masking import splitmix64
from .solvers import make_advection, make_darcy
from .tasks import ADVECTION_SPEED, ADVECTION_TIMES, TASKS, num_points

logger = logging.getLogger(__name__)

FORMAT = 1  # another one where what is generated changes: samples of the old one are then made anew
SPLITS = ("train", "validation", "test")  # the place of a name is part of the seed: append, never reorder
Samples = dict[str, np.ndarray]


def load_task(
    name: str, split: str, num: int, *, resolution: int, seed: int, cache_dir: str | os.PathLike[str] | None = None
) -> Samples:
    """`num` samples of a task, from the cache if they are there, else generated and put there.

    Sample i is a function of (name, split, resolution, seed, i) alone: more samples begin with the same ones. Several
    processes may ask at once: each generates, writes a file of its own and renames it, and the files are equal. What is
    damaged in the cache is made anew; where the cache cannot be written to, samples are used all the same. A warning
    says so.

    Args:
        name: one of `TASKS`.
        split: one of `SPLITS`; no two share a sample.
        num: samples, at least 1.
        resolution: r: Darcy flow on r x r cells, advection on r * r / 4 points at 4 times; even.
        seed: 0 or more.
        cache_dir: folder of all cached samples, `~` is the home; None: nothing is read or written.

    Returns:
        "inputs" (num, *input_shape) and "targets" (num, *target_shape), float32, see `Task`.

    Cost: on one core, 1,000 samples of Darcy flow take 1 s at 32 x 32 and 9 s at 64 x 64, of advection below 1 s; to
    read them again, some ms.
    """
    path = None
    if cache_dir is not None:
        file = f"{name}_{split}_{num}x{resolution}_seed{seed}_format{FORMAT}.npz"
        path = Path(os.path.expanduser(cache_dir)) / file
        if (found := _read(path)) is not None:
            return found
    if name == "darcy2d":
        fields = make_darcy(num, resolution=resolution, seed=seed, stream=SPLITS.index(split))
    else:
        grid: dict[str, Any] = {"points": num_points(resolution), "times": ADVECTION_TIMES, "beta": ADVECTION_SPEED}
        fields = make_advection(num, **grid, seed=seed, stream=SPLITS.index(split))
    samples = dict(zip(("inputs", "targets"), fields))
    if path is not None:
        _write(path, samples)
    return samples


def _read(path: Path) -> Samples | None:
    """The samples of a file, whose checksums NumPy compares; None if there is none, or a damaged one."""
    if not os.path.isfile(path):
        return None
    try:
        with np.load(path) as file:
            return {kind: file[kind] for kind in ("inputs", "targets")}
    except (OSError, EOFError, LookupError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("Cached samples %s cannot be read (%s); they are made anew.", path, error)
        return None


def _write(path: Path, samples: Samples) -> None:
    """Whole or not at all: in a folder of this writer's own, then moved over what stands there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as draft:
            np.savez(Path(draft) / path.name, **samples)  # type: ignore[arg-type]
            os.replace(Path(draft) / path.name, path)
    except OSError as error:
        logger.warning("Samples cannot be kept in %s (%s): the next run makes them anew.", path.parent, error)


def measure_units(train: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation of inputs and targets over all values, for `OperatorConfig`.

    Args:
        train: task -> {"inputs", "targets"} of the training split.

    Returns:
        `input_means`, `input_stds`, `target_means`, `target_stds`, each task -> number in the unit of the data; of
        values that are all equal, the deviation is 1.
    """
    units: dict[str, dict[str, float]] = {}
    for kind in ("input", "target"):
        values = {name: np.asarray(samples[f"{kind}s"], dtype=np.float64) for name, samples in train.items()}
        units[f"{kind}_means"] = {name: float(value.mean()) for name, value in values.items()}
        units[f"{kind}_stds"] = {name: float(value.std()) or 1.0 for name, value in values.items()}
    return units


def baseline_errors(
    name: str, train: Mapping[str, np.ndarray], test: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Relative L2 of each test sample, (n,) float64, of predictions that learn nothing.

    Args:
        name: of the task.
        train, test: {"inputs", "targets"} of it.

    Returns:
        "training mean": of the mean field of the training targets; "persistence", for tasks in time: of the initial
        state.
    """
    exact = test["targets"].astype(np.float64)
    predictions = {"training mean": train["targets"].mean(0, dtype=np.float64)[None]}
    if TASKS[name].has_time:
        predictions["persistence"] = test["inputs"][:, None].astype(np.float64)
    scale = np.linalg.norm(exact.reshape(len(exact), -1), axis=1)
    return {
        kind: np.linalg.norm((found - exact).reshape(len(exact), -1), axis=1) / scale
        for kind, found in predictions.items()
    }


def choose_points(n: int, k: int, *, seed: int, epoch: int, row_ids: Sequence[Any]) -> np.ndarray:
    """k different places of n for each row, ascending; every set of k is as likely as every other.

    Args:
        n, k: n at least k.
        seed, epoch: any integers; the epoch is `int(trainer.state.epoch)`, or what a collator's `set_epoch` was told.
        row_ids: what identifies a row in the data set (its number, name or content); not its place in the batch.

    Returns:
        (rows, k), int64. Cost: 60 ns per point of n, on the CPU.
    """
    digests = [hashlib.blake2b(f"points\t{seed}\t{epoch}\t{row}".encode(), digest_size=8).digest() for row in row_ids]
    draws = splitmix64(np.frombuffer(b"".join(digests), "<u8").astype(np.uint64), n)
    return np.sort(np.argpartition(draws, k - 1, axis=1)[:, :k], axis=1)


class OperatorRows(Dataset):
    """Row i holds sample i of each task; a task with fewer samples than another begins anew.

    So all batches have the same shapes, and each step trains all tasks.

    Args:
        samples: task -> {"inputs": (n, ...), "targets": (n, ...)}, float32, arrays or tensors; all tasks have targets
            of as many values.
        is_evaluation: whether all points are to be decoded, whatever the collator draws.
    """

    def __init__(self, samples: Mapping[str, Mapping[str, Any]], is_evaluation: bool = False):
        self.is_evaluation = is_evaluation
        self.samples = {
            name: (torch.as_tensor(task["inputs"]), torch.as_tensor(task["targets"]).flatten(1))
            for name, task in samples.items()
        }

    def __len__(self) -> int:
        return max(len(targets) for _, targets in self.samples.values())

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {"row_id": index, "is_evaluation": self.is_evaluation}
        for name, (inputs, targets) in self.samples.items():
            place = index % len(targets)
            row[f"{name}_inputs"], row[f"{name}_targets"] = inputs[place], targets[place]
        return row


class OperatorCollator:
    """Stacks rows, and draws for each sample the points that a training step decodes.

    Points are a function of seed, epoch, task and row (`choose_points`): not of workers, processes, batches, order or
    restarts. `FastTrainer` says the epoch by itself, with `Trainer` add `MaskingEpochCallback`.

    Args:
        tasks: names, in the order in which they stand in a batch.
        num_points: Q, of each sample.
        num_queries: how many of them a training step decodes, from 1 to Q; None for all.
        seed: any integer.

    Cost: 60 ns per point of a row.
    """

    def __init__(self, tasks: Sequence[str], num_points: int, num_queries: int | None = None, seed: int = 0):
        self.tasks = [*tasks]
        self.num_points = num_points
        self.num_queries = num_queries or num_points
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that live for long see it change

    def set_epoch(self, epoch: int) -> None:
        """Draws for `epoch` what is collated from now on, in worker processes too."""
        self._epoch.fill_(epoch)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch of B rows.

        Returns:
            `{task}_inputs` (B, ...) and `labels` (B, tasks, q), float32; where q < Q points were drawn, `points`
            (B, tasks, q), int64, which say where the labels lie.
        """
        batch = {f"{name}_inputs": torch.stack([row[f"{name}_inputs"] for row in features]) for name in self.tasks}
        labels = torch.stack([torch.stack([row[f"{name}_targets"] for name in self.tasks]) for row in features])
        if features[0]["is_evaluation"] or self.num_queries == self.num_points:
            return {**batch, "labels": labels}
        draw: dict[str, Any] = {"n": self.num_points, "k": self.num_queries, "seed": self.seed}
        chosen = [
            choose_points(**draw, epoch=int(self._epoch), row_ids=[f"{name}\t{row['row_id']}" for row in features])
            for name in self.tasks
        ]
        points = torch.from_numpy(np.stack(chosen, axis=1))
        return {**batch, "points": points, "labels": labels.take_along_dim(points, dim=2)}

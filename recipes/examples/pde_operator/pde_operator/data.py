"""Samples of both equations, generated or from files of PDEBench (arXiv:2210.07182); batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.linalg import solveh_banded
from torch.utils.data import Dataset

from hf_ext.data import splitmix64
from hf_ext.errors import DataError, MissingDependencyError

from .configuration import ADVECTION_SPEED, ADVECTION_TIMES, num_points

SPLITS = ("train", "validation", "test")  # the place of a name is part of the seed: append, never reorder
Samples = dict[str, np.ndarray]
NUM_SINES = 2
LARGEST_MODE = 8
HIGH = 12.0
LOW = 3.0
NUM_MODES = 64  # per direction, whatever the resolution: a finer grid sees the same field


def make_task(name: str, split: str, num: int, *, resolution: int, seed: int) -> Samples:
    """Makes `num` samples of a task.

    Sample i is a function of (name, split, resolution, seed, i) alone: more samples begin with the same ones, and all
    processes make the same.

    Args:
        name: one of `TASKS`.
        split: one of `SPLITS`; no two share a sample.
        num: samples, at least 1.
        resolution: r: Darcy flow on r x r cells, advection on r * r / 4 points at 4 times; even.
        seed: 0 or more.

    Returns:
        "inputs" (num, *input_shape) and "targets" (num, *target_shape), float32, see `Task`.

    Cost: on one core, 1,000 samples of Darcy flow take 1 s at 32 x 32 and 9 s at 64 x 64, of advection below 1 s.
    """
    if name == "darcy2d":
        fields = make_darcy(num, resolution=resolution, seed=seed, stream=SPLITS.index(split))
    else:
        grid: dict[str, Any] = {"points": num_points(resolution), "times": ADVECTION_TIMES, "beta": ADVECTION_SPEED}
        fields = make_advection(num, **grid, seed=seed, stream=SPLITS.index(split))
    return dict(zip(("inputs", "targets"), fields))


def _row_generator(equation: int, seed: int, stream: int, row: int) -> np.random.Generator:
    """Makes the random generator of one row, whatever is drawn for the others.

    Advection is equation 0, Darcy flow 1.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(equation, stream, row)))


def make_advection(
    num: int, *, points: int = 1024, times: int = 4, beta: float = 0.4, seed: int, stream: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Makes initial states and solutions of du/dt + beta du/dx = 0 on [0, 1), periodic: u(x, t) = u0(x - beta t).

    u0 is the sum of two sines, A sin(2 pi n x + phase), with n one of 1, ..., 8, A from [0, 1) and phase from
    [0, 2 pi), each drawn uniformly and independently: the recipe of PDEBench (arXiv:2210.07182, appendix D) without its
    windows and absolute values. Both modes may be the same. Solutions are evaluated, not stepped or interpolated.

    Args:
        num: rows. Row i is a function of (seed, stream, i) alone, so that more rows begin with the same ones.
        points: of the grid x_j = j / points.
        times: how many, t_k = k / times for k = 1, ..., times.
        beta: speed; the unit of u is that of the amplitudes.
        seed: 0 or more.
        stream: another one gives other rows of the same seed, such as those of another split; 0 or more.

    Returns:
        inputs (num, points) and targets (num, times, points), float32, computed in float64.

    Cost: 1,000 rows of 1024 points and 4 times in 0.2 s on one core.
    """
    modes, amplitudes, phases = np.empty((3, num, NUM_SINES))
    for row in range(num):
        generator = _row_generator(0, seed, stream, row)
        modes[row] = generator.integers(1, LARGEST_MODE + 1, NUM_SINES)
        amplitudes[row] = generator.random(NUM_SINES)
        phases[row] = generator.random(NUM_SINES) * 2 * np.pi
    x = np.arange(points) / points
    fields = np.empty((num, times + 1, points), dtype=np.float32)
    for k, moved in enumerate(beta * (np.arange(times + 1) / times)):
        waves = np.sin(2 * np.pi * modes[..., None] * (x - moved) + phases[..., None])
        fields[:, k] = np.einsum("ns,nsx->nx", amplitudes, waves)
    return fields[:, 0].copy(), fields[:, 1:].copy()


def make_darcy(num: int, *, resolution: int = 64, seed: int, stream: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Makes coefficients a and solutions u of -div(a grad u) = 1 on the unit square, u = 0 on its boundary.

    a is 12 where a Gaussian random field is at least 0, else 3; the field is N(0, (-Laplace + 9)^-2) with Neumann
    boundary and without its mean, as in Li et al. 2021 (arXiv:2010.08895, appendix A.3.2), here by its 64 x 64 longest
    cosines. Values stand at the centres of cells: entry [i, j] at x = (i + 1/2) / r, y = (j + 1/2) / r.

    Args:
        num: rows. Row i is a function of (seed, stream, i) alone, so that more rows begin with the same ones; another
            resolution shows the same field.
        resolution: r, cells along each side, 2 or more.
        seed: 0 or more.
        stream: another one gives other rows of the same seed, such as those of another split; 0 or more.

    Returns:
        coefficients and solutions, each (num, resolution, resolution), float32; solved in float64, see `solve_darcy`.
    """
    coefficients = np.empty((num, resolution, resolution), dtype=np.float32)
    solutions = np.empty_like(coefficients)
    cosines, spread = _basis(resolution)
    for row in range(num):
        drawn = _row_generator(1, seed, stream, row).standard_normal(spread.shape)
        field = cosines @ (drawn * spread) @ cosines.T  # at the centres of cells, up to a factor
        coefficients[row] = np.where(field >= 0, HIGH, LOW)
        solutions[row] = solve_darcy(coefficients[row])
    return coefficients, solutions


def solve_darcy(coefficients: np.ndarray, source: float = 1.0) -> np.ndarray:
    """Solves -div(a grad u) = source for u on the unit square, u = 0 on its boundary, by finite volumes.

    A cell's value of a holds in all of it; between two cells the flux takes their harmonic mean, between a cell and the
    boundary its own value over half a cell, so that fluxes are continuous where a jumps. Banded Cholesky, exact but for
    rounding.

    Args:
        coefficients: (resolution, resolution), positive, at the centres of 2 x 2 cells or more.

    Returns:
        (resolution, resolution), float64, at the same places.

    Cost: on one core, 0.9 ms at 32 x 32, 8 ms at 64 x 64; it grows with the fourth power of the resolution.
    """
    a = np.asarray(coefficients, dtype=np.float64)
    resolution = len(a)
    across_x = 2 * a[:-1] * a[1:] / (a[:-1] + a[1:])
    across_y = 2 * a[:, :-1] * a[:, 1:] / (a[:, :-1] + a[:, 1:])
    diagonal = np.zeros_like(a)
    diagonal[:-1] += across_x
    diagonal[1:] += across_x
    diagonal[:, :-1] += across_y
    diagonal[:, 1:] += across_y
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        diagonal[edge] += 2 * a[edge]
    # Lower band of the matrix: row d holds entries d below the diagonal.
    band = np.zeros((resolution + 1, resolution**2))
    band[resolution].reshape(resolution, resolution)[:-1] = -across_x
    band[1].reshape(resolution, resolution)[:, :-1] = -across_y
    band[0] = diagonal.reshape(-1)
    right = np.full(resolution**2, source / resolution**2)
    return solveh_banded(band, right, overwrite_ab=True, lower=True, check_finite=False).reshape(a.shape)


@lru_cache(maxsize=4)
def _basis(resolution: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines (resolution, modes) of norm 1 on [0, 1], and each product's standard deviation (modes, modes)."""
    k = np.arange(NUM_MODES)
    centres = (np.arange(resolution) + 0.5) / resolution
    cosines = np.sqrt(np.where(k == 0, 1.0, 2.0)) * np.cos(np.pi * k * centres[:, None])
    spread = 1 / (np.pi**2 * (k[:, None] ** 2 + k**2) + 9)
    spread[0, 0] = 0.0
    return cosines, spread


# --- what is measured on samples, and batches of them -----------------------------------------------------------------


def measure_units(train: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Measures mean and standard deviation of inputs and targets over all values, for `OperatorConfig`.

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


def choose_points(n: int, k: int, *, seed: int, epoch: int, row_ids: Sequence[Any]) -> np.ndarray:
    """Chooses k different places of n for each row, ascending; every set of k is as likely as every other.

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
    """Row i holds sample i of each task, so that each step trains all tasks.

    Args:
        samples: task -> {"inputs": (n, ...), "targets": (n, ...)}, float32, arrays or tensors; all tasks have as many
            samples, and targets of as many values.
        is_evaluation: whether all points are to be decoded, whatever the collator draws.
    """

    def __init__(self, samples: Mapping[str, Mapping[str, Any]], is_evaluation: bool = False):
        self.is_evaluation = is_evaluation
        self.samples = {
            name: (torch.as_tensor(task["inputs"]), torch.as_tensor(task["targets"]).flatten(1))
            for name, task in samples.items()
        }

    def __len__(self) -> int:
        return len(next(iter(self.samples.values()))[1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {"row_id": index, "is_evaluation": self.is_evaluation}
        for name, (inputs, targets) in self.samples.items():
            row[f"{name}_inputs"] = inputs[index]
            row[f"{name}_targets"] = targets[index]
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


FAR = 0.1  # relative difference from which a file is of another equation than ours


def load_file(path: str, counts: Mapping[str, int], resolution: int) -> tuple[str, dict[str, dict[str, np.ndarray]]]:
    """Reads one file: `tensor` (n, times, points) with `t-coordinate` is advection; `nu` (n, r, r) with `tensor`
    (n, 1, r, r) is Darcy flow.

    A finer grid is brought to the task's: every k-th point of advection, which is periodic, at the four times; means
    over k x k cells of Darcy flow.

    Args:
        counts: split -> samples; the first come first in the file, and the last of `counts` are the file's last.
        resolution: as of the task.

    Returns:
        The task's name, and split -> {"inputs", "targets"}, float32, as `load_task` returns them.

    Raises:
        DataError: no such file, another layout, fewer samples than `counts`, a grid that is no multiple of the task's,
            numbers that are not finite.
        MissingDependencyError: no h5py.

    Cost: reads the samples asked for, and no others.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError(f"--dataset_name {path}: h5py reads it. Run: pip install h5py") from error
    if not Path(path).is_file():
        raise DataError(f"--dataset_name {path}: there is no such file.")
    try:
        with h5py.File(path, "r") as file:
            arrays = {name: file[name] for name in ("tensor", "nu", "t-coordinate") if name in file}
            is_darcy = {"nu", "tensor"} <= arrays.keys() and arrays["nu"].ndim == 3 and arrays["tensor"].ndim == 4
            is_advection = {"t-coordinate", "tensor"} <= arrays.keys() and arrays["tensor"].ndim == 3
            if not (is_darcy or is_advection):
                found = ", ".join(f"{name} {getattr(file[name], 'shape', '')}" for name in file)
                raise DataError(
                    f"{path}: neither PDEBench's 1D_Advection (tensor (n, times, points), t-coordinate) nor its "
                    f"2D_DarcyFlow (nu (n, r, r), tensor (n, 1, r, r)). It holds {found or 'nothing'}."
                )
            num = len(arrays["tensor"])
            needed = sum(counts.values())
            if num < needed:
                asked = ", ".join(f"{size} for {split}" for split, size in counts.items())
                raise DataError(f"{path}: has {num} samples, asked for are {asked}. Give fewer.")
            read = _read_darcy if is_darcy else _read_advection
            samples = {}
            start = 0
            for split, size in counts.items():
                start = num - size if split == [*counts][-1] else start
                samples[split] = read(path, arrays, slice(start, start + size), resolution)
                start += size
    except OSError as error:
        raise DataError(f"{path}: cannot be read as HDF5 ({error}).") from error
    if not all(np.isfinite(values).all() for split in samples.values() for values in split.values()):
        raise DataError(f"{path}: there are values that are NaN or infinite.")
    return ("darcy2d" if is_darcy else "advection1d"), samples


def is_our_equation(task: str, samples: Mapping[str, np.ndarray]) -> bool:
    """Returns whether the first samples are of advection at our speed, or of Darcy flow with a source of 1."""
    first = samples["inputs"][0].astype(np.float64)
    found = samples["targets"][0].astype(np.float64)
    if task == "darcy2d":
        expected = solve_darcy(first)
    else:
        waves = np.fft.rfftfreq(len(first), 1 / len(first))
        expected = np.fft.irfft(np.fft.rfft(first) * np.exp(-2j * np.pi * waves * ADVECTION_SPEED))
        found = found[-1]
    return bool(np.linalg.norm(expected - found) < FAR * np.linalg.norm(found))


def _read_advection(path: str, arrays: Mapping[str, Any], rows: slice, resolution: int) -> dict[str, np.ndarray]:
    times = np.asarray(arrays["t-coordinate"])[: arrays["tensor"].shape[1]]  # has one more than there are states
    asked = np.arange(ADVECTION_TIMES + 1) / ADVECTION_TIMES
    places = np.abs(times[:, None] - asked).argmin(0)
    if np.abs(times[places] - asked).max() > 1e-3:
        raise DataError(f"{path}: needed are states at the times {asked.tolist()}, t-coordinate lacks some of them.")
    step = _step(path, arrays["tensor"].shape[2], num_points(resolution), "points")
    # Time by time: all 201 states of 2,000 samples are 1.6 GB.
    first, *later = (arrays["tensor"][rows, place, ::step].astype(np.float32) for place in places)
    return {"inputs": first, "targets": np.stack(later, axis=1)}


def _read_darcy(path: str, arrays: Mapping[str, Any], rows: slice, resolution: int) -> dict[str, np.ndarray]:
    step = _step(path, arrays["nu"].shape[1], resolution, "cells along a side")

    def read(values: Any) -> np.ndarray:
        values = np.asarray(values, dtype=np.float32)
        return values.reshape(len(values), resolution, step, resolution, step).mean((2, 4))

    return {"inputs": read(arrays["nu"][rows]), "targets": read(arrays["tensor"][rows, 0])}


def _step(path: str, there: int, asked: int, what: str) -> int:
    if there % asked:
        raise DataError(f"{path}: has {there} {what}, which is no multiple of the {asked} of this --resolution.")
    return there // asked

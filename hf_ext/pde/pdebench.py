"""Samples from PDEBench's HDF5 files (arXiv:2210.07182) of advection and Darcy flow, on the grids of our tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..optional import require
from .configuration import ADVECTION_SPEED, ADVECTION_TIMES, num_points
from .data import solve_darcy

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
    h5py = require("h5py", "hdf5", f"--dataset_name {path}")
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
            num, needed = len(arrays["tensor"]), sum(counts.values())
            if num < needed:
                asked = ", ".join(f"{size} for {split}" for split, size in counts.items())
                raise DataError(f"{path}: has {num} samples, asked for are {asked}. Give fewer.")
            read, samples, start = _read_darcy if is_darcy else _read_advection, {}, 0
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
    """Whether the samples are of advection at our speed, or of Darcy flow with a source of 1, which priors take for
    granted; told by the first of them, whose solution is compared."""
    first, found = samples["inputs"][0].astype(np.float64), samples["targets"][0].astype(np.float64)
    if task == "darcy2d":
        expected = solve_darcy(first)
    else:
        waves = np.fft.rfftfreq(len(first), 1 / len(first))
        expected, found = np.fft.irfft(np.fft.rfft(first) * np.exp(-2j * np.pi * waves * ADVECTION_SPEED)), found[-1]
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

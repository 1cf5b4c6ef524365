"""Generated samples of a task: made once, kept in a cache, with the units and the trivial errors measured on them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..data.text_files import irregular_kind
from ..errors import ArgumentError
from .advection import make_advection
from .darcy import make_darcy
from .drawing import check_counts
from .tasks import ADVECTION_SPEED, ADVECTION_TIMES, TASKS, num_points

__all__ = ["ADVECTION_SPEED", "ADVECTION_TIMES", "SPLITS", "TASKS", "baseline_errors", "load_task", "measure_units"]

logger = logging.getLogger(__name__)

FORMAT = 1  # another one where what is generated changes: samples of the old one are then made anew
SPLITS = ("train", "validation", "test")  # the place of a name is part of the seed: append, never reorder
KINDS = ("inputs", "targets")
Samples = dict[str, np.ndarray]


def load_task(
    name: str, split: str, num: int, *, resolution: int, seed: int, cache_dir: str | os.PathLike[str] | None = None
) -> Samples:
    """`num` samples of a task, from the cache if they are there, else generated and put there.

    Sample i is a function of (name, split, resolution, seed, i) alone: more samples begin with the same ones. Several
    processes may ask at once: each generates, writes a file of its own and renames it, and the files are equal. Where
    the cache cannot be written to, a warning says so and the samples are used all the same.

    Args:
        name: one of `TASKS`.
        split: one of `SPLITS`; no two share a sample.
        num: samples, at least 1.
        resolution: r: Darcy flow on r x r cells, advection on r * r / 4 points at 4 times; even.
        seed: from 0 to 2^32 - 1.
        cache_dir: folder of all cached samples, `~` is the home; None: nothing is read or written.

    Returns:
        "inputs" (num, *input_shape) and "targets" (num, *target_shape), float32, see `Task`.

    Raises:
        ArgumentError: no such task or split, an odd resolution, a number below 1, a seed outside of its range, a
            cache in the home of nobody, or a pipe, device or folder in the place of a cached file.

    Cost: on one core, 1,000 samples of Darcy flow take 1 s at 32 x 32 and 9 s at 64 x 64, of advection below 1 s; to
    read them again, some ms.
    """
    _check(name, split, num, resolution)
    stream = SPLITS.index(split)
    if cache_dir is None:
        return _GENERATORS[name](num, resolution, seed, stream)
    key = {"format": FORMAT, "task": name, "split": split, "num": num, "resolution": resolution, "seed": seed}
    identity = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    shapes = (num, *TASKS[name].input_shape(resolution)), (num, *TASKS[name].target_shape(resolution))
    path = _folder(cache_dir) / f"{name}_{split}_{num}x{resolution}_{digest}.safetensors"
    _refuse_irregular(path)
    found = _read(path, identity, shapes)
    if found is None:
        found = _GENERATORS[name](num, resolution, seed, stream)
        _write(path, identity, found)
    return found


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
        kind: np.linalg.norm((predictions[kind] - exact).reshape(len(exact), -1), axis=1) / scale
        for kind in TASKS[name].baselines
    }


def _make_advection(num: int, resolution: int, seed: int, stream: int) -> Samples:
    shape = {"points": num_points(resolution), "times": ADVECTION_TIMES, "beta": ADVECTION_SPEED}
    inputs, targets = make_advection(num, **shape, seed=seed, stream=stream)  # type: ignore[arg-type]
    return {"inputs": inputs, "targets": targets}


def _make_darcy(num: int, resolution: int, seed: int, stream: int) -> Samples:
    coefficients, solutions = make_darcy(num, resolution=resolution, seed=seed, stream=stream)
    return {"inputs": coefficients, "targets": solutions}


_GENERATORS: dict[str, Callable[[int, int, int, int], Samples]] = {
    "advection1d": _make_advection,
    "darcy2d": _make_darcy,
}


def _check(name: str, split: str, num: int, resolution: int) -> None:
    if name not in TASKS:
        raise ArgumentError(f"task={name!r}: allowed are {', '.join(TASKS)}.")
    if split not in SPLITS:
        raise ArgumentError(f"split={split!r}: allowed are {', '.join(SPLITS)}.")
    check_counts(f"Samples of {name}", num=num, resolution=resolution)
    if resolution % 2:
        raise ArgumentError(f"resolution={resolution}: must be even, since advection has a quarter of its square.")


def _folder(cache_dir: str | os.PathLike[str]) -> Path:
    try:
        return Path(cache_dir).expanduser()
    except RuntimeError as error:
        raise ArgumentError(f"data_cache_dir={str(cache_dir)!r}: no such user's home. Name a folder.") from error


def _refuse_irregular(path: Path) -> None:
    """A pipe would be waited for without end, and a folder stays where samples are to be put."""
    try:
        kind = irregular_kind(path)
    except OSError:  # there is none, or reading says what is wrong
        return
    if kind:
        raise ArgumentError(f"{path}: is {kind}, not a regular file. Remove it, or name another data_cache_dir.")


def _read(path: Path, identity: str, shapes: tuple[tuple[int, ...], ...]) -> Samples | None:
    """The samples of a file; None if there is none, or not one that is whole and of these, which is then said."""
    try:
        if not path.exists():
            return None
        with safe_open(path, framework="numpy") as file:
            found = {kind: file.get_tensor(kind) for kind in KINDS}
            is_whole = (file.metadata() or {}).get("sha256") == _digest(identity, found)
            # The hash is of the values' bytes, not of what the file says that they are.
            is_whole = is_whole and all(
                found[kind].dtype == np.float32 and found[kind].shape == shape for kind, shape in zip(KINDS, shapes)
            )
    except (OSError, SafetensorError, ValueError) as error:
        logger.warning("Cached samples %s cannot be read (%s); they are made anew.", path, error)
        return None
    if is_whole:
        return found
    logger.warning("Cached samples %s are damaged; they are made anew.", path)
    return None


def _write(path: Path, identity: str, samples: Samples) -> None:
    """Whole or not at all: under a name of this writer's own, then renamed over what stands there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(save(samples, {"sha256": _digest(identity, samples)}))  # one entry: their order is not fixed
        os.replace(draft, path)
    except OSError as error:
        logger.warning("Samples cannot be kept in %s (%s): the next run makes them anew.", path.parent, error)
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _digest(identity: str, samples: Samples) -> str:
    content = hashlib.sha256(identity.encode())
    for kind in KINDS:
        content.update(np.ascontiguousarray(samples[kind]).data)
    return content.hexdigest()

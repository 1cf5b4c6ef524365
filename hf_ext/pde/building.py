"""From arguments to samples, model, terms of the loss, and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .arguments import OperatorArguments
from .configuration import TASKS, OperatorConfig
from .data import SPLITS, OperatorCollator, OperatorRows, make_task, measure_units
from .model import OperatorTransformer
from .pdebench import is_our_equation, load_file
from .terms import AuxiliaryTerms

Samples = dict[str, dict[str, dict[str, np.ndarray]]]


def load_samples(args: OperatorArguments) -> Samples:
    """split -> task -> {"inputs", "targets"}: read from `dataset_name`, or generated.

    Raises:
        ArgumentError: the files are not those of `tasks`, or of another equation than the physics priors are about.
        DataError: see `load_file`.

    Cost: see `load_file` and `make_task`.
    """
    counts = {"train": args.num_train_samples, "validation": args.num_eval_samples, "test": args.num_eval_samples}
    if args.dataset_name:
        found = [load_file(path, counts, args.resolution) for path in args.dataset_name]
        if sorted(task for task, _ in found) != sorted(args.tasks):
            there = " ".join(task for task, _ in found)
            raise ArgumentError(
                f"--dataset_name holds {there}, --tasks are {' '.join(args.tasks)}: give --tasks {there}."
            )
        for task, samples in found:
            if args.physics_every and not is_our_equation(task, samples["train"]):
                raise ArgumentError(
                    f"--dataset_name: {task} there has another speed or source than the physics priors take for "
                    "granted (0.4 and 1): give --physics_every 0."
                )
        files = dict(found)
        return {split: {task: files[task][split] for task in args.tasks} for split in SPLITS}
    made = {"resolution": args.resolution, "seed": args.samples_seed}
    return {split: {task: make_task(task, split, counts[split], **made) for task in args.tasks} for split in SPLITS}


def describe_samples(samples: Samples, args: OperatorArguments) -> dict[str, Any]:
    """What was read or generated, for the run's record."""
    return {
        "source": ", ".join(args.dataset_name or ["generated"]),
        "sizes": {split: max(len(task["targets"]) for task in tasks.values()) for split, tasks in samples.items()},
        "tasks": {task: TASKS[task].description for task in args.tasks},
        "resolution": args.resolution,
        **({} if args.dataset_name else {"seed": args.samples_seed}),
    }


def build_rows(samples: Samples) -> dict[str, OperatorRows]:
    """Row i of a split is sample i of each task; splits other than train are decoded at all points."""
    return {split: OperatorRows(tasks, is_evaluation=split != "train") for split, tasks in samples.items()}


def build_model(args: OperatorArguments, train: Mapping[str, Mapping[str, np.ndarray]]) -> OperatorTransformer:
    """A new operator with the units of the training samples."""
    return OperatorTransformer(OperatorConfig(**args.shape, **measure_units(train)))  # type: ignore[arg-type]


def build_terms(args: OperatorArguments) -> AuxiliaryTerms:
    """What a row's loss has beside the data."""
    return AuxiliaryTerms(
        inverse_every=args.inverse_loss_every,
        inverse_weight=args.inverse_loss_weight,
        physics_every=args.physics_every,
        physics_weight=args.physics_weight,
    )


def build_collator(args: OperatorArguments, seed: int) -> OperatorCollator:
    """The collator, which draws the points of a step."""
    return OperatorCollator(args.tasks, args.resolution**2, args.queries_per_step, seed)

"""The steps of a run that trains an operator, see `OperatorTask`; samples, model and collator of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.arguments import check_metric_name
from hf_ext.errors import ArgumentError
from hf_ext.evaluation import check_requirements, parse_requirements
from hf_ext.models import require_base
from hf_ext.tasks import Run, check_scored

from .arguments import OperatorArguments
from .configuration import TASKS, OperatorConfig
from .data import SPLITS, OperatorCollator, OperatorRows, is_our_equation, load_file, make_task, measure_units
from .model import OperatorTransformer
from .results import MODEL, ErrorMetrics, format_scores, score_names, score_split, trivial_errors
from .terms import AuxiliaryTerms

Samples = dict[str, dict[str, dict[str, np.ndarray]]]


def load_samples(args: OperatorArguments) -> Samples:
    """Loads split -> task -> {"inputs", "targets"}: read from `dataset_name`, or generated.

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


def build_rows(samples: Samples) -> dict[str, OperatorRows]:
    """Builds rows: row i of a split is sample i of each task; splits other than train are decoded at all points."""
    return {split: OperatorRows(tasks, is_evaluation=split != "train") for split, tasks in samples.items()}


def build_model(args: OperatorArguments, train: Mapping[str, Mapping[str, np.ndarray]]) -> OperatorTransformer:
    """Builds an operator: a new one with the units of the training samples, or that of `init_from`."""
    if args.init_from is None:
        return OperatorTransformer(OperatorConfig(**args.shape, **measure_units(train)))  # type: ignore[arg-type]
    config = OperatorConfig.from_pretrained(args.init_from)
    config.stage = args.stage
    config.task_weights = OperatorConfig(**args.shape).task_weights
    return OperatorTransformer.from_pretrained(args.init_from, config=config)


def check_start(args: OperatorArguments, output_dir: str) -> None:
    """Refuses an `init_from` that is no operator of these tasks and sizes, or whose own run would go on."""
    if args.init_from is None:
        return
    told = f"--init_from {args.init_from}"
    if not (Path(args.init_from) / "config.json").is_file():
        raise ArgumentError(f"{told}: no trained operator is there (no config.json).")
    if Path(args.init_from).resolve() == Path(output_dir).resolve():
        raise ArgumentError(f"{told} is the --output_dir, in which that run would go on: give another --output_dir.")
    trained = OperatorConfig.from_pretrained(args.init_from)
    new = OperatorConfig(**args.shape)
    for name in args.shape.keys() - {"stage", "task_weights"}:
        there = getattr(trained, name)
        if there != getattr(new, name):
            words = " ".join(there) if name == "tasks" else there
            raise ArgumentError(f"{told}: its {name} is {there}, not {getattr(new, name)}: give --{name} {words}.")


def build_terms(args: OperatorArguments) -> AuxiliaryTerms:
    """Builds what a row's loss has beside the data."""
    return AuxiliaryTerms(
        inverse_every=args.inverse_loss_every or 0,
        inverse_weight=args.inverse_loss_weight,
        physics_every=args.physics_every or 0,
        physics_weight=args.physics_weight,
    )


def build_collator(args: OperatorArguments, seed: int) -> OperatorCollator:
    """Builds the collator, which draws the points of a step."""
    return OperatorCollator(args.tasks, args.resolution**2, args.queries_per_step, seed)


@dataclass
class OperatorData:
    """`samples`: split -> task -> arrays. `rows`: the same as Trainer takes them. `report`: for the record."""

    samples: Samples
    rows: dict[str, OperatorRows]
    report: dict[str, Any]


def check(run: Run) -> None:
    """Implements `Task.check`."""
    check_metric_name(run.args.metric_for_best_model, ErrorMetrics(run.model_args.tasks).row_metrics)
    check_start(run.model_args, str(run.args.output_dir))
    if run.args.use_peft:
        require_base(None)
    parse_requirements(run.model_args.require, score_names(run.model_args.tasks))


def load(run: Run) -> OperatorData:
    """Implements `Task.load`."""
    args = run.model_args
    samples = load_samples(args)
    report = {
        "source": ", ".join(args.dataset_name or ["generated"]),
        "sizes": {split: len(next(iter(tasks.values()))["targets"]) for split, tasks in samples.items()},
        "tasks": {task: TASKS[task].description for task in args.tasks},
        "resolution": args.resolution,
        **({} if args.dataset_name else {"seed": args.samples_seed}),
    }
    run.log.info("Data, %s: %s", report["source"], "; ".join(report["tasks"].values()))
    rows = build_rows(samples)
    run.test_dataset = rows["test"]
    return OperatorData(samples, rows, report)


def build(run: Run, data: OperatorData) -> dict[str, Any]:
    """Implements `Task.build`. The model gets the auxiliary terms of its loss."""
    model_args = run.model_args
    model = build_model(model_args, data.samples["train"])
    model.terms = terms = build_terms(model_args)
    metrics = ErrorMetrics(model_args.tasks, model.config.task_weights)
    return {
        "model": model,
        "data_collator": build_collator(model_args, run.args.seed),
        "train_dataset": data.rows["train"],
        "eval_dataset": data.rows["validation"],
        "compute_metrics": metrics,
        "preprocess_logits_for_metrics": metrics.reduce,
        "callbacks": [terms.schedule],
    }


def score(run: Run, trainer: Any, trained: Any, data: OperatorData) -> dict[str, Any]:
    """Scores the test split beside predictions that learn nothing of the input."""
    errors = np.asarray(trainer.predict(data.rows["test"]).predictions, np.float64)
    check_scored(errors, "test")
    trivial = trivial_errors(data.samples["train"], data.samples["test"])
    test = score_split(errors, trivial, run.model_args.tasks, run.args.seed)
    requirements = parse_requirements(run.model_args.require, score_names(run.model_args.tasks))
    required = check_requirements(requirements, {**test["scores"][MODEL], **trained.metrics})
    run.log.info("\nnRMSE on the test samples, none of which was trained on:\n%s", format_scores(test))
    return {"data": data.report, "verdict": test["verdict"], "test": test, "requirements": required}

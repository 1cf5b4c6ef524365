"""The steps of a run that trains an affinity model; see `hf_ext.tasks.Task`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from transformers.trainer_utils import TrainOutput

from ..arguments import LoraArguments
from ..baselines import add_zero_shot
from ..data import LoadedData, check_inputs, make_demo_encoders
from ..errors import ArgumentError
from ..evaluation import MODEL, Requirement, ResamplingGroups, RowMetrics, check_requirements
from ..files import Json
from ..hardware import detect_hardware
from ..heads import (
    AUTO,
    StopIdle,
    calibrate,
    choose_layers,
    describe_ensemble,
    describe_layers,
    find_known_layers,
    fit_ensemble,
    fit_intervals,
    may_stop,
    resolve_head,
    resolve_likelihood,
    score_intervals,
    score_spread,
    set_wild_type,
    why_last,
)
from ..labels import LabelKind
from ..models import AUTO_LAYER, LIKELIHOOD, balanced_weights
from ..speedups import lora_settings
from ..startup import phase
from ..tasks import Run, stock_arguments, with_absolute_path
from ..trainer import FastTrainer
from .building import (
    build_collator,
    build_model,
    fill_in_demo,
    resolve_encoders,
    resolve_residue_steps,
    resolve_training,
)
from .distilling import compare_with_teacher, teach
from .measure import check_measure, describe_measure, resolve_measure
from .predictor import predicting
from .repeats import check as check_repeats
from .repeats import refuse_alone, save_held
from .results import collect_results
from .rows import bind_vectors, describe_rows, find_groups, held_out_values, load_rows
from .scoring import read_requirements, score_split


@dataclasses.dataclass
class AffinityData:
    """Rows, and what is known of them before a model is built.

    Attributes:
        loaded: the splits, and what loading reports.
        groups, validation_groups: what was held out together in test and validation; None: rows.
        requirements: that the test scores must meet.
        ensemble: what `train` leaves for the record of heads that were mixed; None where there is a single network.
    """

    loaded: LoadedData
    groups: ResamplingGroups | None
    validation_groups: ResamplingGroups | None
    requirements: Sequence[Requirement]
    ensemble: Json | None = None

    @property
    def splits(self) -> Any:
        """train, validation and test."""
        return self.loaded.splits


def check(run: Run) -> None:
    """Implements `Task.check`."""
    if not run.model_args.distill_from and (
        lone := {"unlabelled", "distill_weight", "distill_temperature"} & run.explicit
    ):
        raise ArgumentError(f"--{min(lone)} is for a student: give --distill_from, too, or leave it out.")
    if resolved := resolve_likelihood(run.model_args, run.args, run.data_args):
        run.log.info(resolved)
    check_repeats(run.model_args, run.data_args, run.args)
    if "focal_gamma" in run.explicit and run.model_args.loss != "focal":
        raise ArgumentError("--focal_gamma is of one loss: give --loss focal, too, or leave it out.")
    resolve_training(run.model_args, run.args.use_peft)
    if run.model_args.stock_trainer:
        run.explicit -= {spec.name for spec in dataclasses.fields(LoraArguments)}  # whose adapters the model brings
        stock_arguments(run.args, run.explicit)


def evaluated(run: Run, kind: LabelKind) -> RowMetrics:
    """Returns what every evaluation computes."""
    return RowMetrics(run.model_args.binder_threshold, run.data_args.group_column, kind)


def load(run: Run) -> AffinityData:
    """Implements `Task.load`."""
    model_args = run.model_args
    data_args = run.data_args
    args = run.args
    table = None
    refuse_alone(run)
    if data_args.dataset_name is None:
        run.log.info("No --dataset_name: generated demo data and two small untrained encoders.")
        with args.main_process_first(desc="demo encoders"):
            encoders = make_demo_encoders(run.folder / "demo_encoders")
        table = fill_in_demo(model_args, data_args, encoders)
    seed = run.shared.get("seed", args.seed)
    loaded = load_rows(model_args, data_args, output_dir=args.output_dir, seed=seed, table=table)
    splits = loaded.splits
    kind = loaded.kind
    run.test_dataset = splits["test"]
    resolve_measure(args, model_args.measured_loss, kind)
    check_measure(args, model_args.loss, evaluated(run, kind), splits["validation"])
    num_rows = None if data_args.streaming else len(splits["train"])
    if fewer := resolve_residue_steps(args, kind, num_rows, model_args.trains_encoders):
        run.log.info(fewer)
    requirements = read_requirements(model_args, data_args, kind)
    groups = find_groups(data_args, splits)
    validation_groups = find_groups(data_args, splits, "validation")
    if chosen := resolve_encoders(model_args, args, detect_hardware(args.device)):
        run.log.info(chosen)
    model_args.tower_training, args.use_peft = resolve_training(model_args, args.use_peft)
    return AffinityData(loaded, groups, validation_groups, [] if run.shared else requirements)  # of all runs


def build(run: Run, data: AffinityData) -> dict[str, Any]:
    """Implements `Task.build`."""
    model_args = run.model_args
    data_args = run.data_args
    args = run.args
    kind = data.loaded.kind
    train_rows = teach(run, data.loaded)
    if single := resolve_head(model_args, args, run.explicit, data_args.streaming, kind):
        run.log.info(single)
    known = find_known_layers(model_args, args, run.explicit)
    layers = [spec.get("layer") for spec in known.get("encoders", ())]
    numbers = data.loaded.numbers.state()
    model = build_model(model_args, data_args.sequence_columns, lora_settings(args), kind, layers, numbers)
    model.config.layer_choice = known.get("layer_choice")
    bind_vectors(model, model_args.embeddings, data.splits, data_args)
    if model_args.class_weights:
        weights = balanced_weights(kind, kind.facts_of(data.splits["train"]))
        model.config.class_weights = weights
        run.log.info(f"Class weights: {np.min(weights):.3g} to {np.max(weights):.3g}, balanced over training labels.")
    collator = build_collator(model, data_args, model_args.max_length)
    if model_args.objective == LIKELIHOOD:
        set_wild_type(model, collator, data.loaded.report["variants"].get("wild_type", ""))
    collator.variants = add_zero_shot(data.loaded.variants, model.config, data.splits["train"], args.device)
    rows = {**data.splits, "train": train_rows}
    data.loaded.report["inputs"] = check_inputs(collator, rows, data_args.dataset_name)
    run.log.info(describe_rows(data.loaded))
    if model_args.layer == AUTO_LAYER and not known:
        if reason := why_last(model_args, args, data_args.streaming, kind):
            run.log.info(f"Layer: the last of each encoder; --layer auto compares none: {reason}.")
        else:
            together = held_out_values(data_args, data.splits)
            choose_layers(model, collator, data.splits, together, args, run.shared.get("layers"))
    if model_args.layer_number:
        run.log.info(f"Layer: {model_args.layer_number} of each encoder, as --layer asks; those above are not run.")
    if model.config.layer_choice:
        run.log.info("\n".join(describe_layers(model.config.layer_choice)))
    run.log.info(describe_measure(args, model_args.loss, evaluated(run, kind)))
    if model_args.stock_trainer:
        with beside_stock(run, model, collator) as scaler:  # what FastTrainer does before the first step
            scaler.train_dataset = data.splits["train"]
            scaler.fit_scaling()
    return {
        "model": model,
        "data_collator": collator,
        "train_dataset": train_rows,
        "eval_dataset": data.splits["validation"],
        "compute_metrics": evaluated(run, kind),
        "callbacks": [StopIdle(model_args.head == AUTO)] if may_stop(model_args, run.explicit) else [],
    }


def beside_stock(run: Run, model: Any, collator: Any) -> AbstractContextManager[FastTrainer]:
    """Makes a trainer without speed-ups, for what stock Trainer lacks: embeddings, for scales and baselines."""
    args = copy.copy(run.args)
    args.speedups = []
    args.eval_strategy = "no"
    args.load_best_model_at_end = args.push_to_hub = False
    return predicting(model, collator, args)


def train(run: Run, trainer: FastTrainer, data: AffinityData) -> Any:
    """Trains the network, then fits what is fitted on its embeddings and outputs: heads, probabilities, intervals."""
    trained = trainer.train(resume_from_checkpoint=run.args.resume_from_checkpoint)
    mixed: dict[str, Any] = {}
    if run.model_args.stock_trainer:
        trainer.data_collator.save_pretrained(run.folder)
    if run.model_args.head == AUTO:
        together = held_out_values(run.data_args, data.splits)
        with phase("heads"):
            fitted = fit_ensemble(trainer, data.splits, together, adopts=may_stop(run.model_args, run.explicit))
        data.ensemble = fitted.facts
        mixed = {"predicted": fitted.predicted, "stds": fitted.stds}
        run.log.info(describe_ensemble(fitted.facts))
    with phase("intervals"):
        calibrate(trainer, data.splits["validation"])
        fit_intervals(trainer, data.splits["validation"], data.validation_groups, **mixed)
    return trained


def score(run: Run, trainer: FastTrainer, trained: TrainOutput, data: AffinityData) -> Json:
    """Scores the test split, if there is one; writes `predictions.csv`."""
    splits = data.splits
    if run.data_args.fold and run.data_args.fold.tested is None:
        return {"data": with_absolute_path(data.loaded.report, "source"), "label_kind": data.loaded.kind.stored}
    groups = data.groups
    scored = {
        "threshold": run.model_args.binder_threshold,
        "group_column": run.data_args.group_column,
        "groups": groups,
    }
    is_stock = run.model_args.stock_trainer
    with beside_stock(run, trainer.model, trainer.data_collator) if is_stock else nullcontext(trainer) as scorer:
        test = score_split(scorer, splits, "test", **scored, leaks=data.loaded.report.get("leaks"))
    intervals = None
    spread = None
    if not test.kind.why_no_intervals:
        stored = trainer.model.config.prediction_intervals
        intervals = score_intervals(stored, test.outputs, test.labels, splits["test"], groups, test.stds)
        test.notes.extend(intervals["notes"])
    if test.stds is not None:
        spread = score_spread(test.stds, test.labels - test.outputs, splits["test"])
        test.notes.extend(spread["notes"])
    records = {
        "layer": trainer.model.config.layer_choice,
        "ensemble": data.ensemble,
        "distillation": run.model_args.distill_from and compare_with_teacher(run, test, splits["test"]),
        "prediction_intervals": intervals,
        "prediction_spread": spread,
        "requirements": check_requirements(data.requirements, {**test.scores[MODEL], **trained.metrics}) or None,
    }
    results = collect_results(run, trainer, test, data.loaded, records)
    run.log.info("\n%s\n", test.table())
    run.log.info("\n".join(results["advice"]))
    if run.shared and trainer.is_world_process_zero():
        save_held(run.folder, splits["test"], test)
    return results

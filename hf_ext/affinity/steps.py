"""The steps of a run that trains an affinity model; see `hf_ext.tasks.Task`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from ..data.demo import make_demo_encoders
from ..data.loading import LoadedData
from ..data.tokenization import check_inputs
from ..evaluation.requirements import Requirement, check_requirements
from ..evaluation.resampling import ResamplingUnits
from ..evaluation.row_metrics import RowMetrics
from ..evaluation.verdict import MODEL
from ..hardware import detect_hardware
from ..speedups.lora import lora_settings
from ..tasks.running import Run
from .building import build_collator, build_model, fill_in_demo, settle_encoders, settle_training
from .ensemble import AUTO, describe_ensemble, fit_ensemble, settle_head
from .intervals import fit_intervals, score_intervals
from .measure import check_measure, describe_measure, settle_measure
from .results import collect_results
from .rows import describe_rows, find_units, held_out_values, load_rows
from .scoring import read_requirements, score_split

DEMO_THRESHOLD = 9.0  # pKd of the generated table


@dataclass
class AffinityData:
    """Rows, and what is known of them before a model is built.

    Attributes:
        loaded: the splits, and what loading reports.
        units, validation_units: what was held out together in test and validation; None: rows.
        requirements: that the test scores must meet.
    """

    loaded: LoadedData
    units: ResamplingUnits | None
    validation_units: ResamplingUnits | None
    requirements: Sequence[Requirement]

    @property
    def splits(self) -> Any:
        """train, validation and test."""
        return self.loaded.splits


@dataclass
class TrainedModel:
    """What training left beside the weights.

    Attributes:
        trained: what `trainer.train` returned.
        ensemble: for the record; None where there is a single network.
    """

    trained: Any
    ensemble: dict[str, Any] | None

    @property
    def metrics(self) -> dict[str, Any]:
        """Of training."""
        return self.trained.metrics


def check(run: Run) -> None:
    """See `Task.check`."""
    if run.data_args.dataset_name is None and "binder_threshold" not in run.explicit:
        run.model_args.binder_threshold = DEMO_THRESHOLD
    settle_measure(run.args, run.model_args.loss)
    check_measure(run.args, run.model_args.loss, evaluated(run))
    read_requirements(run.model_args, run.data_args)


def evaluated(run: Run) -> RowMetrics:
    """What every evaluation computes."""
    return RowMetrics(run.model_args.binder_threshold, run.data_args.group_column)


def load(run: Run) -> AffinityData:
    """See `Task.load`."""
    model_args, data_args, args = run.model_args, run.data_args, run.args
    table = _use_demo(run) if data_args.dataset_name is None else None
    loaded = load_rows(model_args, data_args, output_dir=args.output_dir, seed=args.seed, table=table)
    splits = loaded.splits
    check_measure(args, model_args.loss, evaluated(run), splits["validation"])
    requirements = read_requirements(model_args, data_args)  # recall may be left out now
    units = find_units(data_args, splits)
    validation_units = find_units(data_args, splits, "validation")
    if chosen := settle_encoders(model_args, args, detect_hardware(args.device)):
        run.log.info(chosen)
    model_args.tower_training, args.use_peft = settle_training(model_args, args.use_peft)
    return AffinityData(loaded, units, validation_units, requirements)


def _use_demo(run: Run) -> Dataset:
    """Generates a table and two encoders, and makes the arguments name them."""
    run.log.info("No --dataset_name: generated demo data and two small untrained encoders.")
    with run.args.main_process_first(desc="demo encoders"):
        encoders = make_demo_encoders(run.folder / "demo_encoders")
    return fill_in_demo(run.model_args, run.data_args, encoders)


def build(run: Run, data: AffinityData) -> dict[str, Any]:
    """See `Task.build`."""
    model_args, data_args, args = run.model_args, run.data_args, run.args
    if single := settle_head(model_args, args, run.explicit, data_args.streaming):
        run.log.info(single)
    model = build_model(model_args, data_args.sequence_columns, lora_settings(args))
    collator = build_collator(model, data_args, model_args.max_length)
    data.loaded.report["inputs"] = check_inputs(collator, data.splits, data_args.dataset_name)
    run.log.info(describe_rows(data.loaded))
    run.log.info(describe_measure(args, model_args.loss, evaluated(run)))
    return {
        "model": model,
        "data_collator": collator,
        "train_dataset": data.splits["train"],
        "eval_dataset": data.splits["validation"],
        "compute_metrics": evaluated(run),
    }


def train(run: Run, trainer: Any, data: AffinityData) -> TrainedModel:
    """Trains the network, then fits what is fitted on its embeddings: an ensemble of heads, and intervals."""
    trained = trainer.train(resume_from_checkpoint=run.args.resume_from_checkpoint)
    facts = predicted = None
    if run.model_args.head == AUTO:
        fitted = fit_ensemble(trainer, data.splits, held_out_values(run.data_args, data.splits))
        facts, predicted = fitted.facts, fitted.predicted
        run.log.info(describe_ensemble(facts))
    fit_intervals(trainer, data.splits["validation"], data.validation_units, predicted)
    return TrainedModel(trained, facts)


def score(run: Run, trainer: Any, trained: TrainedModel, data: AffinityData) -> dict[str, Any]:
    """Scores the test split; writes `predictions.csv`."""
    splits, units = data.splits, data.units
    scored = {"threshold": run.model_args.binder_threshold, "group_column": run.data_args.group_column, "units": units}
    test = score_split(trainer, splits, "test", **scored, leaks=data.loaded.report.get("leaks"))
    stored = trainer.model.config.prediction_intervals
    intervals = score_intervals(stored, test.predictions, test.labels, splits["test"], units)
    test.notes.extend(intervals["notes"])
    records = {
        "ensemble": trained.ensemble,
        "prediction_intervals": intervals,
        "requirements": check_requirements(data.requirements, test.scores[MODEL]) or None,
    }
    results = collect_results(run, trainer, test, data.loaded, records)
    run.log.info("\n%s\n", test.table())
    run.log.info("\n".join(results["advice"]))
    return results

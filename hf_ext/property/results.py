"""What a run leaves behind: scores, predictions, plots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data import SOURCE_ROW, LoadedData, read_bounds
from ..evaluation import CONSTANTS, metrics_of
from ..files import Facts, Json
from ..labels import LABEL, PREDICTION, Columns
from ..models import LIKELIHOOD, AffinityConfig
from ..reporting import confusion_chart, is_drawn, plot_scatter, write_png
from ..tasks import Run, plots_if_possible, with_absolute_path
from .prediction_file import std_column, write_predictions
from .scoring import SplitScores

if TYPE_CHECKING:
    from ..trainer import FastTrainer

PREDICTIONS = "predictions.csv"  # of a run's test rows, in its folder
BASELINES = "baselines"  # a folder beside it, with the predictions of each baseline for the same rows
HINTS = {  # what was found -> what to do next
    "better, frozen": "Next: --use_peft --init_head_from {folder} fine-tunes the encoders, from this head; `hf-ext "
    "compare --sides frozen lora --`, with the flags of this run, shows whether that pays.",
    "tuned": "Fine-tuning was not shown to pay: {tuned} Next: `hf-ext compare --sides frozen {training} --`, with the "
    "other flags of this run, compares both on one split.",
    "better, random split": "Next: --split cluster tests on sequences unlike those of training.",
    "better, random variants": "Next: --split position tests on positions that no training row changes, --split "
    "mutations on rows with more substitutions than those of training.",
    "undecided": "Next: more test rows than these {num_rows:,} decide{sizes}.",
    "constant": "Next: look at the data and the training before the model: the alarms about labels, their unit and "
    "sign; whether --sequence_columns hold what they depend on, and a baseline does better than the training mean; the "
    "loss curves in report.html. If encoders trained: --tower_training frozen is quick, and shows whether that is it.",
    "baseline": "Next: {baseline} does as well or better: use that, add rows, or look for what these embeddings lack "
    "with another of --encoders{or_pooling}.",
}


def make_advice(report: Facts, settings: Facts, folder: Path, test: SplitScores) -> list[str]:
    """Says what to try next, of `HINTS`: fine-tuning and a harder split for a model that is worth something.

    Args:
        report: what loading the data reported.
        settings: model arguments by name.
        folder: of the run, whose head fine-tuning would start from.
        test: scores of the test split.
    """
    verdict = test.verdict
    rule = report["split"]["rule"]
    if verdict.outcome == "better":
        is_frozen = set(settings["tower_training"]) == {"frozen"} and not settings.get("embeddings")
        found = ["better, frozen"] if is_frozen else []
        harder = "better, random variants" if report.get("variants") else "better, random split"
        found += [harder] if rule == "random" and not report.get("streaming") else []
    elif verdict.outcome in ("undecided", "undefined"):
        found = ["undecided"]
    else:
        found = ["constant" if verdict.baseline in (None, *CONSTANTS) else "baseline"]
    if test.tuned is not None and not test.tuned.is_better:
        found = ["tuned", *found]
    training = next((how for how in settings["tower_training"] if how != "frozen"), "lora")
    if settings.get("objective") == LIKELIHOOD:
        training = LIKELIHOOD
    facts = {
        "folder": folder,
        "num_rows": verdict.num_rows,
        "baseline": verdict.baseline,
        "training": training,
        "sizes": "" if rule.startswith(("files", "column:")) else " (--split_sizes 0.6 0.1 0.3, say)",
        "or_pooling": test.kind.or_pooling,
        "tuned": test.tuned and test.tuned.text,
    }
    return [HINTS[name].format_map(facts) for name in found]


def collect_results(run: Run, trainer: FastTrainer, test: SplitScores, data: LoadedData, records: Facts) -> Json:
    """Collects what `all_results.json` says of the task; writes predictions and a plot into the output folder.

    Args:
        trainer: after training.
        test: scores of the test split.
        data: the rows, and what loading reported.
        records: JSON-able, by name, what was chosen or fitted beside the weights; None is left out.
    """
    scores = test.to_dict()
    splits = data.splits
    settings = {**vars(run.model_args), **vars(run.data_args)}
    kind = test.kind
    facts = {
        "verdict": scores["verdict"],
        "label_kind": kind.stored,
        "model": _describe_model(trainer.model.config),
        **{name: record for name, record in records.items() if record is not None},
        "test": scores,
        "data": with_absolute_path(data.report, "source"),
        "labels": {
            name: metrics_of(data.kind).audit(splits[name], read_bounds(splits[name]))
            for name in ("train", "test")
            if hasattr(splits[name], "__len__")
        },
        "advice": make_advice(data.report, settings, run.folder, test),
    }
    if trainer.is_world_process_zero():
        predictions = kind.read_outputs(test.outputs)
        write_test_files(run.folder, run.data_args.label_column, test, splits["test"], predictions)
    return facts


def write_test_files(
    folder: Path, label_columns: Sequence[str], test: SplitScores, rows: Any, predictions: Any
) -> None:
    """Writes predictions of the model and of baselines for test rows, and a picture, into an output folder.

    Args:
        rows: that were scored. predictions: as `LabelKind.prediction_columns` takes them.
    """
    kind = test.kind
    predicted = {**kind.prediction_columns(predictions), **std_column(test.stds)}
    measured = kind.label_columns(test.labels, predictions)
    write_predictions(folder / PREDICTIONS, [(rows, {**measured, **predicted}, None)])
    if hasattr(rows, "__len__"):
        (folder / BASELINES).mkdir(exist_ok=True)
        numbers = rows.select_columns([SOURCE_ROW])
        for name, values in test.predicted_by.items():
            write_predictions(baseline_file(folder, name), [(numbers, kind.prediction_columns(values), None)])
    with plots_if_possible():
        _plot(folder, ", ".join(label_columns), test, predicted, measured)


def _plot(folder: Path, label: str, test: SplitScores, predicted: Columns, measured: Columns) -> None:
    """Draws what was measured against what was predicted, of numbers and of few classes."""
    if test.kind.chart == "scatter":
        rho = test.scores["model"]["spearman"]["value"]
        text = "Spearman undefined" if rho is None else f"Spearman {rho:.3f}"
        plot_scatter(test.outputs, test.labels, folder / "scatter.png", "Test set", text, axis_label=label)
    elif is_drawn(test.kind):
        chart = confusion_chart([*measured[LABEL]], [*predicted[PREDICTION]], test.kind.names)
        write_png(chart.figure, folder / "confusion.png")


def baseline_file(folder: Path, name: str) -> Path:
    """Finds the predictions of a baseline for the test rows of the run in `folder`, as `hf-ext evaluate` reads them."""
    return folder / BASELINES / f"{re.sub(r'[^A-Za-z0-9-]+', '_', name)}.csv"


def _describe_model(config: AffinityConfig) -> Json:
    """Describes towers and loss."""
    towers = []
    vectors = [spec.config["hidden_size"] for spec in config.encoder_specs if config.reads_vectors]
    for tower in () if vectors else config.tower_specs:
        encoder = config.encoder_specs[tower.encoder]
        named = {"encoder": encoder.name_or_path, "revision": encoder.revision, "training": encoder.training}
        towers.append({**named, "layer": encoder.layer, "pooling": tower.pooling, "inputs": tower.inputs})
    head = {"head_form": config.head_form, "head_sizes": config.head_sizes}
    return {"towers": towers, "vectors": vectors, **head, "loss": config.loss}

"""What a run leaves behind: scores, predictions, plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.loading import LoadedData
from ..evaluation.verdict import CONSTANT
from ..models.configuration import AffinityConfig
from ..reporting.charts import plot_scatter
from ..tasks.running import Run, plots_if_possible, with_absolute_path
from .prediction_file import write_predictions
from .rows import audit_labels
from .scoring import SplitScores

PREDICTIONS = "predictions.csv"  # of a run's test rows, in its folder
HINTS = {  # what was found -> what to do next
    "better, frozen": "Next: --use_peft --init_head_from {folder} fine-tunes the encoders, from this head.",
    "better, random split": "Next: --split cluster tests on sequences unlike those of training.",
    "undecided": "Next: more test rows than these {num_rows:,} decide (--split_sizes 0.6 0.1 0.3, say).",
    "constant": "Next: look at the data and the training before the model: the alarms about labels, their unit and "
    "sign; whether --sequence_columns hold what they depend on, and a baseline does better than the training mean; the "
    "loss curves in report.html. If encoders trained: --tower_training frozen is quick, and shows whether that is it.",
    "baseline": "Next: {baseline} does as well: use that, add rows, or look for what these embeddings lack with "
    "another of --encoders or --pooling.",
}


def make_advice(report: Mapping[str, Any], settings: Mapping[str, Any], folder: Path, test: SplitScores) -> list[str]:
    """What to try next, of `HINTS`: fine-tuning and a harder split for a model that was shown to be worth something.

    Args:
        report: what loading the data reported.
        settings: model and data arguments by name.
        folder: of the run, whose head fine-tuning would start from.
        test: scores of the test split.
    """
    verdict = test.verdict
    if verdict.outcome == "better":
        is_random = not settings["split_column"] and settings["split"] in (None, "random")
        is_frozen = set(settings["tower_training"]) == {"frozen"}
        found = ["better, frozen"] if is_frozen else []
        found += ["better, random split"] if is_random and not report.get("streaming") else []
    elif verdict.outcome in ("undecided", "undefined"):
        found = ["undecided"]
    else:
        found = ["constant" if verdict.baseline in (None, CONSTANT) else "baseline"]
    facts = {"folder": folder, "num_rows": verdict.num_rows, "baseline": verdict.baseline}
    return [HINTS[name].format_map(facts) for name in found]


def collect_results(
    run: Run,
    trainer: Any,
    test: SplitScores,
    data: LoadedData,
    records: Mapping[str, Any],
) -> dict[str, Any]:
    """What `all_results.json` says of the task; writes `predictions.csv` and `scatter.png` into the output folder.

    Args:
        trainer: after training.
        test: scores of the test split.
        data: the rows, and what loading reported.
        records: JSON-able, by name, what was chosen or fitted beside the weights; None is left out.
    """
    scores, splits, settings = test.to_dict(), data.splits, {**vars(run.model_args), **vars(run.data_args)}
    facts = {
        "verdict": scores["verdict"],
        "model": _describe_model(trainer.model.config),
        **{name: record for name, record in records.items() if record is not None},
        "test": scores,
        "data": with_absolute_path(data.report, "source"),
        "labels": {name: audit_labels(splits[name]) for name in ("train", "test") if hasattr(splits[name], "__len__")},
        "advice": make_advice(data.report, settings, run.folder, test),
    }
    if trainer.is_world_process_zero():
        write_predictions(run.folder / PREDICTIONS, splits["test"], test.predictions, test.labels)
        rho = test.scores["model"]["spearman"]["value"]
        text = "Spearman undefined" if rho is None else f"Spearman {rho:.3f}"
        with plots_if_possible():
            label = settings["label_column"]
            plot_scatter(test.predictions, test.labels, run.folder / "scatter.png", "Test set", text, axis_label=label)
    return facts


def _describe_model(config: AffinityConfig) -> dict[str, Any]:
    """Towers and loss."""
    towers = []
    for tower in config.tower_specs:
        encoder = config.encoder_specs[tower.encoder]
        named = {"encoder": encoder.name_or_path, "revision": encoder.revision, "training": encoder.training}
        towers.append({**named, "pooling": tower.pooling, "inputs": tower.inputs})
    return {"towers": towers, "head_sizes": config.head_sizes, "loss": config.loss}

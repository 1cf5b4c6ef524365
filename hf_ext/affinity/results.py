"""What a run leaves behind: scores, predictions, plots."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments.parser import FastArgumentParser
from ..data.columns import column_names
from ..data.reading import SOURCE_ROW
from ..evaluation import label_audit
from ..files import replacing, write_cell
from ..models.configuration import AffinityConfig
from ..reporting.plots import plot_loss, plot_scatter
from ..reporting.run_record import record_evaluations, record_run, write_json
from ..running import plots_if_possible, with_absolute_path
from .advice import make_advice
from .ensemble import SeedScores
from .prediction_file import HIGH, LOW, PREDICTION, SPREAD
from .scoring import SplitScores

PREDICTIONS = "predictions.csv"  # of a run's test rows, in its folder
BOUND_SIGNS = ("<=", "", ">=")  # where the true value lies, as seen from the label


def save_results(
    trainer: Any,
    trained: Any,
    test: SplitScores,
    splits: Mapping[str, Any],
    data_report: dict[str, Any],
    settings: dict[str, Any],
    parser: FastArgumentParser,
    records: Mapping[str, Any] | None = None,
    seeds: SeedScores | None = None,
    distillation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes `all_results.json`, `predictions.csv`, `loss.png` and `scatter.png` into the output folder.

    Args:
        trainer, trained: after training, and what `train` returned.
        test: scores of the test split.
        splits: the rows of train and test.
        data_report: what loading reported.
        settings: model and data arguments by name; training arguments come from the trainer, as the plan left them.
        parser: after parsing; it knows the command line and where each argument came from.
        records: JSON-able, by name, what was chosen or fitted beside the weights; None is left out.
        seeds: of several heads, from `score_seeds`.
        distillation: of a student, from `compare_with_teacher`.

    Returns:
        What `all_results.json` holds.
    """
    folder = Path(trainer.args.output_dir)
    record = record_run(trainer, trained, settings, parser.origins, parser.arguments)
    scores = test.to_dict()
    results = {
        **record,
        "task": "affinity",
        "verdict": scores["verdict"],
        "model": {**record["model"], **_describe_model(trainer.model.config)},
        **record_evaluations(trainer),
        **(_first_of(seeds) if seeds else {}),
        **{name: record for name, record in (records or {}).items() if record is not None},
        "test": scores,
        "labels": {name: audit_labels(splits[name]) for name in ("train", "test") if hasattr(splits[name], "__len__")},
        "data": with_absolute_path(data_report, "source"),
        **({"seeds": seeds.facts} if seeds else {}),
        **({"distillation": with_absolute_path(distillation, "teacher")} if distillation else {}),
        "advice": make_advice(data_report, settings, folder / f"seed-{trainer.args.seed}" if seeds else folder, test),
    }
    if trainer.is_world_process_zero():
        write_json(folder / "all_results.json", results)
        spread = seeds.std if seeds else None
        write_predictions(folder / PREDICTIONS, splits["test"], test.predictions, test.labels, spread)
        _plot(trainer.state.log_history, test, folder, settings["label_column"])
    return results


def _describe_model(config: AffinityConfig) -> dict[str, Any]:
    """Towers and loss."""
    encoders = config.encoder_specs
    towers = [(encoders[tower.encoder], tower) for tower in config.tower_specs]
    return {
        "towers": [
            {
                "encoder": encoder.name_or_path,
                "revision": encoder.revision,
                "training": encoder.training,
                "pooling": tower.pooling,
                "inputs": tower.inputs,
            }
            for encoder, tower in towers
        ],
        "head_sizes": config.head_sizes,
        "loss": config.loss,
    }


def _first_of(seeds: SeedScores) -> dict[str, Any]:
    """As the log: of the first head, since the trainer of all heads evaluated nothing."""
    return {name: seeds.facts["runs"][0][name] for name in ("evaluation", "early_stopping")}


def audit_labels(rows: Any) -> dict[str, Any]:
    """`label_audit` of the rows of a split that is no stream."""
    return label_audit(rows["label"][:], rows["bound"][:] if "bound" in rows.column_names else None)


def _plot(log_history: list[dict[str, Any]], test: SplitScores, folder: Path, label: str) -> None:
    score = test.scores["model"]["spearman"]["value"]
    text = "Spearman undefined" if score is None else f"Spearman {score:.3f}"
    with plots_if_possible():
        plot_scatter(test.predictions, test.labels, folder / "scatter.png", "Test set", text, axis_label=label)
        plot_loss(log_history, folder / "loss.png")


def write_predictions(
    path: Path,
    rows: Any,
    predictions: Any,
    labels: Any = None,
    spread: Any = None,
    as_read: Any = None,
    half_width: float | None = None,
) -> None:
    """One line per row: its file row and identifying columns, the label where there is one, prediction and spread.

    Of rows with bounds, the column `bound` says `<=` or `>=` where the truth is at or below, or above, the label.

    With `half_width`, both ends of an interval stand beside the prediction.

    With `as_read`, the same rows as their source has them, its columns take the place of the identifying ones. Text
    that a spreadsheet would take for a formula has a `'` in front (`csv_cells`); `source_row` joins without it.
    """
    kept = {name: rows for name in column_names(rows) if name != "label"} if hasattr(rows, "__len__") else {}
    if as_read is not None:
        kept = {**dict.fromkeys(as_read.column_names, as_read), SOURCE_ROW: rows}
    columns: list[Any] = [map(write_cell, source[name][:]) for name, source in kept.items()]
    if "bound" in kept and as_read is None:
        columns[[*kept].index("bound")] = [BOUND_SIGNS[side + 1] for side in rows["bound"][:]]
    header = [*map(write_cell, kept), *([] if labels is None else ["label"]), PREDICTION]
    values = [*columns, *([] if labels is None else [labels]), predictions]
    if half_width is not None:
        centre, reach = np.asarray(predictions, np.float32), np.float32(half_width)
        header, values = [*header, LOW, HIGH], [*values, centre - reach, centre + reach]
    if spread is not None:
        header, values = [*header, SPREAD], [*values, spread]
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(zip(*values))

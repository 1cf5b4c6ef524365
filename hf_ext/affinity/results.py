"""What a run leaves behind: scores, predictions, plots, and what to try next."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

from ..data.columns import column_names
from ..errors import DataError
from ..reporting.plots import plot_loss, plot_scatter
from .scoring import SplitScores

logger = logging.getLogger(__name__)


def summarize_data(report: dict[str, Any]) -> str:
    """A data report in a few lines: rows, changes, split sizes, leaks, inputs."""
    if report.get("streaming"):
        return "Data: streaming, so rows are not counted and leaks between splits are not looked for."
    lines = [
        f"Data: {report['rows_read']:,} rows read, {report['rows_filtered_out']:,} filtered out, "
        f"{report['rows_rejected']:,} rejected; " + ", ".join(f"{n} {size:,}" for n, size in report["sizes"].items())
    ]
    leaks = report.get("leaks") or {"columns": {}}
    rows = {**leaks["columns"], **({"whole row": leaks["row"]} if len(leaks["columns"]) > 1 else {})}
    lines += [f"  test sequences in train too, {name}: {_leak_text(leak)}" for name, leak in rows.items()]
    for name, facts in report.get("inputs", {}).items():
        cut = f", {facts['num_above_limit']} above the encoder's limit" if facts["num_above_limit"] else ""
        lines.append(f"  input {name}: longest {facts['longest']} residues{cut}, {facts['unknown_share']:.2%} unknown")
    return "\n".join(lines)


def _leak_text(leak: dict[str, Any]) -> str:
    text = f"{leak['num_test_sequences_in_train']:,} of {leak['num_test_sequences']:,}"
    if leak["num_checked"]:
        text += f"; near-duplicates of train among {leak['num_checked']:,} others: {leak['num_near_duplicates']:,}"
    return text


def save_results(
    trainer: Any,
    trained: Any,
    test: SplitScores,
    test_rows: Any,
    data_report: dict[str, Any],
    settings: dict[str, Any],
    origins: dict[str, str],
) -> dict[str, Any]:
    """Writes `all_results.json`, `predictions.csv`, `loss.png` and `scatter.png` into the output folder.

    Args:
        trainer, trained: after training, and what `train` returned.
        test, test_rows: scores of the test split, and its rows.
        data_report: what loading reported.
        settings: model and data arguments by name; training arguments come from the trainer, as the plan left them.
        origins: where each argument came from, as `FastArgumentParser` recorded.

    Returns:
        What `all_results.json` holds, plus `advice`.
    """
    folder = Path(trainer.args.output_dir)
    advice = make_advice(test, data_report, settings, folder)
    results = {
        "train": trained.metrics,
        "best": {"step": trainer.state.best_global_step, trainer.args.metric_for_best_model: trainer.state.best_metric},
        "test": test.to_dict(),
        "data": data_report,
        "settings": {key: _json_value(trainer.args, settings, key) for key in sorted(origins)},
        "settings_from": {key: origin for key, origin in sorted(origins.items()) if origin != "default"},
        "advice": advice,
    }
    if trainer.is_world_process_zero():
        (folder / "all_results.json").write_text(json.dumps(results, indent=2, default=str) + "\n")
        write_predictions(folder / "predictions.csv", test_rows, test.predictions, test.labels)
        _plot(trainer.state.log_history, test, folder, settings["label_column"])
    return results


def _plot(log_history: list[dict[str, Any]], test: SplitScores, folder: Path, label: str) -> None:
    score = test.scores["model"]["spearman"]["value"]
    text = "Spearman undefined" if score is None else f"Spearman {score:.3f}"
    try:
        plot_scatter(test.predictions, test.labels, folder / "scatter.png", "Test set", text, axis_label=label)
        plot_loss(log_history, folder / "loss.png")
    except DataError as error:  # a run too short to log, or one that diverged, still has its results
        logger.warning("Not plotted: %s", error)


def _json_value(args: Any, settings: dict[str, Any], key: str) -> Any:
    value = settings[key] if key in settings else getattr(args, key, None)
    return "<set>" if key.endswith("token") and value else value


def write_predictions(path: Path, rows: Any, predictions: Any, labels: Any = None) -> None:
    """One line per row: its file row and identifying columns, the label where there is one, the prediction."""
    kept = [name for name in column_names(rows) if name not in ("label", "bound")] if _sized(rows) else []
    columns = [rows[name][:] for name in kept]
    header = [*kept, *([] if labels is None else ["label"]), "prediction"]
    values = [*columns, *([] if labels is None else [labels]), predictions]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(zip(*values))


def _sized(rows: Any) -> bool:
    return hasattr(rows, "__len__")


def make_advice(test: SplitScores, report: dict[str, Any], settings: dict[str, Any], folder: Path) -> list[str]:
    """Sentences a user can act on: alarms first, then how the model compares, then what to try next."""
    lines = [f"ALARM: {alarm}" for alarm in test.collapse["alarms"]]
    ridge = test.scores.get("ridge on embeddings", {}).get("spearman")
    model = test.scores["model"]["spearman"]
    if ridge and ridge["value"] is not None and model["high"] is not None:
        if model["low"] > ridge["high"]:
            lines.append("The head beats ridge on the same embeddings beyond their intervals.")
        elif model["value"] <= ridge["value"]:
            lines.append("The head is not better than ridge on the same embeddings: more data or other encoders first.")
        else:
            lines.append("The head is better than ridge on the same embeddings, within their intervals.")
    repeated = (report.get("leaks") or {}).get("row", {}).get("num_test_rows_in_train", 0)
    if repeated:
        lines.append(f"{repeated:,} test rows repeat training rows' sequences: this score is partly memory.")
    if set(settings["tower_training"]) == {"frozen"}:
        lines.append(f"Next: --use_peft --init_head_from {folder} fine-tunes the encoders, from this head.")
    if not settings["split_column"] and settings["split"] in (None, "random") and not report.get("streaming"):
        lines.append("Next: --split cluster tests on sequences unlike those of training.")
    return lines

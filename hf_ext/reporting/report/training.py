"""How the model was trained: what it is, learning curves, evaluations, early stopping, several seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import units
from ..charts import FULL, curve_charts
from ..units import is_finite, metric_name
from .blocks import Block, Figure, Fold, Paragraph, Section, Table
from .head import head_blocks
from .run_files import RunFiles
from .seeds import first_seed_blocks, seed_blocks, teacher_blocks
from .tasks import TaskReport
from .values import as_dict, hide_folders

MAX_EVALUATIONS = 200
_EVALUATION = {
    "subset_rows": "validation rows of the subset",
    "full_rows": "validation rows of a full pass",
    "num_evaluations": "evaluations",
    "num_full": "of them full passes",
    "seconds": "time in evaluation",
}
_TIMES = ("runtime", "per_second", "num_distinct", "num_tokens")


def training_section(task: TaskReport) -> Section:
    """The model, and how its training went."""
    run = task.run
    png = "loss.png" if "loss.png" in run.images else None
    blocks: list[Block] = [*_model_blocks(task), *head_blocks(run), *first_seed_blocks(run), *_facts(run)]
    charts = curve_charts(run.log_history, run.results)
    blocks += [Figure(chart, None if i else png) for i, chart in enumerate(charts)] or [
        Paragraph("No learning curves: the run logged fewer than two losses or scores.")
    ]
    blocks += [
        *seed_blocks(run),
        *teacher_blocks(run),
        *_stopping_blocks(run),
        *_alarm_blocks(run),
        *_evaluation_blocks(run),
    ]
    return Section("training", "Training", blocks)


def _model_blocks(task: TaskReport) -> list[Block]:
    model = as_dict(task.run.results.get("model"))
    if not model:
        return []
    total, trainable = model.get("num_parameters"), model.get("num_trainable")
    size = f"{units.number(total)} parameters, {units.number(trainable)} of them trained"
    text = f"{model.get('class') or 'A model'} of {size}.{task.start()}"
    rows = [
        [
            hide_folders(str(tower.get("encoder"))),
            tower.get("revision") or "not pinned",
            tower.get("training"),
            _inputs_text(tower),
        ]
        for tower in model.get("towers") or []
    ]
    table = Table(["encoder", "revision", "training", "columns"], rows, "Encoders, and what they read.")
    return [Paragraph(text), *([table] if rows else [])]


def _inputs_text(tower: Mapping[str, Any]) -> str:
    inputs = tower.get("inputs") or tower.get("columns") or []
    return "; ".join(part if isinstance(part, str) else " + ".join(part) for part in inputs)


def _facts(run: RunFiles) -> list[Block]:
    """Loss, length of training, best step, evaluations, as one table of two columns."""
    results, settings = run.results, run.settings
    train, best = as_dict(results.get("train")), as_dict(results.get("best"))
    evaluation = as_dict(results.get("evaluation"))
    rows: list[list[object]] = [
        ["loss", as_dict(results.get("model")).get("loss") or settings.get("loss")],
        ["mean training loss", units.number(train.get("train_loss"))],
        ["epochs", units.number(train.get("epoch"))],
        ["steps", units.number(run.state.get("global_step"))],
        ["rows per step and process", units.number(settings.get("per_device_train_batch_size"))],
        ["learning rate", units.number(settings.get("learning_rate"))],
    ]
    for name, value in best.items():
        label = "best step" if name == "step" else f"{metric_name(name)} of the best step, validation"
        rows.append([label, units.number(value)])
    rows += [[_EVALUATION.get(name, name.replace("_", " ")), _fact(name, value)] for name, value in evaluation.items()]
    shown = [row for row in rows if row[1] not in (None, units.NOT_MEASURED)]
    return [Table(["", ""], shown)] if shown else []


def _fact(name: str, value: Any) -> str:
    return units.seconds(value) if "seconds" in name else units.number(value)


def _stopping_blocks(run: RunFiles) -> list[Block]:
    stopping = as_dict(run.results.get("early_stopping"))
    if not stopping:
        return []
    step = stopping.get("stopped_at_step")
    end = f"stopped training at step {step:,}" if is_finite(step) else "did not stop training before its end"
    patience = stopping.get("patience")
    text = f"Early stopping {end}. It waits for {units.number(patience)} evaluations in a row without improvement."
    rows = [
        [
            units.number(decision.get("step")),
            decision.get("verdict"),
            _difference(decision.get("against_best")),
            _difference(decision.get("against_recent")),
            units.number(decision.get("num_without_improvement")),
        ]
        for decision in stopping.get("decisions") or []
        if isinstance(decision, dict)
    ]
    before = f"against {units.number(patience)} evaluations ago"
    headers = ["step", "decision", "against the best so far", before, "in a row"]
    table = Table(headers, rows[-MAX_EVALUATIONS:], "Improvement with its interval, on the same rows.")
    return [Paragraph(text), *([Fold(f"All {len(rows)} decisions", [table])] if rows else [])]


def _difference(comparison: Any) -> str:
    """Improvement and interval of a paired comparison."""
    entry = as_dict(comparison)
    return units.score({**entry, "value": entry.get("improvement")}) if entry else "-"


def _alarm_blocks(run: RunFiles) -> list[Block]:
    rows = [
        [units.number(entry.get("step")), entry.get("name") or "validation", text]
        for entry in run.results.get("alarms") or []
        for text in as_dict(entry).get("alarms") or []
    ]
    if not rows:
        return []
    table = Table(["step", "rows", "alarm"], rows[:MAX_EVALUATIONS])
    return [Fold(f"{len(rows):,} alarm{'s' * (len(rows) > 1)} while training", [table])]


def _evaluation_blocks(run: RunFiles) -> list[Block]:
    """Every evaluation as a row, subset and full passes apart."""
    rows: list[list[object]] = []
    metrics: dict[str, None] = {}
    parsed = []
    for entry in run.log_history:
        for prefix in ("eval_", FULL):
            found = _metrics_of(entry, prefix)
            if found:
                parsed.append((entry, prefix, found))
                metrics.update(dict.fromkeys(found))
    if not parsed:
        return []
    both = len({prefix for _, prefix, _ in parsed}) > 1
    for entry, prefix, found in parsed[-MAX_EVALUATIONS:]:
        kind = "all" if prefix == FULL or not both else "subset"
        start = [units.number(entry.get("step")), units.number(entry.get("epoch")), kind]
        rows.append([*start, *(units.number(found[m]) if m in found else "-" for m in metrics)])
    cut = f"The last {MAX_EVALUATIONS} of {len(parsed):,}." if len(parsed) > MAX_EVALUATIONS else ""
    table = Table(["step", "epoch", "rows", *map(metric_name, metrics)], rows, cut)
    return [Fold(f"All {len(parsed):,} evaluations", [table])]


def _metrics_of(entry: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    keys = [key for key in entry if key.startswith(prefix) and (prefix == FULL or not key.startswith(FULL))]
    return {key.removeprefix(prefix): entry[key] for key in keys if not key.endswith(_TIMES)}

"""How a run went: its training, what its plan decided, what it cost, and how to do it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments import is_secret
from ..text import capitalize, is_finite, metric_name, units
from .charts import curve_charts
from .page import Block, Blocks, Code, Figures, Table, Text, facts_table
from .record import DecisionRecord
from .run_files import RunFiles, show_argument, show_command

MAX_ROWS = 20  # of a table
CLASSES = {"I": "same mathematics", "N": "other numerics", "L": "changes learning"}
_NO_METRICS = ("runtime", "per_second", "num_distinct", "num_tokens", "epoch", "step", "batch_parts")


def training_blocks(run: RunFiles, of_task: Sequence[Block]) -> Blocks:
    """Returns facts, learning curves, what the task adds, and every evaluation."""
    record = run.record
    train = record.train
    settings = record.settings
    rows: list[list[Any]] = [
        ["loss", record.model.own.get("loss") or settings.get("loss")],
        ["mean training loss", units.number(train.get("train_loss"))],
        ["epochs", units.number(train.get("epoch"))],
        ["steps", units.number(run.state.global_step)],
        ["rows per step and process", units.number(settings.get("per_device_train_batch_size"))],
        ["learning rate", units.number(settings.get("learning_rate"))],
        ["steps left out, as not finite", _count_logs(run, "skipped_step")],
        ["times that memory did not suffice for a step", _count_logs(run, "batch_parts")],
    ]
    for name, value in record.best.items():
        label = "best step" if name == "step" else f"{metric_name(name)} of the best step, validation"
        rows.append([label, units.number(value)])
    blocks = [*facts_table(rows), *of_task]
    if named := [f"{one.name} ({_class_of(one)})" for one in run.plan.decisions if one.status == "applied"]:
        blocks.append(Text(f"Speed-ups in use: {', '.join(named)}."))
    if charts := curve_charts(run.state.log_history, record.best):
        blocks.append(Figures(charts, run.image("loss.png")))
    else:
        blocks.append(Text("No learning curves: the run logged fewer than two losses or scores."))
    if stopping := record.early_stopping:
        step = stopping.stopped_at_step
        patience = units.number(stopping.patience)
        end = f"stopped training at step {step:,}" if is_finite(step) else "did not stop training before its end"
        text = f"Early stopping {end}. It waits for {patience} evaluations in a row without improvement."
        blocks.append(Text(text))
    return [*blocks, *_evaluation_blocks(run)]


def _count_logs(run: RunFiles, name: str) -> str:
    return units.number(sum(name in entry for entry in run.state.log_history) or None)


def _evaluation_blocks(run: RunFiles) -> Blocks:
    """Returns every evaluation as a row: what was logged at its step beside losses and the summary at the end."""
    evaluations: dict[Any, dict[str, Any]] = {}
    for entry in run.state.log_history:
        values = {name.removeprefix("eval_"): value for name, value in entry.items() if not name.endswith(_NO_METRICS)}
        if values and not {"loss", "train_loss"} & entry.keys():
            evaluations.setdefault(entry.get("step"), {"epoch": entry.get("epoch")}).update(values)
    if not evaluations:
        return []
    metrics = dict.fromkeys(name for values in evaluations.values() for name in values)
    rows = [
        [units.number(step), *(units.number(values[m]) if m in values else units.MISSING for m in metrics)]
        for step, values in [*evaluations.items()][-MAX_ROWS:]
    ]
    which = "All" if len(evaluations) <= MAX_ROWS else f"The last {MAX_ROWS} of"
    return [Table(["step", *map(metric_name, metrics)], rows, fold=f"{which} {len(evaluations):,} evaluations")]


def _class_of(decision: DecisionRecord) -> str:
    return CLASSES.get(decision.kind, decision.kind)


def plan_blocks(run: RunFiles) -> Blocks:
    """Returns every speed-up: applied, skipped or refused, and why."""
    tables: dict[bool, list[list[object]]] = {True: [], False: []}
    for one in run.plan.decisions:
        evidence = [(n, v) for n, v in one.evidence.items() if not isinstance(v, dict | list)]
        reason = [one.reason, *(f"{n.replace('_', ' ')} {units.number(v)}" for n, v in evidence)]
        tables[one.status != "off"].append([one.name, one.status, _class_of(one), "; ".join(reason)])
    if not any(tables.values()):
        return [Text("Not recorded: the run left no plan.json.")]
    hardware = run.plan.hardware.get("name") or "this machine"
    preset = f", preset {run.plan.preset}" if run.plan.preset else ""
    headers = ["speed-up", "status", "class", "why, and what was measured"]
    text = Text(f"Decided before the first step for {hardware}{preset}.")
    blocks: Blocks = [text, Table(headers, tables[True], code=[0])]
    if off := tables[False]:
        blocks.append(Table(headers, off, code=[0], fold=f"{len(off)} not asked for"))
    return blocks


def cost_blocks(run: RunFiles) -> Blocks:
    """Returns where the time went; training time and memory stand at the top of the page."""
    train = run.record.train
    costs = run.record.costs
    prices = run.record.settings.get("dollars_per_hour")
    spent = [f"{name} {units.seconds(one['wall_s'])}" for name, one in costs.phases.items() if one["wall_s"] > 0.5]
    cost = f"${(costs.wall_s or 0) / 3600 * prices[0]:,.2f}, at ${prices[0]:g} an hour" if prices else None
    return facts_table(
        [
            ["whole run, wall clock", units.seconds(costs.wall_s)],
            ["where the time went", ", ".join(spent) or None],
            ["sessions", units.number(costs.num_sessions)],
            ["cost", cost],
            ["padding, which does not count as residues", units.share(train.get("train_padding_share"))],
            ["waiting for data", units.share(train.get("train_data_wait_share"))],
            ["model FLOPs utilization", units.share(train.get("train_mfu"))],
            ["GPU utilization", units.share(train.get("train_gpu_utilization"))],
        ],
        "Where the time went is of the last session; so are shares, without evaluation, saving, logging and warm-up.",
    )


def reproduce_blocks(run: RunFiles) -> Blocks:
    """Returns command, seed, arguments, versions, machine; of local paths the last part."""
    record = run.record
    blocks: Blocks = []
    if record.command:
        blocks.append(Code(show_command(record.command)))
        blocks.append(Text("Of local paths the last part is shown; all_results.json of the run has them whole."))
    where = record.environment
    settings = record.settings
    seed = settings.get("seed") if record.seed is None else record.seed
    parts = [f"seed {seed}"] if seed is not None else []
    parts += [f"{where.num_processes or 1} x {where.device}"] if where.device else []
    parts += [f"{name} {version}" for name, version in (where.versions or run.plan.versions).items() if version]
    if parts:
        blocks.append(Text(f"{capitalize(', '.join(parts))}."))
    origins = record.settings_from.items()
    chosen = [[n, show_argument(n, settings.get(n, "")), origin] for n, origin in origins if not is_secret(n)]
    if chosen:
        lid = f"{len(chosen)} arguments that are not the default"
        blocks.append(Table(["argument", "value", "from"], chosen, code=[0, 1], fold=lid))
    return blocks

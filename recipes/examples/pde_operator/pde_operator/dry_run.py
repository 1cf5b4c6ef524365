"""What a run of this task would hold and compute, before it starts. Nothing is generated or trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_ext.arguments import check_metric_name
from hf_ext.hardware import Hardware
from hf_ext.models import flop_counter, require_base
from hf_ext.tasks import DryRun, Part, RowLengths, Stage, Step, with_adapters

from .arguments import OperatorArguments
from .configuration import TASKS, OperatorConfig
from .data import OperatorRows
from .model import OperatorTransformer
from .results import ErrorMetrics
from .steps import build_collator, build_terms, check_start


def make_dry_run(given: OperatorArguments, args: Any, hardware: Hardware) -> DryRun:
    """Describes the operator without weights, with the terms of its loss.

    What is wrong with the arguments becomes a problem.
    """
    dry_run = DryRun(f"{given.num_train_samples:,} samples of {' and '.join(given.tasks)}")
    if args.use_peft:
        dry_run.attempt("arguments", lambda: require_base(None))
    metrics = ErrorMetrics(given.tasks).row_metrics
    dry_run.attempt("arguments", lambda: check_metric_name(args.metric_for_best_model, metrics))
    dry_run.attempt("arguments", lambda: check_start(given, str(args.output_dir)))
    args = dry_run.resolve_stock(given, args)
    if not given.dataset_name:
        dry_run.notes.append(
            f"Samples are generated first, {given.num_train_samples:,} to "
            f"train on and twice {given.num_eval_samples:,} of each task; that is not in the estimate."
        )
    if given.inverse_loss_every or given.physics_every:
        dry_run.notes.append("Inverse losses and physics priors are not in the estimate.")
    stage = dry_run.attempt("model", lambda: _dry_run_stage(given, args))
    dry_run.stages += [stage] if stage else []
    return dry_run


def _dry_run_stage(given: OperatorArguments, args: Any) -> Stage:
    config = OperatorConfig(**given.shape)
    with torch.device("meta"):
        model = OperatorTransformer(config)
    batch = partial(make_batch, config, given.queries_per_step)
    with flop_counter() as counter:
        model(**batch(1))
    model.terms = build_terms(given)
    num_rows = {"train": given.num_train_samples, **dict.fromkeys(("validation", "test"), given.num_eval_samples)}
    per_row = {"grid": len(config.tasks or []) * config.num_tokens}
    part = Part(
        f"the operator of {given.init_from}" if given.init_from else "a new operator",
        "full",
        config.hidden_size,
        sum(parameter.numel() for parameter in model.parameters()),
        counter.get_total_flops(),
        partial(_make_step, config, given.queries_per_step, args.per_device_train_batch_size),
    )
    return Stage(
        args,
        model,
        [part],
        lambda plan: (with_adapters(model, args, plan), batch),
        RowLengths(num_rows, per_row, per_row),
        rows=_shaped_rows(config, num_rows["train"]),
        inputs=build_collator(given, args.seed),
    )


def make_batch(config: OperatorConfig, num_queries: int, rows: int, device: str = "meta") -> dict[str, Any]:
    """Makes rows to train on, decoded at as many points."""
    tasks = config.tasks or []
    shapes = {f"{task}_inputs": TASKS[task].input_shape(config.resolution) for task in tasks}
    batch = {name: torch.ones(rows, *shape, device=device) for name, shape in shapes.items()}
    batch["labels"] = torch.ones(rows, len(tasks), num_queries, device=device)
    batch["points"] = torch.arange(num_queries, device=device).expand(rows, len(tasks), -1)
    return batch


def _make_step(config: OperatorConfig, num_queries: int, most_rows: int, device: str, rows: int) -> Step | None:
    if rows > most_rows:
        return None
    return Step(OperatorTransformer(config).train().to(device), make_batch(config, num_queries, rows, device))


def _shaped_rows(config: OperatorConfig, num_rows: int) -> OperatorRows:
    """Makes rows of the shapes of the run's, all alike."""
    value = torch.zeros(())
    samples = {}
    for task in config.tasks or []:
        inputs = value.expand(num_rows, *TASKS[task].input_shape(config.resolution))
        samples[task] = {"inputs": inputs, "targets": value.expand(num_rows, config.resolution**2)}
    return OperatorRows(samples)

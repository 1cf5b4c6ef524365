"""What a run of this task would hold and compute, before it starts. Nothing is generated or trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..arguments.checks import check_metric_name
from ..hardware import Hardware
from ..models.cpu_attention import flop_counter
from ..models.lora import require_base
from ..tasks.sketch import STOCK_NOTE, Part, Sketch, Stage, Step, with_adapters
from .arguments import OperatorArguments
from .configuration import TASKS, OperatorConfig
from .data import OperatorRows
from .model import OperatorTransformer
from .results import ErrorMetrics
from .steps import build_collator, build_terms

COUNTED_ROWS = 2


def sketch_run(given: OperatorArguments, args: Any, hardware: Hardware) -> Sketch:
    """The operator without weights, with the terms of its loss; what is wrong with the arguments becomes a problem."""
    sketch = Sketch({}, f"{given.num_train_samples:,} samples of {' and '.join(given.tasks)}")
    if args.use_peft:
        sketch.attempt("arguments", lambda: require_base(None))
    metrics = ErrorMetrics(given.tasks).row_metrics
    sketch.attempt("arguments", lambda: check_metric_name(args.metric_for_best_model, metrics))
    if given.stock_trainer:
        sketch.notes.append(STOCK_NOTE)
        args = copy.copy(args)
        args.speedups = []
    if not given.dataset_name:
        sketch.notes.append(
            f"Samples are generated first, {given.num_train_samples:,} to "
            f"train on and twice {given.num_eval_samples:,} of each task; that is not in the estimate."
        )
    stage = sketch.attempt("model", lambda: _sketch_stage(given, args))
    sketch.stages += [stage] if stage else []
    return sketch


def _sketch_stage(given: OperatorArguments, args: Any) -> Stage:
    config = OperatorConfig(**given.shape)
    with torch.device("meta"):
        model = OperatorTransformer(config)
    model.terms = build_terms(given)
    batch = partial(make_batch, config, given.queries_per_step)
    num_rows = {"train": given.num_train_samples, **dict.fromkeys(("validation", "test"), given.num_eval_samples)}
    per_row = len(config.tasks or []) * config.num_tokens
    part = Part(
        "a new operator",
        "full",
        config.hidden_size,
        sum(parameter.numel() for parameter in model.parameters()),
        make_step=partial(_make_step, config, given.queries_per_step, args.per_device_train_batch_size),
        train_flops=_step_flops(model, batch(COUNTED_ROWS)) * num_rows["train"],
        eval_flops=count_flops(model, make_batch(config, None, COUNTED_ROWS), trains=False) * num_rows["validation"],
    )
    return Stage(
        args,
        model,
        [part],
        as_trained=lambda plan: (with_adapters(model, args, plan), batch),
        num_rows=num_rows,
        num_tokens=per_row * num_rows["train"],
        longest=per_row,
        rows=_shaped_rows(config, num_rows["train"]),
        inputs=build_collator(given, args.seed),
    )


def make_batch(config: OperatorConfig, num_queries: int | None, rows: int, device: str = "meta") -> dict[str, Any]:
    """Rows to train on, decoded at as many points; None: rows to evaluate, decoded at all."""
    tasks, all_points = config.tasks or [], config.resolution**2
    num_points = num_queries or all_points
    shapes = {f"{task}_inputs": TASKS[task].input_shape(config.resolution) for task in tasks}
    batch = {name: torch.ones(rows, *shape, device=device) for name, shape in shapes.items()}
    batch["labels"] = torch.ones(rows, len(tasks), num_points, device=device)
    if num_points < all_points:
        batch["points"] = torch.arange(num_points, device=device).expand(rows, len(tasks), -1)
    return batch


def count_flops(model: Any, batch: Mapping[str, Any], trains: bool = True) -> float:
    """FLOPs of a row in the products of one pass, forward, and backward where it trains; also on the meta device."""
    with flop_counter() as counter:
        loss = model.train(trains)(**batch).loss
        if trains:
            loss.backward()
    model.zero_grad()
    model.train()
    return counter.get_total_flops() / len(batch["labels"])


def _step_flops(model: Any, batch: Mapping[str, Any]) -> float:
    """Of a row in a training step: on average, since the terms of the loss are not in every one."""
    terms = model.terms
    found = {}
    for name, other in (("inverse_every", "physics_every"), ("physics_every", "inverse_every")):
        model.terms = replace(terms, **{other: 0})
        found[name] = count_flops(model, batch)
    model.terms = None
    plain = count_flops(model, batch)
    model.terms = terms
    return plain + sum((flops - plain) / max(1, getattr(terms, name)) for name, flops in found.items())


def _shaped_rows(config: OperatorConfig, num_rows: int) -> OperatorRows:
    """Rows of the shapes of the run's, all alike."""
    value, samples = torch.zeros(()), {}
    for task in config.tasks or []:
        inputs = value.expand(num_rows, *TASKS[task].input_shape(config.resolution))
        samples[task] = {"inputs": inputs, "targets": value.expand(num_rows, config.resolution**2)}
    return OperatorRows(samples)


def _make_step(config: OperatorConfig, num_queries: int, most_rows: int, device: str, size: int) -> Step | None:
    """A training step of so many rows, without the optimizer and the terms of the loss."""
    if size > 1 and size // 2 >= most_rows:
        return None
    rows = min(size, most_rows)
    model, batch = OperatorTransformer(config).train().to(device), make_batch(config, num_queries, rows, device)

    def run() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    with torch.device("meta"):
        flops = count_flops(OperatorTransformer(config), make_batch(config, num_queries, rows)) * rows
    return Step(run, flops, f"{rows} rows, forward and backward")

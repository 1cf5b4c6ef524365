"""Finding out about a run of an operator: its plan, and what its steps take. Nothing is generated or trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..arguments.checks import check_metric_name
from ..hardware import Hardware
from ..models.cpu_attention import flop_counter
from ..pde.arguments import OperatorArguments, check_training
from ..pde.building import build_collator, build_config, build_terms
from ..pde.configuration import OperatorConfig
from ..pde.data import OperatorRows
from ..pde.model import OperatorTransformer
from ..pde.results import ErrorMetrics
from ..pde.tasks import TASKS
from ..plan import make_plan
from . import estimates
from .arguments import DoctorArguments
from .attempts import Attempts
from .facts import Facts
from .gathering import forecast_memory, size_up
from .machine import Machine, read_machine
from .measuring import DTYPES, time_passes
from .packages import read_packages
from .work import Encoder, Tokens, Work

REMEDIES = {
    "arguments": "what the message says; python recipes/pde_operator.py --help all lists all arguments",
    "model": "--model_name_or_path: the --output_dir of a run of recipes/pde_operator.py, or left out for a new model",
}
COUNTED_ROWS = 2
MakeBatch = Callable[[int], dict[str, Any]]


def gather_operator(args: OperatorArguments, training: Any, doctor: DoctorArguments) -> Facts:
    """Everything that can be known of a run of `recipes/pde_operator.py` before it starts.

    Args:
        args, training: as the recipe parses them.
        doctor: see `DoctorArguments`.

    Raises:
        ArgumentError: an unknown `doctor.device`. All else that is wrong is a `Finding`.

    Cost: about twice `doctor.measure_seconds`, or two training steps of one row where these take longer.
    """
    machine, packages, reader = read_machine(training, doctor.device), read_packages(), Attempts(REMEDIES)
    reader.attempt("arguments", lambda: check_training(args, training))
    metrics = ErrorMetrics(args.tasks).row_metrics
    reader.attempt("arguments", lambda: check_metric_name(training.metric_for_best_model, metrics))
    if args.stock_trainer:
        reader.notes.append("--stock_trainer: transformers.Trainer itself, without any of these speed-ups.")
        training = copy.copy(training)
        training.speedups = []
    if not args.dataset_name:
        reader.notes.append(
            f"Samples that {args.data_cache_dir} does not hold are generated first, {args.num_train_samples:,} to "
            f"train on and twice {args.num_eval_samples:,} of each task; that is not in the estimate."
        )
    found: dict[str, Any] = {"why_no_time": "the model could not be read"}
    work = reader.attempt("model", lambda: sketch_operator(args))
    if work is not None:
        rows = _shaped_rows(work.model.config, args.num_train_samples)
        plan = make_plan(training, work.model, rows, build_collator(args, training.seed), machine.hardware)
        found = {"plan": plan, "work": work, **size_up(training, plan, work, save_full=False)}
        dtype, num_rows = estimates.encoder_dtype(plan, work.encoders[0]), training.per_device_train_batch_size
        rate = _find_rate(work, dtype, machine, args, num_rows, doctor.measure_seconds)
        if isinstance(rate, str):
            found["why_no_time"] = rate
        else:
            seconds = estimates.estimate_seconds(plan, work, found["schedule"], [rate])
            found |= {"rate_basis": rate.basis, "rates": [rate], "seconds": seconds}
    facts = Facts("pde_operator", training, machine, packages, problems=reader.problems, notes=reader.notes, **found)
    return facts if work is None else replace(facts, forecast=forecast_memory(facts))


def sketch_operator(args: OperatorArguments) -> Work:
    """The operator without weights, as one encoder whose tokens are those of all tasks; with the terms of its loss.

    Raises:
        ArgumentError: see `build_config`.
    """
    config = build_config(args)
    with torch.device("meta"):
        model = OperatorTransformer(config)
    make_batch, model.terms = _batches(config, args.queries_per_step), build_terms(args)
    num_tasks, num_parameters = len(config.tasks or []), sum(p.numel() for p in model.parameters())
    per_row = num_tasks * config.num_tokens
    counts = {"train": args.num_train_samples, "validation": args.num_eval_samples, "test": args.num_eval_samples}
    tokens = {name: Tokens(n * per_row, n * num_tasks * config.num_tokens**2, per_row) for name, n in counts.items()}
    name = args.model_name_or_path
    encoder = Encoder(
        *(name or "a new operator", name, "full", config.to_dict(), num_parameters, num_parameters),
        flops=(_step_flops(model, args, make_batch(COUNTED_ROWS)) / per_row, 0.0),
        forward_flops=(count_flops(model, _batches(config)(COUNTED_ROWS), trains=False) / per_row, 0.0),
        train=tokens["train"],
        evaluated=tokens["validation"],
    )
    return Work(model, {"operator": []}, [encoder], 0, num_rows=counts, make_batch=make_batch)


def count_flops(model: Any, batch: Mapping[str, Any], trains: bool = True) -> float:
    """FLOPs of a row in the products of one pass, forward, and backward where it trains; also on the meta device."""
    with flop_counter() as counter:
        loss = model.train(trains)(**batch).loss
        if trains:
            loss.backward()
    model.zero_grad()
    model.train()
    return counter.get_total_flops() / len(batch["labels"])


def _step_flops(model: Any, args: OperatorArguments, batch: Mapping[str, Any]) -> float:
    """Of a row in a training step: on average, since the terms of the loss are not in every one."""
    terms = model.terms
    found = {}
    for name in ("inverse_every", "physics_every"):
        other = "physics_every" if name == "inverse_every" else "inverse_every"
        model.terms = replace(terms, **{other: 0})
        found[name] = count_flops(model, batch)
    model.terms = None
    plain = count_flops(model, batch)
    model.terms = terms
    return plain + sum((flops - plain) / max(1, getattr(terms, name)) for name, flops in found.items())


def _batches(config: OperatorConfig, num_queries: int | None = None, device: str = "meta") -> MakeBatch:
    """Rows to train on, decoded at as many points; None: rows to evaluate, decoded at all."""
    tasks, all_points = config.tasks or [], config.resolution**2
    num_points = num_queries or all_points

    def make(rows: int) -> dict[str, Any]:
        shapes = {f"{task}_inputs": TASKS[task].input_shape(config.resolution) for task in tasks}
        batch = {name: torch.ones(rows, *shape, device=device) for name, shape in shapes.items()}
        batch["labels"] = torch.ones(rows, len(tasks), num_points, device=device)
        if num_points < all_points:
            batch["points"] = torch.arange(num_points, device=device).expand(rows, len(tasks), -1)
        return batch

    return make


def _shaped_rows(config: OperatorConfig, num_rows: int) -> OperatorRows:
    """Rows of the shapes of the run's, all alike."""
    value, samples = torch.zeros(()), {}
    for task in config.tasks or []:
        shape = TASKS[task].input_shape(config.resolution)
        samples[task] = {
            "inputs": value.expand(num_rows, *shape),
            "targets": value.expand(num_rows, config.resolution**2),
        }
    return OperatorRows(samples)


def _find_rate(
    work: Work, dtype: str, machine: Machine, args: OperatorArguments, num_rows: int, seconds: float
) -> estimates.Rate | str:
    """Of whole steps, measured here, or published of a described card; or why it is not known."""
    hardware, config = machine.hardware, work.model.config
    if not machine.is_described and seconds:
        speed, rows = measure_operator(config, args.queries_per_step, hardware, dtype, num_rows, seconds)
        return estimates.measured_rate(speed, dtype, f"rows, {rows} at a time, forward and backward")
    rate = estimates.published_rate(hardware, dtype, config.hidden_size)
    measure = "" if machine.is_described else "; --measure_seconds 2 measures it"
    return rate or f"no {dtype} peak of {hardware.name} is published{measure}"


def measure_operator(
    config: OperatorConfig, num_queries: int, hardware: Hardware, dtype: str, num_rows: int, seconds: float
) -> tuple[float, int]:
    """FLOP/s of training steps without the optimizer and the terms of the loss, with random weights; rows of a step.

    A step has as many rows as the time allows: 1, 2, 4, ..., up to `num_rows`.

    Args:
        num_queries: points of each row and task that are decoded.
        hardware: of this machine.
        dtype: "bf16" and "fp16" compute in it under autocast, others in float32.
        seconds: how long to measure.

    Cost: about twice `seconds`, or two steps of one row where these take longer; the memory of a step.
    """
    device = "cuda" if hardware.kind in ("cuda", "rocm") else hardware.kind
    with torch.random.fork_rng(devices=[]):
        model = OperatorTransformer(config).train().to(device)

    def time_step(rows: int, seconds: float = 0.0) -> float:
        batch = _batches(config, num_queries, device)(rows)

        def step() -> None:
            with torch.autocast(device, dtype=DTYPES[dtype]) if dtype in DTYPES else nullcontext():
                loss = model(**batch).loss
            loss.backward()
            model.zero_grad()

        passes, elapsed = time_passes(step, device, seconds)
        return elapsed / passes

    rows, elapsed = 1, time_step(1)
    while rows < num_rows and 4 * elapsed < seconds:
        rows = min(2 * rows, num_rows)
        elapsed = time_step(rows)
    elapsed = time_step(rows, seconds / 2)
    return count_flops(model.to("meta"), _batches(config, num_queries)(rows)) * rows / elapsed, rows

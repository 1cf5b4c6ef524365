"""Finding out: machine, packages, what the task says of its run, plan, estimates. Nothing is trained or written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import Sizes, check_folder, refuse_asked
from ..memory import WEIGHT_BYTES, MemoryReport
from ..plan import Plan, make_plan
from ..reporting import peak_bytes
from ..tasks import DryRun, Span, Stage, Task
from .estimates import Schedule, Times, estimate_times, make_schedule, predict_disk, predict_memory
from .machine import Machine, Package, read_machine, read_packages

BASELINE_BYTES = round(0.4 * 2**30)  # what fitting baselines holds beside rows, measured (benchmarks/scale.py)
NOMINAL_SHARE = 0.91  # of a described card's nominal memory: what drivers report (T4, ECC on), or more


@dataclass(frozen=True)
class StageFacts:
    """A training as it would run.

    Attributes:
        schedule: None where how long it trains is not known.
        memory: of a step; or why it is not known. Of the stage that the command runs last, the largest.
        encoding_bytes: frozen encoders' weights while they encode, in float32: what half precision would round is
            measured against it.
        checkpoint, exported_bytes: of one checkpoint, and of the model at the end.
        output_bytes, embedding_bytes, download_bytes: most on disk, in the three folders of `Machine`.
    """

    stage: Stage
    plan: Plan
    schedule: Schedule | None
    times: Times
    memory: MemoryReport | str
    encoding_bytes: int
    checkpoint: Sizes
    exported_bytes: int
    output_bytes: int
    embedding_bytes: int
    download_bytes: int


@dataclass(frozen=True)
class Facts:
    """What is known of a run; `stages` is empty where its model or rows could not be read, which `dry_run` says.

    Attributes:
        args: `FastTrainingArguments`, those of the last stage that the command runs.
        host_bytes: of the host's memory: rows, as they were read here, libraries and baselines; None without rows.
    """

    args: Any
    machine: Machine
    packages: list[Package]
    dry_run: DryRun
    stages: list[StageFacts]
    host_bytes: int | None = None

    @property
    def asked(self) -> list[StageFacts]:
        """The stages that the command runs."""
        return [each for each in self.stages if each.stage.is_asked]

    @property
    def main(self) -> StageFacts | None:
        """The last of them, whose plan, memory and disk are the run's; None where nothing is known."""
        return self.asked[-1] if self.asked else None

    @property
    def total_seconds(self) -> Span | None:
        """Least and most of all stages that the command runs."""
        spans = [each.times.total for each in self.asked]
        known = [span for span in spans if span is not None]
        if not known or len(known) < len(spans):
            return None
        least, most = map(sum, zip(*known))
        return least, most

    @property
    def needed_bytes(self) -> dict[str, int]:
        """Most that the run puts into each of the machine's folders."""
        names = {"output_dir": "output_bytes", "cache_dir": "embedding_bytes", "hub_cache": "download_bytes"}
        return {folder: getattr(self.main, name, 0) for folder, name in names.items()}


def usable_memory(machine: Machine) -> int | None:
    """Returns the card's memory, or what the host has free, in bytes; None where not known."""
    if machine.hardware.kind == "cpu":
        return round(machine.free_memory_gib * 2**30)
    if machine.hardware.memory_gib is None:
        return None
    return round(machine.hardware.memory_gib * 2**30 * (NOMINAL_SHARE if machine.is_described else 1.0))


def gather(
    task: Task, arguments: Sequence[Any], args: Any, device: str | None = None, measure_seconds: float = 0.0
) -> Facts:
    """Gathers everything that can be known of a run before it starts.

    Args:
        task: of hf_ext, or a script's.
        arguments, args: of the run, as parsed; they become what the run would make of them.
        device, measure_seconds: see `DoctorArguments`.

    Raises:
        ArgumentError: an unknown device. All else that is wrong is a `Finding`.

    Cost: reading the data as the run would, near copies between splits included; about twice `measure_seconds`
    for each stage; of an embedding cache all it holds, about 1 s per GB.
    """
    machine = read_machine(args, device)
    began = time.perf_counter()
    dry_run = task.dry_run(arguments, args, machine.hardware)
    read_seconds = time.perf_counter() - began
    is_read = any(stage.num_rows and not stage.lengths.is_stream for stage in dry_run.stages)
    host_bytes = peak_bytes(torch.device("cpu")) + BASELINE_BYTES if is_read else None
    dry_run.attempt("output_dir", lambda: _check_output(args))
    seconds = 0.0 if machine.is_described else measure_seconds
    last = next((stage for stage in reversed(dry_run.stages) if stage.is_asked), None)
    stages = [_look(stage, machine, seconds, read_seconds if stage is last else None) for stage in dry_run.stages]
    facts = Facts(args, machine, read_packages(), dry_run, stages, host_bytes)
    return replace(facts, args=facts.main.stage.args) if facts.main else facts


def _check_output(args: Any) -> None:
    """Checks the output folder as a run does, but makes none."""
    if Path(args.output_dir).is_dir():
        check_folder(args.output_dir)
    refuse_asked(args)


def _look(stage: Stage, machine: Machine, seconds: float, read_seconds: float | None) -> StageFacts:
    args = stage.args
    plan = make_plan(stage.args, stage.model, stage.rows, stage.inputs, machine.hardware)
    schedule = make_schedule(plan, stage)
    rows = max(1, round(schedule.batch_rows / args.world_size)) if schedule else args.per_device_train_batch_size
    kept = [part for part in stage.parts if part.is_kept(plan)]
    checkpoint, exported, output = predict_disk(stage, plan, schedule)
    return StageFacts(
        stage,
        plan,
        schedule,
        estimate_times(plan, stage, schedule, machine.hardware, seconds, read_seconds),
        "that of the last stage is given"
        if read_seconds is None
        else predict_memory(stage, plan, rows, usable_memory(machine)),
        encoding_bytes=sum(part.num_parameters for part in kept) * WEIGHT_BYTES,
        checkpoint=checkpoint,
        exported_bytes=exported,
        output_bytes=output * stage.num_runs,
        embedding_bytes=sum(part.stored_bytes for part in kept),
        download_bytes=sum(part.download_bytes for part in stage.parts),
    )

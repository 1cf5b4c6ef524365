"""The parts of a run: which there are, what each is given, and in which order they have Trainer's events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from transformers import TrainerCallback

from .data import MaskingEpochCallback
from .plan import Plan
from .processes import Team
from .reporting import RunClockCallback, SpeedLine, StepProfiler, ThroughputCallback
from .saving import Exporter, Pusher, Resumer, Retention, Saver
from .training import (
    Backend,
    Checks,
    CollapseAlarm,
    DeepSpeed,
    EarlyStopping,
    EmbeddingCache,
    EmbeddingHost,
    Evaluator,
    Fsdp2,
    Halving,
    Host,
    Loaders,
    Losses,
    MakeLoader,
    NanGuard,
    OnePass,
    PlannedRun,
    Stopper,
)


@dataclass
class Parts:
    """Each has one concern and its state, and knows of others what its constructor was given.

    Those that are callbacks have Trainer's events in this order. What is said before a run comes first, then rates, who
    shows them, and clocks: what the others do is not training. Losses are judged before a step is stopped for, and
    evaluations are asked for before a stop can hold them back.
    """

    checks: Checks
    throughput: ThroughputCallback
    speed_line: SpeedLine
    profiler: StepProfiler
    run_clock: RunClockCallback
    loaders: Loaders
    masking: MaskingEpochCallback | None
    halving: Halving
    nan_guard: NanGuard
    evaluator: Evaluator
    stopper: Stopper
    early_stopping: EarlyStopping
    collapse_alarm: CollapseAlarm
    embedder: EmbeddingCache
    backend: Backend
    saver: Saver
    resumer: Resumer
    exporter: Exporter
    pusher: Pusher
    team: Team

    def callbacks(self) -> list[TrainerCallback]:
        """Returns those that are, in the order of their events."""
        return [part for part in vars(self).values() if isinstance(part, TrainerCallback)]


def make_parts(
    trainer: EmbeddingHost,
    planned: PlannedRun,
    losses: Losses,
    one_pass: OnePass,
    make_loader: MakeLoader,
    save: Callable[[], None],
) -> Parts:
    """Makes the parts of a trainer, once it has an Accelerator.

    Args:
        one_pass, make_loader, save: see `Evaluator`.

    Raises:
        ArgumentError: arguments that contradict each other, or ask a part for what it cannot do.
    """
    plan = planned.plan
    team = Team(trainer)
    backend = choose_backend(trainer, plan)
    stopper = Stopper(trainer, team)
    collator = trainer.data_collator
    throughput = ThroughputCallback(tokenizer=getattr(collator, "tokenizer", None))
    throughput.writes_file = planned.keeps_records
    throughput.packs = planned.applied("packing")
    early_stopping = EarlyStopping(trainer, team)
    collapse_alarm = CollapseAlarm(trainer)
    evaluator = Evaluator(trainer, team, stopper, (early_stopping, collapse_alarm), one_pass, make_loader, save)
    loaders = Loaders(trainer, planned)
    run_clock = RunClockCallback()
    speed_line = SpeedLine(throughput, lambda: trainer.callback_handler.callbacks)
    carried = (loaders, run_clock, speed_line, evaluator, collapse_alarm, early_stopping)
    keep = partial(Retention, trainer, backend, plan, early_stopping.num_bytes)
    halving = Halving(trainer, backend, losses)
    saver = Saver(trainer, team, backend, stopper, carried, keep, push=lambda step: pusher.push_checkpoint(step))
    pusher = Pusher(trainer, team, stopper, saver)
    return Parts(
        checks=Checks(trainer, backend, losses),
        throughput=throughput,
        speed_line=speed_line,
        profiler=StepProfiler(throughput),
        run_clock=run_clock,
        loaders=loaders,
        masking=MaskingEpochCallback(collator) if hasattr(collator, "set_epoch") else None,
        halving=halving,
        nan_guard=NanGuard(trainer, planned.run, backend, saver.last_good, halving),
        evaluator=evaluator,
        stopper=stopper,
        early_stopping=early_stopping,
        collapse_alarm=collapse_alarm,
        embedder=EmbeddingCache(trainer, team, backend, planned),
        backend=backend,
        saver=saver,
        resumer=Resumer(trainer, backend, plan, saver, carried),
        exporter=Exporter(trainer, backend),
        pusher=pusher,
        team=team,
    )


def choose_backend(trainer: Host, plan: Plan) -> Backend:
    """Returns the backend that fits what accelerate made of the launch and of the trainer's arguments."""
    if trainer.is_deepspeed_enabled:
        return DeepSpeed(trainer, plan)
    return (Fsdp2 if trainer.accelerator.is_fsdp2 else Backend)(trainer, plan)

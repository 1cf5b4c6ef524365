"""The parts of one run, made in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import TrainerCallback

from ..data.masking import MaskingEpochCallback
from ..reporting.run_clock import RunClockCallback
from ..reporting.throughput import ThroughputCallback
from ..training_args import FastTrainingArguments
from .backends import Backend
from .checks import Checks
from .collapse import CollapseAlarm
from .data_workers import DataWorkers
from .disk_space import DiskSpace
from .early_stopping import EarlyStopping
from .embedder import Embedder
from .evaluation_record import EvaluationRecord
from .evaluation_schedule import EvaluationSchedule
from .evaluator import Evaluator
from .exporter import Exporter
from .loaders import Loaders
from .memory import MemoryWatch
from .nan_guard import NanGuard
from .oom_policy import OomPolicy
from .places import Places
from .planned import PlannedRun
from .profiling import Profiling
from .progress import HostSteps, SpeedLine
from .repeatable_loading import RepeatableLoading
from .resuming import Resumer
from .stopper import Stopper
from .team import Team


class Parts:
    """What a run consists of, but for what it needs before there is an Accelerator.

    Args:
        trainer: for the callbacks that hold it.
        sets: the evaluation set, or several by name.
        collator: makes batches; those for masked language models hold a tokenizer that nobody passed on.
    """

    def __init__(
        self,
        trainer: Any,
        args: FastTrainingArguments,
        team: Team,
        planned: PlannedRun,
        backend: Backend,
        *,
        sets: Any,
        compute_metrics: Any,
        collator: Any,
    ):
        # Data, and what is computed on it.
        self.loaders = Loaders(args, planned)
        self.repeatable = RepeatableLoading(args, planned)
        settings = planned.plan["embedding_cache"].settings if planned.applied("embedding_cache") else None
        self.embedder = Embedder(args, team, settings, partial(planned.record, "embedding_cache"))
        self.checks = Checks(trainer)
        self.nan_guard = NanGuard(trainer, planned.run.padding)
        self.oom_policy = OomPolicy(trainer)
        self.throughput = ThroughputCallback(tokenizer=getattr(collator, "tokenizer", None))
        self.throughput.writes_file = planned.keeps_records
        self.throughput.packs = planned.applied("packing")
        self._speed_line = SpeedLine(trainer, args)
        self.profiling = Profiling(trainer)
        self.run_clock = RunClockCallback()
        self._host_steps = HostSteps(planned)
        self.memory = MemoryWatch(args, planned)

        # Stopping, and evaluations, which a stop gives up.
        self.stopper = Stopper(args, team)
        self.early_stopping = EarlyStopping(args, team, sets, compute_metrics)
        self.collapse_alarm = CollapseAlarm(args)
        watchers = self.early_stopping, self.collapse_alarm
        self.evaluator = Evaluator(args, team, self.stopper, sets, watchers)

        # Checkpoints, and what they carry of the others.
        self.places = Places(str(args.output_dir), args.local_checkpoint_dir, args.should_save)
        self.disk_space = DiskSpace(args, self.places, backend)
        self.carried: list[Any] = [
            *(self.stopper, self.loaders, self.run_clock, self.evaluator),
            *(self.profiling, self.repeatable, self.collapse_alarm, self.early_stopping),
        ]
        self.resumer = Resumer(args, team, self.places, backend)
        self.exporter = Exporter(args, backend.is_spread)
        self.workers = DataWorkers(args, self.places)
        self._schedule = EvaluationSchedule(self.stopper)
        self._masking = [MaskingEpochCallback(collator)] if hasattr(collator, "set_epoch") else []

    def listeners(self) -> Sequence[TrainerCallback]:
        """Those that need Trainer's events, in the order in which they must have them.

        What is said before a run, then rates, who shows them, and clocks: what the others do is not training. Losses
        are judged before a step is stopped for, and the schedule asks for an evaluation before a stop can hold it back.
        A profile ends where any of them asks for something.
        """
        watchers = [self.early_stopping] if self.early_stopping.is_on else []
        rates = [self.throughput, self._speed_line]
        counters = [self.run_clock, self._host_steps, self.loaders, *self._masking]
        return [
            self.checks,
            self.memory,
            *rates,
            *counters,
            self.nan_guard,
            self.oom_policy,
            EvaluationRecord(),
            self._schedule,
            *watchers,
            self.stopper,
            self.profiling,
        ]

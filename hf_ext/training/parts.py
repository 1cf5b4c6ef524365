"""The parts of one run, made in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from ..checkpoints.resume import Resumer
from ..data.masking import MaskingEpochCallback
from ..distributed import Team
from ..reporting.run_clock import RunClockCallback
from ..reporting.throughput import ThroughputCallback
from ..training_args import FastTrainingArguments
from .backends import Backend
from .checks import Checks
from .collapse import CollapseAlarm
from .early_stopping import EarlyStopping
from .embedding_cache import EmbeddingCache
from .evaluation import Evaluator
from .export import Exporter
from .loaders import Loaders
from .nan_guard import NanGuard
from .oom_policy import OomPolicy
from .planned import PlannedRun
from .profiling import Profiling
from .progress import HostSteps, MemoryWatch, SpeedLine
from .stop import Stopper


class Parts:
    """What a run consists of, but for what it needs before there is an Accelerator.

    Args:
        trainer: for the callbacks that hold it.
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
        collator: Any,
    ):
        # Data, and what is computed on it.
        self.loaders = Loaders(trainer)
        self.embedder = EmbeddingCache(trainer)
        self.checks = Checks(trainer)
        self.nan_guard = NanGuard(trainer, planned.run.padding)
        self.oom_policy = OomPolicy(trainer)
        self.throughput = ThroughputCallback(tokenizer=getattr(collator, "tokenizer", None))
        self.throughput.writes_file = planned.keeps_records
        self.throughput.packs = planned.applied("packing")
        self._speed_line = SpeedLine(trainer)
        self.profiling = Profiling(trainer)
        self.run_clock = RunClockCallback()
        self._host_steps = HostSteps(trainer)
        self.memory = MemoryWatch(trainer)

        # Stopping, and evaluations, which a stop gives up.
        self.stopper = Stopper(trainer)
        self.early_stopping = EarlyStopping(trainer)
        self.collapse_alarm = CollapseAlarm(trainer)
        self.evaluator = Evaluator(trainer, (self.early_stopping, self.collapse_alarm))

        # Checkpoints, and what they carry of the others.
        self.carried: list[Any] = [
            *(self.loaders, self.run_clock, self.evaluator),
            *(self.profiling, self.collapse_alarm, self.early_stopping),
        ]
        self.resumer = Resumer(trainer)
        self.exporter = Exporter(trainer)
        self._masking = [MaskingEpochCallback(collator)] if hasattr(collator, "set_epoch") else []

    def listeners(self) -> Sequence[TrainerCallback]:
        """Those that need Trainer's events, in the order in which they must have them.

        What is said before a run, then rates, who shows them, and clocks: what the others do is not training. Losses
        are judged before a step is stopped for, and the schedule asks for an evaluation before a stop can hold it back.
        """
        rates = [self.throughput, self._speed_line]
        counters = [self.run_clock, self._host_steps, self.loaders, *self._masking]
        return [
            self.checks,
            self.memory,
            *rates,
            *counters,
            self.nan_guard,
            self.oom_policy,
            self.profiling,
            self.evaluator,
            self.stopper,
        ]

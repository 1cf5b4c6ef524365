"""What a step will take, said before the first one; afterwards what the run took beside it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from .. import units
from ..memory.forecast import Forecaster, choice_of
from ..memory.live import describe_run, longest_batch
from ..memory.probe import Graph
from ..memory.report import MemoryReport, format_memory, format_savings, report_memory
from ..memory.what_fits import usable_bytes
from ..models.activation_checkpointing import is_recomputed
from ..reporting.throughput import peak_bytes
from ..training_args import FastTrainingArguments
from .planned import PlannedRun

logger = logging.getLogger(__name__)


class MemoryWatch(TrainerCallback):
    """Predicts the fullest moment of a step, before it, and measures the run's.

    `plan.json` holds both, as `facts.memory`. Measured is the peak of torch's allocator on a GPU; on a CPU how far the
    process's resident peak rose. On a GPU, in runs that use speed-ups: there the answer counts, and a tenth of a second
    per switch does not. On a CPU the doctor has it.

    Args:
        planned: the run's plan, and where it is kept.
        everywhere: on a CPU too.
    """

    def __init__(self, args: FastTrainingArguments, planned: PlannedRun, *, everywhere: bool = False):
        self._args, self._planned, self._everywhere = args, planned, everywhere
        self.report: MemoryReport | None = None
        self._before = 0

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **given: Any
    ) -> None:
        """Says what a step will take, and whether it fits."""
        on_gpu = self._planned.plan.hardware.kind == "cuda"
        if not (self._planned.keeps_records and (on_gpu or self._everywhere)):
            return
        self.report = self._predict(model, given.get("train_dataloader"))
        self._before = 0 if on_gpu else peak_bytes(self._args.device)
        if self.report is None:
            return
        self._planned.plan.facts["memory"] = self.report.to_dict()
        self._planned.save()
        if self._args.process_index == 0:
            lines = format_memory(self.report)
            say = logger.info if self.report.fits else logger.warning
            say("%s", "\n".join([*lines, format_savings(self.report)]))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Puts what was measured beside what was predicted."""
        if self.report is None:
            return
        measured = peak_bytes(self._args.device) - self._before
        self._planned.plan.facts["memory"]["measured_peak_bytes"] = measured
        self._planned.save()
        if self._args.process_index == 0:
            predicted = units.memory(self.report.forecast.peak)
            logger.info("memory: %s at the fullest moment, %s predicted", units.memory(measured), predicted)

    def _predict(self, model: Any, loader: Any) -> MemoryReport | None:
        """The report; None where the model or its rows do not lend themselves to it."""
        plan, args = self._planned.plan, self._args
        dataset, collator = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
        if model is None or collator is None or not hasattr(dataset, "__len__"):
            return None
        if args.fsdp or args.deepspeed_plugin is not None or not any(p.requires_grad for p in model.parameters()):
            return None
        try:
            batch = longest_batch(dataset, collator, args.train_batch_size)
            kind = "cuda" if plan.hardware.kind == "cuda" else "cpu"
            subject, length = describe_run(model, batch, kind, args.block_pattern)
            rows = args.train_batch_size
            if args.max_tokens_per_batch:
                rows = max(1, args.max_tokens_per_batch // length)
            recomputes = any(is_recomputed(part) for part in model.modules())
            graph = Graph(None if recomputes else "none", plan.applied("precision"))
            choice = choice_of(args, rows, graph, plan.applied("muon"), plan.applied("cpu_offload"))
            capacity = self._capacity()
            room = usable_bytes(capacity, plan.hardware.kind) if capacity else None
            return report_memory(Forecaster(subject, args.world_size > 1), choice, length, capacity, room)
        except Exception:  # a user's model, on tensors without values; training goes on as it would have
            logger.debug("no prediction of memory", exc_info=True)
            return None

    def _capacity(self) -> int | None:
        if self._planned.plan.hardware.kind == "cuda" and torch.cuda.is_available():
            return torch.cuda.get_device_properties(self._args.device).total_memory
        gib = self._planned.plan.hardware.memory_gib
        return None if gib is None else round(gib * 2**30)

"""What a step will take, said before the first one; afterwards what the run took beside it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from .. import units
from ..data.random_states import kept_random_states
from ..memory.batches import affinity_batch, give_layouts, masked_lm_batch
from ..memory.forecast import MemoryModel, TrainConfig
from ..memory.report import MemoryReport, format_memory, format_savings, report_memory, usable_bytes
from ..models.activation_checkpointing import is_recomputed
from ..models.affinity import AffinityModel
from ..models.lora import unwrap_peft
from ..reporting.throughput import peak_bytes
from ..speedups.base import optimizer_name
from ..speedups.sample import longest_rows
from ..training_args import FastTrainingArguments
from .planned import PlannedRun

logger = logging.getLogger(__name__)
MASKED_LM_COLUMNS = {"input_ids", "attention_mask", "labels", "token_type_ids", "layout"}


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
            rows = args.train_batch_size
            batch = longest_batch(dataset, collator, args.length_column_name, rows)
            memory, length = describe_run(model, batch)
            memory.kind = "cuda" if plan.hardware.kind == "cuda" else "cpu"
            memory.pattern, memory.sends_gradients = args.block_pattern, args.world_size > 1
            if args.max_tokens_per_batch:
                rows = max(1, args.max_tokens_per_batch // length)
            recomputes = any(is_recomputed(part) for part in model.modules())
            config = TrainConfig(
                rows,
                policy=None if recomputes else "none",
                half=plan.applied("precision"),
                optimizer=optimizer_name(args),
                is_muon=plan.applied("muon"),
                on_host=plan.applied("cpu_offload"),
                passes=args.gradient_accumulation_steps,
            )
            capacity = self._capacity()
            room = usable_bytes(capacity, plan.hardware.kind) if capacity else None
            return report_memory(memory, config, length, capacity, room)
        except Exception:  # a user's model, on tensors without values; training goes on as it would have
            logger.debug("no prediction of memory", exc_info=True)
            return None

    def _capacity(self) -> int | None:
        if self._planned.plan.hardware.kind == "cuda" and torch.cuda.is_available():
            return torch.cuda.get_device_properties(self._args.device).total_memory
        gib = self._planned.plan.hardware.memory_gib
        return None if gib is None else round(gib * 2**30)


def longest_batch(dataset: Any, collator: Any, length_column: str, rows: int) -> dict[str, Any]:
    """The collator's batch of the `rows` longest rows; of the first ones where no lengths are known.

    The random states of the process, and the collator, are as they were before.
    """
    with kept_random_states(dataset, collator):
        return dict(copy.copy(collator)(longest_rows(dataset, collator, length_column, rows)))


def describe_run(model: Any, batch: dict[str, Any]) -> tuple[MemoryModel, int]:
    """A model, with everything applied that the plan applies, as the ledger is asked about it; and tokens of a row.

    Batches of other sizes are made for the models of hf_ext's tasks; of others there is this one alone.
    """
    inner = unwrap_peft(model)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    blocked = any("blocked" in str(getattr(config, "_attn_implementation", "")) for config in configs)
    if isinstance(model, AffinityModel):
        lengths = {name: part["input_ids"].shape[1] for name, part in batch.get("sequences", {}).items()}
        embedded = {name: part.shape[1] for name, part in batch.get("embeddings", {}).items()}
        make = affinity_batch(lengths, embedded)
        return MemoryModel(model, make, change=give_layouts, scales=not blocked), max(1, sum(lengths.values()))
    length = batch["input_ids"].shape[1] if "input_ids" in batch else 1
    if type(inner).__name__.endswith("ForMaskedLM") and set(batch) <= MASKED_LM_COLUMNS:
        # A head that computes at labels only reads where they are from the batch, where the collator says it not.
        make = masked_lm_batch(length, locates_labels="forward" in vars(inner))
        return MemoryModel(model, make, change=give_layouts, scales=not blocked), length
    return MemoryModel(model, lambda rows: batch, change=give_layouts, scales=False, has_one_batch=True), length

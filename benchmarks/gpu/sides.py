"""One short training run of one side, stock Trainer at its best or ours, on the same rows from the same weights."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_ext.hardware import detect_hardware
from hf_ext.masked_lm.steps import MaskedLMData, build, prepare_splits
from hf_ext.memory.out_of_memory import DidNotFit, attempt
from hf_ext.optional import import_problem
from hf_ext.reporting.throughput import ThroughputCallback
from hf_ext.tasks.running import build_stock_trainer
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

from .shapes import Shape, make_collator, make_rows

STOCK, FLASH, OURS, EAGER = "stock", "stock, flash_attention_2", "max_speed", "max_speed without compile"
WARMUP = 3
SAID = ("precision", "attention", "packing", "compile", "lora_base", "fused_gelu", "masked_lm_head")


@dataclass
class Bench:
    """What is trained.

    Attributes:
        rows: of an optimizer step, on every side; a side with less memory takes them in several passes.
        passes: per step, by side; doubled where a side is out of memory.
        failed: side -> why it is no longer run.
    """

    shape: Shape
    ways: str
    device: torch.device
    rows: int
    is_toy: bool

    def __post_init__(self) -> None:
        self.passes: dict[str, int] = {}
        self.did_not_fit: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.decisions: dict[str, str] = {}

    def run_fitting(self, side: str, steps: int, seed: int = 0) -> dict[str, Any]:
        """A run; where memory does not suffice, again with half the rows at a time.

        Raises:
            DidNotFit: a single row does not fit.
        """
        while True:
            passes = self.passes.setdefault(side, 1)
            free_memory(self.device)
            try:
                return attempt(partial(self.run, side, steps, passes, seed))
            except DidNotFit as failure:
                self.did_not_fit.append({"side": side, "rows": self.rows // passes, "error": str(failure)[:200]})
                if passes * 2 > self.rows:
                    raise
                self.passes[side] = 2 * passes

    def run(self, side: str, steps: int, passes: int, seed: int) -> dict[str, Any]:
        """So many optimizer steps; the first are warm-up, compilation included."""
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            model = self.shape.build(self.device, self.ways)
            if side == FLASH:
                model.set_attn_implementation("flash_attention_2")
            trainer = self._trainer(side, model, steps, passes, seed, folder)
            (throughput,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ThroughputCallback))
            throughput.warmup_steps = min(WARMUP, steps - 1)
            trained = trainer.train()
            if hasattr(trainer, "plan"):
                found = {one.name: f"{one.status}: {one.reason}" for one in trainer.plan.decisions}
                self.decisions = {name: found[name] for name in SAID if name in found}
                trainer.end()
            measured = json.loads((Path(folder) / "throughput.json").read_text())
        totals, seconds = measured["totals"], measured["totals"]["seconds"]
        return {
            "tokens_per_s": totals["tokens"] / seconds,
            "padding_share": 1 - totals["tokens"] / totals["padded_tokens"],
            "tflops": totals["flops"] / seconds / 1e12,
            "mfu": measured["rates"].get("mfu"),
            "no_mfu_because": measured["no_mfu_because"],
            "dtype": measured["compute_dtype"],
            "step_s": measured["step_seconds"]["median"],
            "measured_steps": measured["measured_steps"],
            "warmup_s": measured["warmup_seconds"],
            "peak_memory_gib": measured["peak_memory_gib"],
            "loss": trained.training_loss,
            "wall_s": time.perf_counter() - began,
        }

    def _trainer(self, side: str, model: Any, steps: int, passes: int, seed: int, folder: str) -> Any:
        given = {
            "max_steps": steps,
            "per_device_train_batch_size": self.rows // passes,
            "gradient_accumulation_steps": passes,
            "learning_rate": 1e-4,
            "logging_steps": steps,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": seed,
            "use_cpu": self.device.type == "cpu",
            "embedding_cache_dir": f"{folder}/cache",
        }
        is_stock = side in (STOCK, FLASH)
        if is_stock:
            half = half_precision(self.device)
            given |= {"preset": "baseline", "train_sampling_strategy": "group_by_length", "optim": "adamw_torch_fused"}
            given |= {half: True} if half else {}
        else:
            # Out of memory is answered alike on all sides: by `run_fitting`.
            given |= {"preset": "max_speed", "oom_policy": "stop"}
            given |= {"without": ["compile"]} if side == EAGER else {}
        collator = make_collator(seed)
        args = FastTrainingArguments(output_dir=folder, **given)
        rows = {"train": make_rows(steps * self.rows, self.is_toy, seed)}
        splits = prepare_splits(rows, args, collator.columns, is_stock)
        parts = build(None, MaskedLMData(model, collator, None, splits))
        return build_stock_trainer(args, frozenset(given), **parts) if is_stock else FastTrainer(args=args, **parts)


def stock_sides(bench: Bench) -> list[str]:
    """SDPA, and the flash-attn package where it is there and runs."""
    usable = detect_hardware(bench.device).flash_attention_2 and import_problem("flash_attn") is None
    return [STOCK, FLASH] if usable else [STOCK]


def half_precision(device: torch.device) -> str | None:
    """Trainer's name of the half precision that a card has natively; None on a CPU."""
    hardware = detect_hardware(device)
    if hardware.kind == "cpu":
        return None
    return "bf16" if hardware.native_bf16 else "fp16" if hardware.native_fp16 else None


def free_memory(device: torch.device) -> None:
    """Lets a GPU forget what earlier measurements held, and begins its peak anew."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

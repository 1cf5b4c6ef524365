"""The memory ledger beside what the allocator counts; the batch finder and the ladder on memory that runs out.

On a CPU the ledger is held against torch's own allocation events, and memory runs out by imitation: an error at the
model's door, for more rows than a number.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import memory_ledger
import torch
from memory_ledger import Case

from hf_ext import FastTrainer, FastTrainingArguments
from hf_ext.hardware import detect_hardware
from hf_ext.memory.out_of_memory import DidNotFit, attempt
from hf_ext.memory.report import usable_bytes
from hf_ext.optional import import_problem
from hf_ext.speedups.parity import one_line

from .shapes import SHAPES, Shape, make_collator, make_rows
from .sides import free_memory
from .work import Work

SHARE = 0.6  # of the memory of a run without a limit
STEPS = 4
LADDER = {"full": Shape("ESM-2 150M", "esm", "150M"), "toy": SHAPES["toy"][0]}
ROWS = {"full": 32, "toy": 4}
GIB = 2**30


def measure(work: Work) -> None:
    """Reports a row per case of the ledger, then the finder, then the ladder."""
    for case in choose_cases(work):
        work.add("ledger", try_to(partial(check_case, case), work, case=case.name))
    work.report(finder=try_to(find_batch, work))
    work.report(ladder=try_to(step_down, work))


def try_to(action: Callable[[Work], dict[str, Any]], work: Work, **about: Any) -> dict[str, Any]:
    """What it finds, or how it failed: one of them must not cost the others."""
    try:
        return action(work)
    except Exception as error:  # of a trainer, an optimizer, an allocator
        return {**about, "failed": one_line(error)}


# --- the ledger -----------------------------------------------------------------------------------------------------


def choose_cases(work: Work) -> list[Case]:
    """Of `memory_ledger.CASES`, unpacked: those that this device computes."""
    if work.is_toy:
        return [Case("full", "tiny"), Case("LoRA", "tiny", "lora")]
    names = ["full", "full, bf16", "full, bf16, recomputing all", "full, AdamW in 8 bits", "full, all together"]
    names += ["LoRA, bf16", "LoRA, bf16, half base", "frozen"]
    known = {case.name: case for case in memory_ledger.CASES}
    chosen = [replace(known[name], size="650M", rows=8, length=512) for name in names]
    if not detect_hardware(work.device).native_bf16:
        chosen = [case for case in chosen if not case.half]
    if import_problem("bitsandbytes"):
        chosen = [case for case in chosen if case.optimizer != "adamw_8bit"]
    return chosen


def check_case(case: Case, work: Work) -> dict[str, Any]:
    """Predicted and measured bytes, or that it did not fit."""
    kind = work.device.type
    predicted = memory_ledger.predict(case, kind)["bytes"]
    row: dict[str, Any] = {"case": case.name, "model": case.size, "tokens": [case.rows, case.length]}
    row["predicted_gib"] = predicted / GIB
    try:
        measured = _allocated(case, work.device) if kind == "cuda" else memory_ledger.measure_allocations(case)["bytes"]
    except DidNotFit as failure:
        room = usable_bytes(torch.cuda.get_device_properties(0).total_memory, kind)
        return {**row, "did_not_fit": str(failure)[:200], "was_predicted_to": predicted <= room}
    return {**row, "measured_gib": measured / GIB, "predicted_over_measured": predicted / measured}


def _allocated(case: Case, device: torch.device) -> int:
    """Most that two steps held on the GPU, over what was held before."""
    free_memory(device)
    before = torch.cuda.memory_allocated()
    attempt(lambda: memory_ledger.train(case, "cuda"))
    return torch.cuda.max_memory_allocated() - before


# --- memory that runs out -------------------------------------------------------------------------------------------


def find_batch(work: Work) -> dict[str, Any]:
    """What `--speedups find_batch_size` tried and took, of steps of more rows than fit."""
    shape, rows = SHAPES[work.size][0], 2 * ROWS[work.size]
    limit = None if work.device.type == "cuda" else rows // 2
    with limited(None, work):
        trained = train(shape, work, rows, 1, limit, speedups=["find_batch_size"])
    found = trained["decisions"].get("find_batch_size", {})
    return {
        "model": shape.name,
        "rows_per_step": rows,
        "imitated": limit is not None,
        "found": found,
        **_short(trained),
    }


def step_down(work: Work) -> dict[str, Any]:
    """A run without a limit, one with too little memory, and one that begins where that ended."""
    shape, rows = LADDER[work.size], ROWS[work.size]
    free = train(shape, work, rows, 1, None)
    is_real = work.device.type == "cuda"
    allowed = int(SHARE * free["peak_bytes"])
    with limited(allowed if is_real else None, work):
        stepped = train(shape, work, rows, 1, None if is_real else rows // 2, oom_policy="step_down")
    rungs = stepped["decisions"].get("oom_ladder", {}).get("taken", [])
    found = {"model": shape.name, "rows": rows, "imitated": not is_real, "rungs": rungs, **_short(stepped)}
    found |= {"without_limit_gib": free["peak_bytes"] / GIB, "allowed_gib": allowed / GIB if is_real else None}
    last = rungs[-1]["rung"] if rungs else ""
    if last.endswith("at a time"):
        smaller = int(last.split()[0])
        begun = train(shape, work, smaller, rows // smaller, None)
        pairs = zip(stepped["losses"], begun["losses"])
        found["largest_difference_of_a_loss_from_a_run_begun_there"] = max(abs(a - b) for a, b in pairs)
    return found


def _short(trained: dict[str, Any]) -> dict[str, Any]:
    return {"losses": trained["losses"], "peak_gib": trained["peak_bytes"] / GIB}


@contextmanager
def limited(allowed_bytes: int | None, work: Work) -> Iterator[None]:
    """Within it torch's allocator takes no more than so many bytes of the GPU."""
    free_memory(work.device)
    if allowed_bytes is None:
        yield
        return
    total = torch.cuda.get_device_properties(work.device).total_memory
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / total, work.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, work.device)


def train(shape: Shape, work: Work, rows: int, passes: int, limit: int | None, **given: Any) -> dict[str, Any]:
    """A short run by `max_speed` without compilation: losses, peak, and what the plan found.

    Args:
        limit: rows above which the model raises, as a device would.
    """
    free_memory(work.device)
    model = shape.build(work.device)
    if limit is not None:
        model.register_forward_pre_hook(_refuse_above(limit), with_kwargs=True)
    settings: dict[str, Any] = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": passes}
    settings |= {"preset": "max_speed", "without": ["compile"], "oom_policy": "stop", "max_steps": STEPS}
    settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 0}
    settings |= {"use_cpu": work.device.type == "cpu", "remove_unused_columns": False, **given}
    with tempfile.TemporaryDirectory() as folder:
        args = FastTrainingArguments(output_dir=folder, embedding_cache_dir=f"{folder}/cache", **settings)
        data = make_rows(STEPS * rows * passes, work.is_toy)
        trainer = FastTrainer(model, args, data_collator=make_collator(), train_dataset=data)
        trainer.train()
        peak = torch.cuda.max_memory_allocated() if work.device.type == "cuda" else 0
        decisions = {one.name: dict(one.evidence) for one in trainer.plan.decisions if one.evidence}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.end()
    return {"losses": losses, "peak_bytes": peak, "decisions": decisions}


def _refuse_above(limit: int) -> Any:
    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training and len(kwargs["input_ids"]) > limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory (imitated: more than {limit} rows).")

    return refuse

"""The largest batch that fits: tried, agreed on by all processes, remembered, and checked by the next run."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.token_budget import count_tokens
from ..errors import ArgumentError, DataError, MemoryExhausted
from ..hardware import Hardware, detect_hardware
from ..memory.stored import gradient_bytes, optimizer_bytes
from ..out_of_memory import DidNotFit, attempt
from ..speedups.sample_rows import modes_kept
from ..training_args import FastTrainingArguments
from ..whole_files import write_text
from .planned import PlannedRun
from .rungs import ADVICE, BATCH_NORMS
from .team import Team

logger = logging.getLogger(__name__)

FOLDER = "batch_sizes"
FORMAT = 1
RESERVE = 0.03  # of the device's memory, for what fragmentation loses while training

TryBatch = Callable[[Sequence[int], int], None]


@dataclass(frozen=True)
class Sizes:
    """What may be tried, and what it is a part of.

    Attributes:
        candidates: rows (tokens, where `unit` says so) on one device at a time, ascending.
        whole: of an optimizer step on one device, which every candidate divides.
    """

    candidates: list[int]
    whole: int
    unit: str = "rows"

    def passes(self, size: int) -> int:
        """Micro-batches of an optimizer step with `size` at a time."""
        return self.whole // size


def list_sizes(args: FastTrainingArguments) -> Sizes:
    """Divisors of the rows of an optimizer step; of its tokens, halves of it down to the longest row's by far."""
    if args.max_tokens_per_batch:
        whole = args.max_tokens_per_batch * args.gradient_accumulation_steps
        halves = [whole >> i for i in range(whole.bit_length()) if whole % (1 << i) == 0]
        return Sizes(sorted(halves), whole, "tokens")
    whole = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return Sizes([size for size in range(1, whole + 1) if whole % size == 0], whole)


def longest_rows(tokens: np.ndarray, size: int, unit: str) -> list[int] | None:
    """Rows whose batch takes as much as any of `size` can.

    Args:
        tokens: (rows, inputs), of every training row.
        size: rows, or tokens of all inputs together, padding included.

    Returns:
        Row numbers, the row with the longest of each input among them, since padded batches are as wide; None where
        `size` tokens hold not even the longest row.
    """
    order = np.argsort(-tokens.sum(1), kind="stable")
    widest = list(dict.fromkeys(int(row) for row in tokens.argmax(0)))
    number = size if unit == "rows" else size // int(tokens.max(0).sum())
    if number < 1:
        return None
    chosen = [*widest, *(row for row in order.tolist() if row not in widest)][:number]
    return chosen + [chosen[0]] * (number - len(chosen) if unit == "rows" else 0)


class BatchFinder:
    """Finds the largest batch by trying, on all processes alike.

    Args:
        args: of the run, which keeps the rows of a step.
        team: its processes.
        planned: the plan, whose decision `find_batch_size` says whether, and takes what was found.

    Attributes:
        tried: every try of the last search: size, and whether it fits.

    Raises (from `find` and `settle`):
        MemoryExhausted: not even one row fits.
    """

    def __init__(self, args: FastTrainingArguments, team: Team, planned: PlannedRun):
        self._args, self._team, self._planned = args, team, planned
        self.is_on = planned.applied("find_batch_size")
        self.tried: list[dict[str, Any]] = []
        self._said = ""

    def settle(self, tokens: np.ndarray, identity: dict[str, Any], try_rows: TryBatch) -> None:
        """Sets Trainer's fields to the largest batch that fits, and to as many passes as its step then takes."""
        sizes, found = self.find(tokens, identity, try_rows)
        args = self._args
        if sizes.unit == "tokens":
            args.max_tokens_per_batch = found
            self._planned.plan["token_budget"].settings["max_tokens"] = found  # which the loader reads
        else:
            args.per_device_train_batch_size = found
        args.gradient_accumulation_steps = sizes.passes(found)
        self._planned.record(
            "find_batch_size", **{sizes.unit: found}, passes=sizes.passes(found), tried=list(self.tried)
        )

    def find(self, tokens: np.ndarray, identity: dict[str, Any], try_rows: TryBatch) -> tuple[Sizes, int]:
        """The sizes that there are, and the largest that fits.

        Args:
            tokens: (rows, inputs), of every training row.
            identity: what the result depends on, JSON-able.
            try_rows: forward and backward on these rows, that often; raises what is out of memory.
        """
        sizes = list_sizes(self._args)
        rows = {size: longest_rows(tokens, size, sizes.unit) for size in sizes.candidates}
        sizes = Sizes([size for size in sizes.candidates if rows[size]], sizes.whole, sizes.unit)
        if not sizes.candidates:
            raise MemoryExhausted(f"{sizes.whole} tokens per step are fewer than the longest row has.")
        self.tried = []
        path = self._path(identity)
        known = self._read(path)
        if known in sizes.candidates and self._fits(known, sizes, rows, try_rows, "found before"):
            return sizes, known
        found = 0
        for size in sizes.candidates:
            if known in sizes.candidates and size >= known:  # which did not fit
                break
            if not self._fits(size, sizes, rows, try_rows, ""):
                break
            found = size
        if not found:
            least = "one" if sizes.unit == "rows" else f"{sizes.candidates[0]} tokens"
            raise MemoryExhausted(f"There is no room for {least} of the longest rows ({self._said}). {ADVICE}")
        if self._team.is_main:
            self._keep(path, {"format": FORMAT, "size": found, "tried": self.tried, **identity})
        return sizes, found

    def _fits(self, size: int, sizes: Sizes, rows: dict[int, Any], try_rows: TryBatch, remark: str) -> bool:
        """Whether `size` fits on all processes; says so."""
        self._said = ""
        try:
            # Twice where a step takes several: gradients are then there while activations are kept.
            attempt(lambda: try_rows(rows[size], min(2, sizes.passes(size))))
        except DidNotFit as failure:
            self._said = str(failure)
        fits = not self._team.agree([bool(self._said)])[0]
        self._said = self._said or ("" if fits else "out of memory on another process")
        self.tried.append({"size": size, "fits": fits})
        if self._team.is_main:
            words = "fits" if fits else f"does not fit ({self._said})"
            logger.warning("find_batch_size: %d %s at a time%s: %s", size, sizes.unit, remark and f", {remark}", words)
        return fits

    # --- what earlier runs found ------------------------------------------------------------------------------------

    def _path(self, identity: dict[str, Any]) -> Path:
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
        return Path(self._args.embedding_cache_dir).expanduser() / FOLDER / f"{digest}.json"

    def _read(self, path: Path) -> int:
        """What the main process finds there; 0 where there is nothing, or nothing of use."""

        def read() -> int:
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return 0
            size = kept.get("size") if isinstance(kept, dict) and kept.get("format") == FORMAT else 0
            return size if type(size) is int else 0

        return self._team.on_main(read)

    def _keep(self, path: Path, content: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(content, indent=1))
        except OSError as error:
            logger.warning("What fits is not kept for later runs: %s: %s.", path, error.strerror)


def check_batches_alike(model: nn.Module, counts_items: bool) -> None:
    """Warns where batches of another size may learn something else.

    Args:
        counts_items: whether the loss is a sum over items by their number in the step.

    Raises:
        ArgumentError: the model normalises over batches.
    """
    if any(isinstance(part, BATCH_NORMS) for part in model.modules()):
        raise ArgumentError(
            "--find_batch_size: the model normalises over batches, so that it learns something else with others. Give "
            "--per_device_train_batch_size."
        )
    if not counts_items:
        logger.warning(
            "find_batch_size: the loss of %s is not known to be a sum over the items of a step. If it is a mean over a "
            "batch, numbers change a little with the batch.",
            type(model).__name__,
        )


def count_widths(dataset: Any, collator: Any, length_column: str) -> np.ndarray:
    """Tokens of every row, (rows, inputs), as far as they are known; elsewhere 1, and a warning."""
    try:
        return count_tokens(dataset, collator, length_column)
    except DataError:
        logger.warning("find_batch_size: lengths of rows are not known, so the first rows stand for the longest.")
        return np.ones((len(dataset), 1), np.int64)


def fetch_rows(dataset: Any, rows: Sequence[int]) -> Any:
    """Rows of a map-style dataset as a data loader hands them to a collator."""
    fetch = getattr(dataset, "__getitems__", None)
    return fetch([*rows]) if fetch else [dataset[row] for row in rows]


def identify(facts: dict[str, Any], hardware: Hardware) -> dict[str, Any]:
    """What decides which batch fits, of the facts of a run (`describe_run`) and its device; JSON-able."""
    arguments = {name: facts["arguments"].get(name) for name in ("optim", "optim_ext", "bf16", "fp16", "tf32")}
    kept = {name: facts[name] for name in ("model", "data", "collator", "speedups", "world_size")}
    device = {"name": hardware.name, "memory_gib": hardware.memory_gib}
    return {**kept, "arguments": arguments, "device": device, "torch": facts["versions"]["torch"]}


@contextmanager
def trial(model: nn.Module, device: torch.device, num_bytes: int) -> Iterator[None]:
    """Within it a model may be trained as a try, beside `num_bytes` that are taken up; afterwards it is as before.

    Buffers and whether the model trains are put back; gradients are taken away. Random states are the caller's to keep.
    """
    room = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    with modes_kept(model):
        model.train()
        try:
            yield
        finally:
            del room
            model.zero_grad(set_to_none=True)


def bytes_beside(model: nn.Module, args: FastTrainingArguments, planned: PlannedRun) -> int:
    """Bytes that a training step holds on the device beside weights, gradients and activations."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    states, _ = optimizer_bytes(model, optimizer, planned.applied("muon"), args.block_pattern)
    beside = 0 if planned.applied("cpu_offload") else states
    if args.world_size > 1:  # DistributedDataParallel's copy of every gradient
        beside += gradient_bytes(model)
    memory_gib = detect_hardware(args.device).memory_gib if torch.device(args.device).type == "cuda" else 0.0
    return int(beside + RESERVE * (memory_gib or 0.0) * 2**30)

"""Speed-ups that Trainer has, and that are switched on where they pay: its sampler, its loaders; and embedding once."""

from __future__ import annotations

from typing import Any, ClassVar

from . import packing
from .base import Context, Decision, Kind, Run, off

MAX_WORKERS = 8
PREFETCH_FACTOR = 4
CPU_TOKENS_PER_BATCH = 2048  # larger batches leave the CPU's caches: measured 1.7x slower at 26,000 tokens
GPU_TOKENS_PER_BATCH = 65536  # halves itself where it does not fit


class LengthGrouping:
    """Batches of similar length, so that little of a batch is padding.

    Class I in expectation: each epoch still sees every row once, in random order of batches; which rows share a batch
    is correlated with length. That is not always harmless: a small causal model that learns to copy rows of 3 to 8
    words (`recipes/examples/causal_lm.py`) learned less in as many steps, since each of its batches had one length.
    Effect: on proteins of 30 to 1024 residues, random batches are about 58 % padding, grouped ones 3 %. Not needed
    where sequences are packed, or where all inputs come from the embedding cache.
    """

    NAME: ClassVar[str] = "length_grouping"
    KIND: ClassVar[Kind] = "I"

    @classmethod
    def decide(cls, context: Context) -> Decision:
        """On where an encoder runs on batches whose padding is worth removing."""
        args, problem = context.args, None
        if context.user_set("train_sampling_strategy"):
            problem = f"--train_sampling_strategy {args.train_sampling_strategy} was asked for"
        elif not context.wants(cls.NAME, cls.KIND):
            return off(cls.NAME, cls.KIND)
        elif args.max_tokens_per_batch is not None and "token_budget" not in (args.without or []):
            problem = "--max_tokens_per_batch sorts rows into batches itself"
        elif context.data.streaming:
            problem = "a stream's lengths are not known in advance"
        elif context.caches_all_inputs:
            problem = "no encoder runs while training: nothing is padded"
        elif not context.data.has_lengths:
            problem = (
                f"the dataset has no column '{args.length_column_name}' (--length_column_name); rows of one size, as "
                "images are, need none"
            )
        elif context.low_padding:
            problem = context.low_padding
        elif set(context.model.families) <= set(packing.FAMILIES) and packing.decide(context).status == "applied":
            problem = "packed batches have no padding: rows stay in random order"
        if problem:
            return Decision(cls.NAME, cls.KIND, "skipped", problem)
        padding = context.data.padding_share_random
        evidence = {} if padding is None else {"padding_share_random": round(padding, 4)}
        settings = {"train_sampling_strategy": "group_by_length"}
        return Decision(cls.NAME, cls.KIND, "applied", "groups rows of similar length", settings, evidence)

    @classmethod
    def apply(cls, decision: Decision, run: Run) -> Decision:
        """Sets Trainer's own sampler."""
        return set_fields(decision, run)


class DataLoading:
    """Data loading that keeps the device busy: workers from the cores there are, pinned memory, asynchronous copies.

    Class I. Effect: batches are tokenized while the device computes, and copied while it computes.
    Hardware: workers pay where there are cores left over; pinning and non-blocking copies only with a GPU. With cached
    embeddings a batch is a table look-up in this process, and workers would only add copies.
    """

    NAME: ClassVar[str] = "data_loading"
    KIND: ClassVar[Kind] = "I"

    @classmethod
    def decide(cls, context: Context) -> Decision:
        """Leaves alone every field that the user set, and pinning where something switched it off."""
        if not context.wants(cls.NAME, cls.KIND):
            return off(cls.NAME, cls.KIND)
        on_gpu = context.hardware.kind == "cuda"
        pinned = on_gpu and context.args.dataloader_pin_memory
        workers, why = cls._num_workers(context, on_gpu)
        settings: dict[str, Any] = {
            "dataloader_num_workers": workers,
            "dataloader_pin_memory": pinned,
            "dataloader_prefetch_factor": PREFETCH_FACTOR if workers else None,
        }
        if not context.user_set("accelerator_config"):
            settings["non_blocking"] = on_gpu
        settings = {name: value for name, value in settings.items() if not context.user_set(name)}
        reason = f"{workers} workers ({why}), pinned memory {'on' if pinned else 'off'}"
        return Decision(cls.NAME, cls.KIND, "applied", reason, settings)

    @staticmethod
    def _num_workers(context: Context, on_gpu: bool) -> tuple[int, str]:
        if context.user_set("dataloader_num_workers"):
            return context.args.dataloader_num_workers, "asked for"
        if context.caches_all_inputs:
            return 0, "batches are look-ups in the embedding cache"
        # On a CPU the cores do the training; tokenization by table look-up takes well under 1 % of a step.
        per_process = context.cpu_cores // max(1, context.world_size)
        return min(MAX_WORKERS, max(0, per_process - 1)) if on_gpu else 0, f"{context.cpu_cores} cores"

    @classmethod
    def apply(cls, decision: Decision, run: Run) -> Decision:
        """Sets Trainer's own fields; `non_blocking` goes to Accelerate."""
        return set_fields(decision, run)


class EmbeddingCache:
    """Embed once: the output of a frozen encoder is computed once per distinct sequence, and read from then on.

    Class I. Effect: an epoch of head training reads rows of a table instead of running encoders; a second run with the
    same encoder, tokenizer, pooling and precision encodes nothing.
    Cost: width x 4 bytes of disk per distinct sequence, and the encoding itself, once.
    Conflicts: encoders that train (LoRA, full) change every step and are never cached; streams are not known in
    advance.
    """

    NAME: ClassVar[str] = "embedding_cache"
    KIND: ClassVar[Kind] = "I"

    @classmethod
    def decide(cls, context: Context) -> Decision:
        """Applies to the frozen inputs of a model with an `encode` method, on data that can be read twice."""
        if not context.wants(cls.NAME, cls.KIND):
            return off(cls.NAME, cls.KIND)
        frozen = list(context.model.frozen_inputs)
        if not frozen:
            return Decision(cls.NAME, cls.KIND, "skipped", "no frozen encoder")
        if context.data.streaming:
            return Decision(cls.NAME, cls.KIND, "skipped", "a stream's sequences are not known in advance")
        tokens = CPU_TOKENS_PER_BATCH if context.hardware.kind == "cpu" else GPU_TOKENS_PER_BATCH
        settings = {"inputs": frozen, "tokens_per_batch": tokens, "cache_dir": context.args.embedding_cache_dir}
        distinct = context.data.distinct_inputs
        counts = [f"{distinct[name]:,} {name}" for name in frozen if name in distinct]
        reason = f"frozen: {', '.join(counts or frozen)}" + (" distinct" if counts else "")
        return Decision(cls.NAME, cls.KIND, "applied", reason, settings)

    @classmethod
    def apply(cls, decision: Decision, run: Run) -> Decision:
        """Nothing yet: `Embedder` encodes when a dataset is first used."""
        return decision


def set_fields(decision: Decision, run: Run) -> Decision:
    """Sets Trainer's fields of the same names as the settings; `non_blocking` is one of Accelerate's."""
    for name, value in decision.settings.items():
        setattr(run.args.accelerator_config if name == "non_blocking" else run.args, name, value)
    return decision

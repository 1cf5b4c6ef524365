"""Speed-ups that set arguments, or only ask for what a component of `hf_ext/training` then does.

Trainer's sampler and loaders where they pay; embedding once; steps that do not fit; DDP's gradients.
"""

from __future__ import annotations

from functools import partial

from ..errors import PlanRefused
from ..files import Json
from ..models import PACKED_FAMILIES
from ..processes import fsdp_version
from .base import Context, Decision, Run, Speedup, applied, off, refused, skipped
from .packing import Packing

MAX_WORKERS = 8
PREFETCH_FACTOR = 4
CPU_TOKENS_PER_BATCH = 2048  # larger batches leave the CPU's caches: measured 1.7x slower at 26,000 tokens
GPU_TOKENS_PER_BATCH = 65536  # halves itself where it does not fit


class SetsFields(Speedup):
    """Those whose settings are fields."""

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Sets Trainer's fields of the same names as the settings; `non_blocking` is one of Accelerate's."""
        for name, value in decision.settings.items():
            setattr(run.args.accelerator_config if name == "non_blocking" else run.args, name, value)
        return decision


class LengthGrouping(SetsFields):
    """Batches of similar length, so that little of a batch is padding.

    Class I in expectation: each epoch still sees every row once, in random order of batches; which rows share a batch
    is correlated with length. That is not always harmless: a small causal model that learns to copy rows of 3 to 8
    words (`recipes/examples/causal_lm.py`) learned less in as many steps, since each of its batches had one length.
    Effect: on proteins of 30 to 1024 residues, random batches are about 58 % padding, grouped ones 3 %. Not needed
    where sequences are packed, or where all inputs come from the embedding cache.
    """

    NAME = "length_grouping"

    def decide(self, context: Context) -> Decision:
        """Decides: on where an encoder runs on batches whose padding is worth removing."""
        args = context.args
        if context.user_set("train_sampling_strategy"):
            return skipped(f"--train_sampling_strategy {args.train_sampling_strategy} was asked for")
        if not self.wanted(context):
            return off()
        if args.max_tokens_per_batch is not None and "token_budget" not in (args.without or []):
            return skipped("--max_tokens_per_batch sorts rows into batches itself")
        if context.data.streaming:
            return skipped("a stream's lengths are not known in advance")
        if context.caches_all_inputs:
            return skipped("no encoder runs while training: nothing is padded")
        if not context.data.has_lengths:
            column = f"'{args.length_column_name}' (--length_column_name)"
            return skipped(f"the dataset has no column {column}; rows of one size, as images are, need none")
        if context.low_padding:
            return skipped(context.low_padding)
        if set(context.model.families) <= set(PACKED_FAMILIES) and Packing().decide(context).status == "applied":
            return skipped("packed batches have no padding: rows stay in random order")
        padding = context.data.padding_share_random
        evidence = {} if padding is None else {"padding_share_random": round(padding, 4)}
        settings = {"train_sampling_strategy": "group_by_length"}
        return applied("groups rows of similar length", settings, evidence)


class LengthBuckets(Speedup):
    """Batches of few widths, for compiled layers: `--pad_to_multiple_of`.

    Class I: padding is left out of attention, losses and means. Effect: batches of proteins of up to 1,024 residues
    have 16 widths with 64, in place of a thousand. CUDA graphs (`--compile_mode`) are recorded once for each.
    Cost: layers compute on the padding; the plan says which share of a random batch it is.
    """

    NAME = "length_buckets"

    def decide(self, context: Context) -> Decision:
        """Decides: on where the flag is given, refused where nothing would be padded."""
        args = context.args
        multiple = args.pad_to_multiple_of
        if multiple is None or self.left_out(context):
            return off()
        asked = f"--pad_to_multiple_of {multiple}"
        if context.caches_all_inputs:
            return refused(f"{asked}: no encoder runs while training, so nothing is padded")
        if args.max_tokens_per_batch:
            return refused(f"{asked}: --max_tokens_per_batch counts tokens without it. Leave one of them out")
        if Packing().decide(context).status == "applied":
            return refused(f"{asked}: packed rows have no padding. Add --without packing")
        share = context.data.padding_share_random
        cost = "" if share is None else f": {share:.1%} of a random batch is padding"
        return applied(f"widths are multiples of {multiple}{cost}", {"multiple": multiple})

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Sets what the collator, or its tokenizers, pad to.

        Raises:
            PlanRefused: there is nothing to set on a collator of this class.
        """
        tokenizers = getattr(run.collator, "tokenizers", {"": run.collator})
        for padder in tokenizers.values():
            before = getattr(padder, "pad_to_multiple_of", False)
            if before is False:
                raise PlanRefused(f"--pad_to_multiple_of: {type(padder).__name__} has no such attribute. Pad in it.")
            run.on_end(partial(setattr, padder, "pad_to_multiple_of", before))
            padder.pad_to_multiple_of = decision.settings["multiple"]
        return decision


class DataLoading(SetsFields):
    """Data loading that keeps the device busy: workers from the cores there are, pinned memory, asynchronous copies.

    Class I. Effect: batches are tokenized while the device computes, and copied while it computes.
    Hardware: workers pay where there are cores left over; pinning and non-blocking copies only with a GPU. With cached
    embeddings a batch is a table look-up in this process, and workers would only add copies.
    """

    NAME = "data_loading"
    predicts = True

    def decide_wanted(self, context: Context) -> Decision:
        """Leaves alone every field that the user set, and pinning where something switched it off."""
        on_gpu = context.hardware.kind == "cuda"
        pinned = on_gpu and context.args.dataloader_pin_memory
        workers, why = self._num_workers(context, on_gpu)
        settings: Json = {
            "dataloader_num_workers": workers,
            "dataloader_pin_memory": pinned,
            "dataloader_prefetch_factor": PREFETCH_FACTOR if workers else None,
        }
        if not context.user_set("accelerator_config"):
            settings["non_blocking"] = on_gpu
        settings = {name: value for name, value in settings.items() if not context.user_set(name)}
        return applied(f"{workers} workers ({why}), pinned memory {'on' if pinned else 'off'}", settings)

    @staticmethod
    def _num_workers(context: Context, on_gpu: bool) -> tuple[int, str]:
        if context.user_set("dataloader_num_workers"):
            return context.args.dataloader_num_workers, "asked for"
        if context.caches_all_inputs:
            return 0, "batches are look-ups in the embedding cache"
        # On a CPU the cores do the training; tokenization by table look-up takes well under 1 % of a step.
        per_process = context.cpu_cores // max(1, context.world_size)
        return min(MAX_WORKERS, max(0, per_process - 1)) if on_gpu else 0, f"{context.cpu_cores} cores"


class EmbeddingCache(Speedup):
    """Embed once: the output of a frozen encoder is computed once per distinct sequence, and read from then on.

    Class I. Effect: an epoch of head training reads rows of a table instead of running encoders; a second run with the
    same encoder, tokenizer, pooling and precision encodes nothing.
    Cost: width x 4 bytes of disk per distinct sequence, where residues have labels width x 2 for each residue (1.8 GB
    for 11,000 proteins of 250 residues at width 320), and the encoding itself, once.
    Conflicts: encoders that train (LoRA, full) change every step and are never cached; streams are not known in
    advance.
    """

    NAME = "embedding_cache"
    predicts = True

    def decide_wanted(self, context: Context) -> Decision:
        """Applies to the frozen inputs of a model with an `encode` method, on data that can be read twice."""
        frozen = list(context.model.frozen_inputs)
        if not frozen:
            return skipped("no frozen encoder")
        if context.data.streaming:
            return skipped("a stream's sequences are not known in advance")
        tokens = CPU_TOKENS_PER_BATCH if context.hardware.kind == "cpu" else GPU_TOKENS_PER_BATCH
        settings = {"inputs": frozen, "tokens_per_batch": tokens, "cache_dir": context.args.embedding_cache_dir}
        distinct = context.data.distinct_inputs
        counts = [f"{distinct[name]:,} {name}" for name in frozen if name in distinct]
        return applied(f"frozen: {', '.join(counts or frozen)}" + (" distinct" if counts else ""), settings)


class Ddp(Speedup):
    """DDP whose gradients live where they are sent from.

    Class I. Effect: gradients are views of the buckets that processes exchange, not copies: 4 bytes per trained weight
    less, and one copy of each (`gradient_as_bucket_view`).
    Hardware: any, with more than one process. Trainer lets DDP walk the graph of every forward pass for weights that
    get no gradient; `--ddp_find_unused_parameters false` ends that where all that train get one (`sharding` then
    freezes ESM's contact head, which no loss reaches).
    """

    NAME = "ddp"

    def decide_wanted(self, context: Context) -> Decision:
        """Decides: on under DDP."""
        if context.world_size == 1:
            return off("one process")
        if fsdp_version(context.args) or context.args.deepspeed_plugin is not None:
            return skipped("weights or gradients are split: not DDP")
        return applied("gradients are views of what is exchanged")

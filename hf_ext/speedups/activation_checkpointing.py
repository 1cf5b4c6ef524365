"""What layers keep for their backward pass, and what they compute again: a policy.

Class I: losses and gradients are those without, bit for bit, with dropout too (but for a weight that a pass uses twice
under autocast, see `models/activation_checkpointing.py`). Of any model with repeated
layers: by transformers' own switch where it has one, else around each block that is found, or named by
`model.block_pattern` (`models/blocks.py`). `--activation_policy` says how much:
- `half` computes every second layer again; `attention` all but what attention puts out; `full` everything.
Effect and cost: `benchmarks/results/activation_checkpointing_cpu.json`; what a step takes under each says `hf-ext
doctor`. Goes with compiled blocks (`compile.py`). Attention is kept where it is one operation:
SDPA's kernels, flash-attn, `varlen`, `padded`, `blocked`.
With dropout of weights, or written out in products (`eager`), it is computed again. `blocked` then keeps no softmax,
and computes it once more in the backward pass, as flash attention does.
Conflicts: Trainer's own `--activation_checkpointing` (the same as `full`; it stays what it is where this is not asked
for), FSDP's, and `--torch_compile`, inside which operations cannot be named.
Evidence: how many layers are computed again.
"""

from __future__ import annotations

from functools import partial

from ..models.activation_checkpointing import set_policy, unset_policy
from ..processes.sharding import read_fsdp2
from .base import Context, Decision, Kind, Run, applied, cannot, off, refused, skipped

NAME = "activation_checkpointing"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """On where a policy was named; one that only a preset names gives way to Trainer's own switch."""
    args, policy = context.args, context.args.activation_policy
    if policy in (None, "none") or NAME in (args.without or []):
        return off()
    named = context.user_set("activation_policy")
    if args.activation_checkpointing or args.gradient_checkpointing:
        reason = "--activation_checkpointing true is Trainer's own form of --activation_policy full"
        if named:
            return refused(f"{reason}: give one of them")
        return off(reason)
    if not named and {"activation_checkpointing", "gradient_checkpointing"} & context.args.explicit_fields:
        return off("--activation_checkpointing false")
    if context.caches_all_inputs:
        return skipped("no encoder trains: there is nothing to compute again")
    problem = _problem(context)
    if problem:
        return cannot(problem, named)
    return applied(policy, {"policy": policy})


def _problem(context: Context) -> str | None:
    args = context.args
    fsdp2 = read_fsdp2(args)
    if fsdp2 and fsdp2.activation_checkpointing:
        return "fsdp_activation_checkpointing of the YAML computes every layer again: leave one of them out"
    if args.torch_compile and args.activation_policy == "attention":
        return (
            f"--torch_compile compiles the whole model, inside which --activation_policy {args.activation_policy} "
            "cannot name operations: use half or full, or --speedups compile, which compiles blocks"
        )
    return None


def apply(decision: Decision, run: Run) -> Decision:
    """Sets the policy on every layer that trains."""
    run.on_end(partial(unset_policy, run.model))
    layers = set_policy(run.model, decision.settings["policy"]) if run.model is not None else 0
    if not layers:
        return skipped("the model has no repeated layers that train: name them by model.block_pattern")
    return decision.with_evidence(layers=layers)

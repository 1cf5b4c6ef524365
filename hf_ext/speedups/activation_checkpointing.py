"""What layers keep for their backward pass, and what they compute again: a policy.

Class I: losses and gradients are those without, bit for bit, with dropout too (but for a weight that a pass uses twice
under autocast, see `models/activation_checkpointing.py`). Of any model with repeated
layers: by transformers' own switch where it has one, else around each block that is found, or named by
`--block_pattern` (`models/blocks.py`). `--activation_policy` says how much:
- `pointwise` keeps products of matrices and attention, and computes norms, GELU, rotation and casts again;
- `half` computes every second layer again; `attention` all but what attention puts out; `full` everything.
- `auto` with `--activation_budget_gb`: the first of `none` and these, in this order, whose activations fit.
Effect and cost: `benchmarks/results/activation_checkpointing_cpu.json`. Goes with compiled blocks but for `pointwise`
(`compile.py`). Attention is kept where it is one operation: SDPA's kernels, flash-attn, `varlen`, `padded`, `blocked`.
With dropout of weights, or written out in products (`eager`), it is computed again. `blocked` then keeps no softmax,
and computes it once more in the backward pass, as flash attention does.
Conflicts: Trainer's own `--activation_checkpointing` (the same as `full`; it stays what it is where this is not asked
for), FSDP's, and `--torch_compile`, inside which operations cannot be named.
Evidence: megabytes that one layer keeps, with and without, of up to four of the longest rows, and how much of its
forward FLOPs it does again. Cost: four passes of one layer; models that FSDP or DeepSpeed splits are not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..models.activation_bytes import LayerCost, measure_layer, predict_bytes
from ..models.activation_checkpointing import POLICIES, Policy, set_policy, trained_layers, unset_policy
from ..processes import read_fsdp2
from . import compile
from .base import Context, Decision, Kind, Run, Status, applied, cannot, off, refused, skipped
from .sample import Sample, find_samples, longest_rows, modes_kept

NAME = "activation_checkpointing"
KIND: Kind = "I"
NAMES_OPERATIONS = ("attention", "pointwise")
GB = 10**9
NO_LAYERS = "the model has no repeated layers that train: name them with --block_pattern"


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
    settings = {"policy": policy}
    if policy == "auto":  # what does not go with compiled blocks is not chosen, where these come
        settings["left_out"] = ["pointwise"] if compile.decide(context).status == "applied" else []
    return applied(policy, settings)


def _problem(context: Context) -> str | None:
    args = context.args
    fsdp2 = read_fsdp2(args)
    if fsdp2 and fsdp2.activation_checkpointing:
        return "fsdp_activation_checkpointing of the YAML computes every layer again: leave one of them out"
    if args.torch_compile and args.activation_policy in (*NAMES_OPERATIONS, "auto"):
        return (
            f"--torch_compile compiles the whole model, inside which --activation_policy {args.activation_policy} "
            "cannot name operations: use half or full, or --speedups compile, which compiles blocks"
        )
    return None


def apply(decision: Decision, run: Run) -> Decision:
    """Measures a layer of each encoder that trains, chooses where that is left to us, and sets the policy.

    Refused here: `auto` where nothing can be measured, or where nothing fits the budget.
    """
    if run.model is None or not trained_layers(run.model, run.args.block_pattern):
        return skipped(NO_LAYERS)
    policy, costs = decision.settings["policy"], _measure(run)
    if policy == "auto":
        decision = _choose(decision, run, costs)
        policy = decision.settings["policy"]
        if decision.status != "applied":
            return decision
    run.on_end(partial(unset_policy, run.model))
    num_layers = set_policy(run.model, policy, run.args.block_pattern)
    if not num_layers:
        return skipped(NO_LAYERS)
    return decision.with_evidence(layers=num_layers, **_evidence(costs, policy))


def _choose(decision: Decision, run: Run, costs: list[_Cost]) -> Decision:
    """The same decision with the policy that `auto` comes to."""
    num_measured = sum(part.num_layers for part in costs)
    num_layers = len(trained_layers(run.model, run.args.block_pattern))
    if num_measured < num_layers:
        reason = f"auto could measure {num_measured} of {num_layers} layers, for want of rows or a batch of them"
        reason += ": name a policy"
        return replace(decision, status="refused", reason=reason)
    names = [name for name in POLICIES if name not in decision.settings["left_out"]]
    predicted = {name: sum(part.predict(name) for part in costs) for name in names}
    policy = choose_policy(predicted, round(run.args.activation_budget_gb * GB))
    if policy is None:
        return replace(decision, status="refused", reason=_too_small(predicted, run.args))
    reason = f"{policy}, with {predicted[policy] / GB:.3g} GB kept of the largest batch"
    status: Status = "off" if policy == "none" else "applied"
    return replace(decision, status=status, reason=reason, settings={"policy": policy})


def choose_policy(predicted: Mapping[Policy, int], budget_bytes: int) -> Policy | None:
    """The policy that computes least again among those whose bytes fit; None where none does."""
    return next((policy for policy in POLICIES if predicted.get(policy, math.inf) <= budget_bytes), None)


def _too_small(predicted: Mapping[Policy, int], args: Any) -> str:
    least = min(predicted, key=lambda policy: predicted[policy])
    return (
        f"--activation_budget_gb {args.activation_budget_gb:g}: encoder layers keep "
        f"{predicted[least] / GB:.3g} GB even with {least}. Use a smaller --per_device_train_batch_size (or "
        "--max_tokens_per_batch), shorter sequences, or a larger budget"
    )


def _evidence(costs: list[_Cost], policy: str) -> dict[str, Any]:
    """Of the encoder whose layers keep most."""
    if not costs:
        return {"layer_mb": "not measured: no whole encoder and rows at hand"}
    part = max(costs, key=lambda cost: cost.layer.bytes_kept["none"] * cost.num_layers)
    kept = {name: round(part.layer.bytes_kept[name] / 1e6, 2) for name in (policy, "none")}
    return {
        "tokens": part.num_tokens,
        "layer_mb": kept[policy],
        "layer_mb_without": kept["none"],
        "recomputed_flops": part.layer.recomputed[policy],
    }


@dataclass(frozen=True)
class _Cost:
    """What one encoder's layers cost on the rows that were measured, and how many times those the largest batch is."""

    layer: LayerCost
    num_layers: int
    num_tokens: int
    scale: float

    def predict(self, policy: str) -> int:
        """Bytes of the largest batch."""
        return round(self.scale * predict_bytes(policy, self.layer.bytes_kept, self.num_layers))


def _measure(run: Run) -> list[_Cost]:
    """Of each encoder that trains, one layer of each kind and width, on up to four of the longest rows."""
    costs = []
    rows, pattern = longest_rows(run.train_dataset, run.collator, run.args.length_column_name), run.args.block_pattern
    with modes_kept(run.model):
        run.model.train()  # of an AffinityModel, frozen encoders stay in evaluation
        for sample in find_samples(run, rows):
            layers = trained_layers(sample.module, pattern)
            if not (sample.trains and layers):
                continue
            autocast = partial(torch.autocast, sample.device.type, sample.autocast, enabled=sample.autocast is not None)
            tokens = sample.num_tokens
            rows_read = sample.num_rows * tokens / (sample.num_read or tokens)
            budget = run.args.max_tokens_per_batch
            scale = budget / tokens if budget else run.args.per_device_train_batch_size / rows_read
            for called, args, kwargs, number in _first_calls(sample, layers):
                layer = measure_layer(sample.module, called, args, kwargs, autocast, pattern)
                costs.append(_Cost(layer, number, tokens, scale))
    return costs


def _first_calls(sample: Sample, layers: list[nn.Module]) -> list[list[Any]]:
    """A layer of each class and shape of states, what it is called with, and how often layers of this kind are."""
    calls: dict[Any, list[Any]] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        calls.setdefault((type(module), given[0].shape if given else None), [module, args, kwargs, 0])[-1] += 1

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            sample.states(sample.autocast)
    finally:
        for handle in handles:
            handle.remove()
    return [*calls.values()]

"""DDP that does not look for unused weights in every pass, and whose gradients live where they are sent from.

Class I. Effect: Trainer lets DDP walk the graph of every forward pass for weights that get no gradient; where all
trained weights get one, that is for nothing (`find_unused_parameters`). Gradients are views of the buckets that
processes exchange, not copies: 4 bytes per trained weight less, and one copy of each (`gradient_as_bucket_view`).
Which weights get a gradient is found in the graph of one pass over the first rows, as DDP finds it, and only for models
whose passes are all alike, under their own loss; elsewhere, and where a weight gets none, DDP goes on looking. ESM's
contact head, which no loss reaches, is left out of what DDP watches; it stays as trainable, and in checkpoints, as it
is on one process.
Hardware: any, with more than one process. What the user sets (`--ddp_find_unused_parameters`) is kept.
Evidence: how many weights DDP watches. Cost: one forward pass over two rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..models.wrapping import unused_parameters
from ..processes import fsdp_version
from .base import Context, Decision, Kind, Run, applied, off, recomputes, skipped
from .parity import one_line
from .sample import draws_kept, first_rows, make_batch, modes_kept

NAME = "ddp"
KIND: Kind = "I"
# Models whose every pass uses the same weights.
ALIKE = ("AffinityModel", "EsmForMaskedLM", "EsmForSequenceClassification", "EsmForTokenClassification")
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # what torch's DDP reads from the model that it wraps


def decide(context: Context) -> Decision:
    """On under DDP; the search for unused weights ends where the user left it open and the model's passes are alike."""
    args = context.args
    if not context.wants(NAME, KIND):
        return off()
    if context.world_size == 1:
        return off("one process")
    if fsdp_version(args) or args.deepspeed_plugin is not None:
        return skipped("weights or gradients are split: not DDP")
    views = "gradients are views of what is exchanged"
    if args.ddp_find_unused_parameters is not None:
        reason = f"{views}; --ddp_find_unused_parameters was set"
    elif recomputes(args):
        reason = f"{views}; activation checkpointing counts on every weight anyway"
    elif not set(ALIKE) & set(context.model.classes):
        reason = f"{views}; unused weights are looked for: passes of this model may differ"
    else:
        return applied(views, {"looks_once": True})
    return applied(reason, {"looks_once": False})


def apply(decision: Decision, run: Run) -> Decision:
    """Ends the search where one pass reaches every weight; `Replicated` tells accelerate about the views."""
    if not decision.settings["looks_once"] or run.model is None:
        return decision
    if run.own_loss is not None:
        return _goes_on(decision, f"the loss is the user's own ({run.own_loss})")
    ignored = unused_parameters(run.model)
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad and name not in ignored}
    try:
        reached = _reached_weights(run)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:  # rows that only Trainer's own collator takes
        return _goes_on(decision, f"no pass over the first rows ({one_line(error)})")
    lacking = [name for name, parameter in trained.items() if parameter not in reached]
    if lacking:
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return _goes_on(decision, f"{lacking[0]}{others} got no gradient")
    setattr(run.model, _IGNORED, [*ignored])
    run.on_end(partial(_forget, run.model))
    run.args.ddp_find_unused_parameters = False
    reason = f"{decision.reason}; no search for unused weights: one pass reached all that train"
    return replace(decision, reason=reason).with_evidence(watched=len(trained), left_out=len(ignored))


def search_again(model: nn.Module, handler: Any) -> None:
    """Takes the end of the search back, before accelerate wraps the model as `handler`, its DDP settings, says."""
    handler.find_unused_parameters = True
    _forget(model)


def _goes_on(decision: Decision, why: str) -> Decision:
    return replace(decision, reason=f"{decision.reason}; unused weights are looked for: {why}")


def _forget(model: nn.Module) -> None:
    vars(model).pop(_IGNORED, None)


def _reached_weights(run: Run) -> set[torch.Tensor]:
    """Weights in the graph of the loss of the first two rows; leaves no gradient, draws no number."""
    batch = make_batch(run, first_rows(run.train_dataset, 2))
    if batch is None:
        raise ValueError("no rows or no collator at hand")
    run.model.to(run.args.device)
    if hasattr(run.model, "attach_encoders"):
        run.model.attach_encoders()
    with modes_kept(run.model), draws_kept(run.args.device), torch.enable_grad():
        output = run.model.train()(**batch)
    loss = output["loss"] if isinstance(output, Mapping) else output[0]
    return _leaves(loss)


def _leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """Tensors whose gradient a backward pass from `loss` would fill in: DDP's own search."""
    waiting, seen, found = [loss.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        waiting += [follower for follower, _ in node.next_functions]
    return found

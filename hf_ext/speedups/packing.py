"""Batches without padding inside encoders."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ..errors import PlanRefused
from ..models import PACKED_FAMILIES, PaddingWatch, pack_encoders, unpack_encoders
from .attention import PACKED, Attention
from .base import OTHER_FORWARD, Context, Decision, Run, Settings, Speedup, applied, cannot, skipped
from .compile import Compile
from .evidence import parity


class Packing(Speedup):
    """Encoders that never see padding: sequences are packed at the encoder's door and unpacked at its exit.

    Class I. Effect: linear layers, norms and feed-forward layers compute on real tokens only, whatever shares a batch,
    so batches stay random and every optimizer step sees the rows that stock Trainer would show it. Positions, token
    dropout and attention stay those of each sequence (`models/kernels/packing.py`).
    Attention inside the packed row is the kernel that `attention` chose.
    Families: ESM-2, ESM C, BERT and T5 encoders. Evidence: parity with the padded encoder on the first real rows, and
    of the loss of the model around it on rows from all over the data: a mean without the mask, or labels where the mask
    is 0, would read empty positions. So might other rows, or a loss of the user's own, later: the gradient of empty
    positions is looked at in every step, and training ends before a step that read one (`PlanRefused`).
    Where sequences begin comes with the batches of `MaskedLMCollator`; with another collator, or where code of the
    user's own may change batches, it is read from the mask.
    Cost: one gather, one scatter and one look at their gradient per encoder; on a GPU two reads from the device per
    batch where it is read.
    """

    NAME = "packing"
    costs = {"pads": False}

    def decide_wanted(self, context: Context) -> Decision:
        """Decides: on where batches have padding and the chosen attention takes unpadded sequences."""
        named = context.names(self.NAME)
        if context.replicas:
            return cannot(context.replicas, named)
        packed = sorted(set(PACKED_FAMILIES) & set(context.model.families))
        if not packed:
            return cannot(f"known for encoders of type {', '.join(PACKED_FAMILIES)}; the model has none", named)
        if context.low_padding:
            return skipped(context.low_padding)
        kernel = Attention().decide(context).settings.get("kernel")
        if kernel is None:
            return cannot("the model's own attention takes no packed sequences: add attention to --speedups", named)
        if kernel not in PACKED:
            return cannot(f"attention '{kernel}' takes no packed sequences: use --attention auto", named)
        padding = context.data.padding_share_random
        evidence = {} if padding is None else {"padding_share_random": round(padding, 4)}
        settings = {"round_up": Compile().decide(context).status == "applied", "named": named}
        return applied(f"no layer of {' and '.join(packed)} encoders computes on padding", settings, evidence)

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Packs every encoder, now and when loaded later, if parity holds.

        Raises:
            PlanRefused: packing was asked for by name and is above the bound, or does not run here.
        """
        watch = PaddingWatch()
        pack: Any = partial(pack_encoders, round_up=decision.settings["round_up"], watch=watch)
        found = parity.prove(run, partial(pack, run.model))
        if found and found.problem:
            unpack_encoders(run.model)
            return _leave(decision, f"against padded encoders: {found.problem}", found.evidence())
        if run.change_encoders(pack) == 0:
            return _leave(decision, OTHER_FORWARD, {})
        run.padding = watch
        run.on_end(partial(unpack_encoders, run.model))
        run.ask_layout(packs=True, round_up=decision.settings["round_up"])
        return decision.with_evidence(**(found.evidence() if found else parity.NOT_MEASURED))

    def change(self, model: nn.Module, settings: Settings) -> None:
        """Packs all of its encoders."""
        pack_encoders(model)


def _leave(decision: Decision, reason: str, evidence: dict[str, Any]) -> Decision:
    if decision.settings["named"]:
        raise PlanRefused(f"packing: {reason}. Leave packing out.")
    return skipped(reason, evidence)

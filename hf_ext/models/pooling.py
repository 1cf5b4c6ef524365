"""From token states to one vector per sequence; padding never counts, special tokens where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import ArgumentError

POOLINGS = ("mean", "mean_tokens", "cls", "max")


def pool(states: torch.Tensor, batch: Mapping[str, torch.Tensor], method: str) -> torch.Tensor:
    """Pools token states in float32.

    Args:
        states: (n, tokens, width), any float dtype.
        batch: `attention_mask`, (n, tokens), 1 on all but padding, and `residue_mask`, (n, tokens), true on residues.
        method: "mean" or "max" over residues; "mean_tokens" over special tokens too, as `last_hidden_state.mean(1)` of
            one sequence without padding; "cls" for the first token (ESM and BERT's classification token; T5 has none,
            so its first residue).

    Returns:
        (n, width), float32.
    """
    if method == "cls":
        return states[:, 0].float()
    mask = batch["residue_mask"] if method != "mean_tokens" else batch["attention_mask"].bool()
    if method == "max":
        return states.float().masked_fill(~mask.unsqueeze(-1), float("-inf")).amax(1)
    if method not in POOLINGS:
        raise ArgumentError(f"pooling={method!r}: allowed are {', '.join(POOLINGS)}.")
    weights = mask.float()
    # Under Trainer's autocast, einsum would round states of magnitude 100 by 0.3.
    with torch.autocast(states.device.type, enabled=False):
        summed = torch.einsum("ntw,nt->nw", states.float(), weights)
    return summed / weights.sum(1, keepdim=True).clamp(min=1)

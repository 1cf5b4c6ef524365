"""torch's FlexAttention on packed rows, with a block mask that keeps sequences apart.

transformers' own `flex_attention` takes the packed row for one sequence. What it compiles is used here, with the mask
that it lacks, and with T5's bias, which is read pair by pair: no layer holds it for each sequence.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.integrations.flex_attention import compile_friendly_flex_attention

from ...data import VarlenLayout


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenLayout, scaling: float, bias: Tensor | None
) -> Tensor:
    """Computes attention of each sequence of a packed row to itself; compiled kernels skip blocks of others.

    Args:
        query, key, value: (T, heads, head size).
        segments: the layout of the T tokens.
        scaling: factor on the scores.
        bias: (1, heads, longest, longest) added to the scores of every sequence, or None.

    Returns:
        (T, heads, head size).

    Raises:
        NotImplementedError: on a CPU, where torch has no backward pass for it, and a gradient is wanted.

    Cost: the first batches are compiled. Not on CPUs, where torch 2.13 writes C++ that does not compile for rows of
    several lengths: there all T x T scores are in memory.
    """
    places, mask = _read_layout(segments.cu_seqlens, len(segments.slots))

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Of two tokens of different sequences some value, which the mask leaves out.
        return score + bias[0, head, places[query], places[key]]  # type: ignore[index]

    rows = [x.transpose(0, 1)[None] for x in (query, key, value)]
    options: dict[str, Any] = {"score_mod": None if bias is None else add_bias, "block_mask": mask, "scale": scaling}
    attend: Any = flex_attention if query.device.type == "cpu" else compile_friendly_flex_attention
    output = attend(*rows, **options)
    assert isinstance(output, Tensor)  # a pair only where the scores' normaliser is asked for
    return output[0].transpose(0, 1)


@lru_cache(maxsize=8)  # made once for the layers of an encoder: they are given the same tensor
def _read_layout(ends: Tensor, num_tokens: int) -> tuple[Tensor, BlockMask]:
    """Returns the place of each token in its sequence, (T,), int64, and which blocks of the row attend to which."""
    tokens = torch.arange(num_tokens, device=ends.device)
    sequences = torch.bucketize(tokens, ends[1:].long(), right=True)

    def is_one_sequence(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sequences[query] == sequences[key]

    places = tokens - ends[sequences]
    size = (num_tokens, num_tokens)
    mask = create_block_mask(is_one_sequence, None, None, *size, ends.device, _compile=ends.device.type != "cpu")
    return places, mask

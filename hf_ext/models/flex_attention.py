"""torch's FlexAttention on packed rows: the layout of a batch as a block mask, so that sequences do not meet.

transformers' `flex_attention` takes a packed row of an encoder for one sequence; what it compiles is used here, with
the mask that it lacks.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.flex_attention import compile_friendly_flex_attention

from ..data.segments import Segments

BLOCK = 128  # tokens; what flex's kernels skip or compute as a whole
_MEMO = "flex block mask"


def flex_packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float
) -> torch.Tensor:
    """Attention of each sequence of a packed row to itself.

    Args:
        query, key, value: (T, heads, head size).
        segments: the layout of the T tokens.
        scaling: factor on the scores.

    Returns:
        (T, heads, head size).

    Raises:
        NotImplementedError: on a CPU, where torch has no backward pass for it, and a gradient is wanted.

    Cost: compiled once on a GPU; on a CPU it is not compiled, and all T x T scores are in memory.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    mask = segments.memo.get(_MEMO)
    if mask is None:
        mask = segments.memo[_MEMO] = block_mask(segments)
    output: torch.Tensor | tuple[torch.Tensor, ...]
    if q.device.type == "cpu":
        output = flex_attention(q, k, v, block_mask=mask, scale=scaling)
    else:
        output = compile_friendly_flex_attention(q, k, v, q.requires_grad, block_mask=mask, scale=scaling)
    assert isinstance(output, torch.Tensor)  # a pair only where the scores' normaliser is asked for
    return output[0].transpose(0, 1)


def block_mask(segments: Segments) -> BlockMask:
    """Which blocks of `BLOCK` queries and keys hold a pair of one sequence, and which hold no other pairs.

    Sequences are contiguous, so the first and the last one of each block tell: (T / BLOCK)^2 comparisons, where
    `create_block_mask` would make T^2. No value is read from the device.
    """
    total = len(segments.slots)
    places = torch.arange(total, device=segments.cu_seqlens.device)
    sequence = torch.bucketize(places, segments.cu_seqlens[1:].long(), right=True)  # of each token; filling too
    first = sequence[::BLOCK]
    last = sequence[torch.arange(BLOCK - 1, total + BLOCK - 1, BLOCK, device=places.device).clamp(max=total - 1)]
    meets = (first[:, None] <= last) & (last[:, None] >= first)
    same = (first == last)[:, None] & (first == last) & (first[:, None] == first)
    if total % BLOCK:  # not the last block, which is not filled
        same[-1] = same[:, -1] = False

    def of_one_sequence(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return sequence[query] == sequence[key]

    partly, wholly = _indices(meets & ~same), _indices(same)
    lengths = (total, total)
    return BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=BLOCK, mask_mod=of_one_sequence, seq_lengths=lengths)


def _indices(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a (blocks, blocks) mask the number of keys' blocks per row, and their numbers first: (1, 1, ...), int32."""
    counts = dense.sum(1).to(torch.int32)
    order = dense.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]

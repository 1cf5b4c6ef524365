"""torch's FlexAttention on packed rows: the layout of a batch as a block mask, so that sequences do not meet.

T5's bias, which depends on the distance of two tokens, is read for each pair where it is needed: no layer holds it for
each sequence. transformers' `flex_attention` takes a packed row of an encoder for one sequence; what it compiles is
used here, with the mask that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.flex_attention import compile_friendly_flex_attention

from ..data.varlen_layout import VarlenLayout

BLOCK = 128  # tokens; what flex's kernels skip or compute as a whole
_MASK = "flex block mask"
_PLACES = "flex places"
ScoreMod = Callable[..., torch.Tensor]


def flex_packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: VarlenLayout,
    scaling: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence of a packed row to itself.

    Args:
        query, key, value: (T, heads, head size).
        segments: the layout of the T tokens.
        scaling: factor on the scores.
        bias: (1, heads, longest, longest) added to the scores of every sequence, or None.

    Returns:
        (T, heads, head size).

    Raises:
        NotImplementedError: on a CPU, where torch has no backward pass for it, and a gradient is wanted.

    Cost: compiled once on a GPU; on a CPU it is not compiled, and all T x T scores are in memory.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    mask = segments.memo.get(_MASK)
    if mask is None:
        mask = segments.memo[_MASK] = block_mask(segments)
    adds = None if bias is None else bias_mod(bias, segments)
    output: torch.Tensor | tuple[torch.Tensor, ...]
    if q.device.type == "cpu":
        output = flex_attention(q, k, v, adds, mask, scaling)
    else:
        options = {"score_mod": adds, "block_mask": mask, "scale": scaling}
        output = compile_friendly_flex_attention(q, k, v, q.requires_grad, **options)
    assert isinstance(output, torch.Tensor)  # a pair only where the scores' normaliser is asked for
    return output[0].transpose(0, 1)


def bias_mod(bias: torch.Tensor, segments: VarlenLayout) -> ScoreMod:
    """What adds to the score of two tokens the bias of their places in their sequence.

    Of tokens of two sequences it adds some value too; the block mask leaves these pairs out.
    """
    places = segments.memo.get(_PLACES)
    if places is None:
        total = torch.arange(len(segments.slots), device=bias.device)
        places = segments.memo[_PLACES] = total - segments.cu_seqlens[_sequences(segments)].long()

    def add(score: torch.Tensor, batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return score + bias[0, head, places[query], places[key]]  # type: ignore[index]

    return add


def _sequences(segments: VarlenLayout) -> torch.Tensor:
    """The number of each token's sequence, (T,); pieces of filling count on."""
    places = torch.arange(len(segments.slots), device=segments.cu_seqlens.device)
    return torch.bucketize(places, segments.cu_seqlens[1:].long(), right=True)


def block_mask(segments: VarlenLayout) -> BlockMask:
    """Which blocks of `BLOCK` queries and keys hold a pair of one sequence, and which hold no other pairs.

    Sequences are contiguous, so the first and the last one of each block tell: (T / BLOCK)^2 comparisons, where
    `create_block_mask` would make T^2. No value is read from the device.
    """
    total = len(segments.slots)
    sequence = _sequences(segments)
    first = sequence[::BLOCK]
    last = sequence[torch.arange(BLOCK - 1, total + BLOCK - 1, BLOCK, device=first.device).clamp(max=total - 1)]
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

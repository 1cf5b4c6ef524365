"""Attention whose cost grows with the number of tokens, not with its square: `phi(q) (phi(k)^T v)`, phi = elu + 1.

Source: Katharopoulos et al., arXiv:2006.16236. All functions compute in float32 (float64 stays), under autocast too:
sums over hundreds of tokens lose their small parts in half precision.
"""

from __future__ import annotations

import torch
from torch.nn import functional

CHUNK = 32  # tokens that attend to each other directly; earlier ones are seen through their sum
SMALLEST = 1e-6  # of a weights' sum, so that rows without a token give 0 and not NaN


def feature_map(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1, above 0; float32 (float64 stays)."""
    return functional.elu(x if x.dtype == torch.float64 else x.float()) + 1


def summarise(keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """All that linear attention keeps of tokens: sum of `phi(k)` with `[v, 1]`.

    Args:
        keys, values: (rows, heads, tokens, width).
        mask: (rows, tokens), non-zero where a token is; None: everywhere.

    Returns:
        (rows, heads, width, width + 1), float32; the last column sums the keys.
    """
    with _as_it_is(keys):
        mapped = feature_map(keys)
        if mask is not None:
            mapped = mapped * mask[:, None, :, None].ne(0)
        return mapped.transpose(2, 3) @ _with_ones(values, mapped)


def attend(queries: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """Each query's mean of the values in a summary, weighted by `phi(q) phi(k)`: (rows, heads, tokens, width)."""
    with _as_it_is(queries):
        return _divide(feature_map(queries) @ summary, queries)


def attend_causally(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, before: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's mean of the values up to and with its own.

    Args:
        queries, keys, values: (rows, heads, tokens, width).
        before: summary of earlier tokens, (rows, heads, width, width + 1); None: there are none.

    Returns:
        (rows, heads, tokens, width), in the dtype of `queries`; and the summary with these tokens, float32.

    Cost: `CHUNK` tokens are compared with each other, and a summary per chunk is kept: time and memory grow with the
    number of tokens.
    """
    with _as_it_is(queries):
        num_tokens = queries.shape[2]
        short = -num_tokens % min(CHUNK, num_tokens)
        mapped = [functional.pad(feature_map(x), (0, 0, 0, short)) for x in (queries, keys)]
        q, k = (x.unflatten(2, (-1, min(CHUNK, num_tokens))) for x in mapped)  # (rows, heads, chunks, chunk, width)
        v = functional.pad(_with_ones(values, mapped[1]), (0, 0, 0, short)).unflatten(2, (q.shape[2], -1))
        sums = (k.transpose(3, 4) @ v).cumsum(2)
        earlier = functional.pad(sums[:, :, :-1], (0, 0, 0, 0, 1, 0))
        if before is not None:
            earlier, sums = earlier + before[:, :, None], sums + before[:, :, None]
        total = (q @ k.transpose(3, 4)).tril() @ v + q @ earlier
        return _divide(total.flatten(2, 3)[:, :, :num_tokens], queries), sums[:, :, -1]


def _as_it_is(like: torch.Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, enabled=False)


def _with_ones(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return functional.pad(values.to(like.dtype), (0, 1), value=1.0)


def _divide(total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (total[..., :-1] / total[..., -1:].clamp(min=SMALLEST)).to(like.dtype)

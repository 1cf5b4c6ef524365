"""The light Transformer: linear attention, and one layer's weights for all applications of it.

Linear attention is `phi(q) (phi(k)^T v)` with phi = elu + 1: its cost grows with the number of tokens, not with its
square (Katharopoulos et al., arXiv:2006.16236). It is computed in float32 (float64 stays), under autocast too:
sums over hundreds of tokens lose their small parts in half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...data import VarlenLayout
from .configuration import GeneratorConfig
from .parts import DecoderState, EncoderStates, add_sinusoids

CHUNK = 32  # tokens that attend to each other directly; earlier ones are seen through their sum
SMALLEST = 1e-6  # of a weights' sum, so that rows without a token give 0 and not NaN


def feature_map(x: Tensor) -> Tensor:
    """Computes elu(x) + 1, above 0; float32 (float64 stays)."""
    return functional.elu(x if x.dtype == torch.float64 else x.float()) + 1


def summarise(keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Computes all that linear attention keeps of tokens: sum of `phi(k)` with `[v, 1]`.

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


def attend(queries: Tensor, summary: Tensor) -> Tensor:
    """Computes each query's mean of the values in a summary, weighted by `phi(q) phi(k)`, of the shape of `query`."""
    with _as_it_is(queries):
        return _divide(feature_map(queries) @ summary, queries)


def attend_causally(
    queries: Tensor, keys: Tensor, values: Tensor, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes each token's mean of the values up to and with its own.

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

        def chunked(x: Tensor) -> Tensor:  # (rows, heads, chunks, chunk, width)
            return functional.pad(x, (0, 0, 0, short)).unflatten(2, (-1, min(CHUNK, num_tokens)))

        q = chunked(feature_map(queries))
        k = chunked(feature_map(keys))
        v = chunked(_with_ones(values, k))
        sums = (k.transpose(3, 4) @ v).cumsum(2)
        earlier = functional.pad(sums[:, :, :-1], (0, 0, 0, 0, 1, 0))
        if before is not None:
            earlier = earlier + before[:, :, None]
            sums = sums + before[:, :, None]
        total = (q @ k.transpose(3, 4)).tril() @ v + q @ earlier
        return _divide(total.flatten(2, 3)[:, :, :num_tokens], queries), sums[:, :, -1]


def _as_it_is(like: Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, enabled=False)


def _with_ones(values: Tensor, like: Tensor) -> Tensor:
    return functional.pad(values.to(like.dtype), (0, 1), value=1.0)


def _divide(total: Tensor, like: Tensor) -> Tensor:
    return (total[..., :-1] / total[..., -1:].clamp(min=SMALLEST)).to(like.dtype)


class LinearAttention(nn.Module):
    """The four linear maps around linear attention."""

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.num_heads = config.num_heads
        width = config.d_model
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def split(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Maps (rows, tokens, d_model) to (rows, heads, tokens, width), through one of the maps."""
        return linear(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Maps back to (rows, tokens, d_model), through the last map."""
        return self.o(x.transpose(1, 2).flatten(2))

    def summarise(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Returns what attention keeps of the tokens `x`: see `summarise`."""
        return summarise(self.split(self.k, x), self.split(self.v, x), mask)


class FeedForward(nn.Module):
    """Pre-norm, two linear maps with a ReLU between them, dropout."""

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model)
        self.inner = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(functional.relu(self.inner(self.norm(x))))
        return x + self.dropout(self.outer(hidden))


class LightEncoder(nn.Module):
    """One layer, applied `num_encoder_layers` times. Cost: grows with the number of tokens, not with its square."""

    main_input_name = "input_ids"  # transformers asks

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.num_applications = config.num_encoder_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.RMSNorm(config.d_model)
        self.attention = LinearAttention(config)
        self.feed_forward = FeedForward(config)
        self.final_norm = nn.RMSNorm(config.d_model)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, layout: VarlenLayout | None = None
    ) -> EncoderStates:
        """Encodes k antigens: (k, tokens, d_model). Positions count tokens, so padding may stand on either side."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.ne(0).long()
        embedded = self.embed_tokens(input_ids)
        x = self.dropout(add_sinusoids(embedded, mask.cumsum(1) - 1))
        for _ in range(self.num_applications):
            normed = self.norm(x)
            seen = attend(self.attention.split(self.attention.q, normed), self.attention.summarise(normed, mask))
            x = self.feed_forward(x + self.dropout(self.attention.join(seen)))
        return EncoderStates(last_hidden_state=self.final_norm(x))


class LightState(DecoderState):
    """`antigen`: the summary of the encoder's states; `sums`: of the tokens so far, one per application."""

    def __init__(self, antigen: Tensor, num_applications: int):
        super().__init__()
        self.antigen = antigen
        self.sums: list[Tensor | None] = [None] * num_applications

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the beams that go on. The antigen's summary stays: beams of a row have one antigen."""
        self.sums = [None if one is None else one.index_select(0, beam_idx) for one in self.sums]


class LightDecoder(nn.Module):
    """One layer, applied `num_decoder_layers` times: causal linear attention, attention to the antigen, feed-forward.

    A token costs the same wherever in the sequence it stands: earlier ones are seen through sums of fixed size.
    """

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.num_applications = config.num_decoder_layers
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.RMSNorm(config.d_model)
        self.cross_norm = nn.RMSNorm(config.d_model)
        self.attention = LinearAttention(config)
        self.cross_attention = LinearAttention(config)
        self.feed_forward = FeedForward(config)
        self.final_norm = nn.RMSNorm(config.d_model)

    def forward(
        self,
        embedded: Tensor,
        encoded: EncoderStates,
        attention_mask: Tensor | None = None,
        past: LightState | None = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, LightState | None]:
        """Returns (rows, tokens, d_model), and the sums after them if `use_cache`; arguments as of `LstmDecoder`."""
        states: Any = encoded.last_hidden_state
        state = past or LightState(self.cross_attention.summarise(states, attention_mask), self.num_applications)
        positions = state.num_tokens + torch.arange(embedded.shape[1], device=embedded.device)
        x = self.dropout(add_sinusoids(embedded, positions))
        for number in range(self.num_applications):
            layer = self.attention
            normed = self.norm(x)
            q = layer.split(layer.q, normed)
            k = layer.split(layer.k, normed)
            v = layer.split(layer.v, normed)
            seen, state.sums[number] = attend_causally(q, k, v, state.sums[number])
            x = x + self.dropout(layer.join(seen))
            queries = self.cross_attention.split(self.cross_attention.q, self.cross_norm(x))
            x = x + self.dropout(self.cross_attention.join(attend(queries, state.antigen)))
            x = self.feed_forward(x)
        state.num_tokens += embedded.shape[1]
        return self.dropout(self.final_norm(x)), state if use_cache else None

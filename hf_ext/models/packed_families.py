"""What the encoder of each family computes on a packed row (embedding, layers, last norm), and what it puts out.

transformers accepts packed inputs for these encoders and ignores them: proteins then attend to each other and share
positions and token dropout (models/esm/modeling_esm.py and its like, 5.24). Here each sequence keeps its own positions
(rotary for ESM-2 and ESM C, learned for BERT, relative bias for T5), its own token dropout and its own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
)
from transformers.models.bert.modeling_bert import BertModel
from transformers.models.esm.modeling_esm import EsmModel
from transformers.models.esmc.modeling_esmc import EsmcModel
from transformers.models.t5.modeling_t5 import T5Stack

from ..data.varlen_layout import VarlenLayout
from .attention import bias_for_layers

# From an encoder, the layout, padded (n, width) token ids and their mask, and what its layers and embeddings are given:
# the last states, packed.
PackedPass = Callable[[Any, VarlenLayout, torch.Tensor, "torch.Tensor | None", dict[str, Any], Any], torch.Tensor]
PutOut = Callable[[Any, torch.Tensor], Any]  # from an encoder and its last states, padded


def run_esm(encoder: Any, segments: VarlenLayout, ids: Any, mask: Any, embeds: Any, layers: Any) -> torch.Tensor:
    """ESM-2 and ESM-1b: embeddings of the padded rows, since token dropout counts the tokens of each."""
    hidden = segments.pack(encoder.embeddings(input_ids=ids, attention_mask=mask, **embeds))
    rotary = None
    if encoder.position_embedding_type == "rotary":
        rotary = encoder.rotary_embeddings(hidden, segments.columns)
    return encoder.encoder(hidden, position_embeddings=rotary, **layers).last_hidden_state


def run_esmc(encoder: Any, segments: VarlenLayout, ids: Any, mask: Any, embeds: Any, layers: Any) -> torch.Tensor:
    """ESM C."""
    hidden = segments.pack(encoder.embed_tokens(ids))
    rotary = encoder.rotary_emb(hidden, segments.columns)
    for layer in encoder.layers:
        hidden = layer(hidden, None, position_embeddings=rotary, **layers)
    return encoder.norm(hidden)


def run_bert(encoder: Any, segments: VarlenLayout, ids: Any, mask: Any, embeds: Any, layers: Any) -> torch.Tensor:
    """BERT: embeddings of the padded rows, whose columns are positions."""
    hidden = segments.pack(encoder.embeddings(input_ids=ids, **embeds))
    return encoder.encoder(hidden, **layers).last_hidden_state


def run_t5(encoder: Any, segments: VarlenLayout, ids: Any, mask: Any, embeds: Any, layers: Any) -> torch.Tensor:
    """T5's encoder, with one bias for all layers and sequences."""
    hidden = encoder.dropout(segments.pack(encoder.embed_tokens(ids)))
    longest = segments.max_length
    # Distances are the same in every sequence, so the longest one's contains the others'.
    bias = encoder.block[0].layer[0].SelfAttention.compute_bias(longest, longest, device=hidden.device)
    bias = bias_for_layers(encoder.config._attn_implementation, bias, segments, _computing_dtype(hidden))
    for block in encoder.block:
        hidden = block(hidden, None, bias, None, None, None, **layers)[0]
    return encoder.dropout(encoder.final_layer_norm(hidden))


def _as_esmc(encoder: Any, states: torch.Tensor) -> BaseModelOutput:
    return BaseModelOutput(last_hidden_state=states)


def _as_t5(encoder: Any, states: torch.Tensor) -> BaseModelOutputWithPastAndCrossAttentions:
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)


def _with_pooler(encoder: Any, states: torch.Tensor) -> BaseModelOutputWithPoolingAndCrossAttentions:
    pooled = None if encoder.pooler is None else encoder.pooler(states)
    return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=states, pooler_output=pooled)


def _computing_dtype(hidden: torch.Tensor) -> torch.dtype:
    """What linear layers put out."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


PACKED: dict[type[nn.Module], tuple[PackedPass, PutOut]] = {
    EsmModel: (run_esm, _with_pooler),
    EsmcModel: (run_esmc, _as_esmc),
    BertModel: (run_bert, _with_pooler),
    T5Stack: (run_t5, _as_t5),
}
# Their model types, as configurations name them; mT5's and UMT5's stacks are classes of their own.
PACKED_FAMILIES = ("esm", "esmc", "bert", "t5")
BIASED = (T5Stack,)  # whose attention adds a bias to the scores

"""The Transformer: T5's stacks in the sizes of the specification, with an embedding and an output that are shared.

T5's layers are what was asked for: pre-norm, ReLU feed-forward layers that are not gated, relative positions, dropout
everywhere, SDPA. Nothing is written here but how they are put together. Rows
that share an antigen share its encoding; its keys and values are computed for each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from ...data import VarlenLayout
from .configuration import GeneratorConfig
from .parts import EncoderStates, add_sinusoids


def make_stack(config: GeneratorConfig, is_decoder: bool) -> T5Stack:
    """Builds T5's encoder or decoder, without dropout in attention."""
    inner = T5Config(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        d_kv=config.d_model // config.num_heads,
        d_ff=config.d_ff,
        num_heads=config.num_heads,
        num_layers=config.num_decoder_layers if is_decoder else config.num_encoder_layers,
        dropout_rate=config.dropout,
        feed_forward_proj="relu",
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        is_decoder=is_decoder,
        use_cache=is_decoder,
    )
    inner._attn_implementation = config._attn_implementation  # what was chosen for the whole model
    stack = T5Stack(inner)
    for module in stack.modules():
        if isinstance(module, T5Attention):
            module.dropout = 0.0
    return stack


class TransformerEncoder(nn.Module):
    """Runs T5's encoder over the antigen's tokens; `hf_ext.models.kernels.packing` knows how to leave out padding."""

    main_input_name = "input_ids"  # transformers asks

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.stack = make_stack(config, is_decoder=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, layout: VarlenLayout | None = None
    ) -> EncoderStates:
        """Encodes k antigens: (k, tokens, d_model)."""
        given = {} if layout is None else {"layout": layout}  # a packed T5 reads it, a plain one passes it by
        output = self.stack(input_ids=input_ids, attention_mask=attention_mask, **given)
        return EncoderStates(last_hidden_state=output.last_hidden_state)


class TransformerDecoder(nn.Module):
    """T5's decoder, with attention to the encoder's states.

    Waves say where a token stands. T5's biases know distances alone, and from 128 tokens on none, while what stands
    where in a variable domain is much of what there is to learn.

    Args:
        encoder_width: of those; where it is not None a linear map takes them to the decoder's width.
    """

    def __init__(self, config: GeneratorConfig, encoder_width: int | None = None):
        super().__init__()
        self.stack = make_stack(config, is_decoder=True)
        self.stack.set_input_embeddings(None)  # the model embeds; one that is not used would get no gradient
        self.project = None if encoder_width is None else nn.Linear(encoder_width, config.d_model)

    def forward(
        self,
        embedded: Tensor,
        encoded: EncoderStates,
        attention_mask: Tensor | None = None,
        past: Any = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, Any]:
        """Returns (rows, tokens, d_model), and keys and values if `use_cache`; arguments as of `LstmDecoder`."""
        states: Any = encoded.last_hidden_state
        if use_cache and past is None:
            past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        is_read = past is not None and past.is_updated.get(0)  # only the states' number counts: their keys are there
        if self.project is not None and not is_read:
            states = self.project(states.to(self.project.weight.dtype))
        first = 0 if past is None else past.get_seq_length()
        positions = torch.arange(first, first + embedded.shape[1], device=embedded.device)
        output = self.stack(
            inputs_embeds=add_sinusoids(embedded, positions),
            use_cache=use_cache,
            cache=past,
            encoder_hidden_states=states,
            encoder_attention_mask=attention_mask,
        )
        return output.last_hidden_state, output.cache if use_cache else None

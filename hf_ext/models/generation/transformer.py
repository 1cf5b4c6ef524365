"""The Transformer: T5's stacks in the sizes of the specification, with an embedding and an output that are shared.

T5's layers are what was asked for: pre-norm, ReLU feed-forward layers that are not gated, relative positions, dropout
everywhere, SDPA. Nothing is written here but how they are put together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import T5Config
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from . import cross_attention
from .configuration import GeneratorConfig
from .cross_attention import SharedAntigens, register_shared_attention
from .outputs import CACHE, EncoderStates, pick
from .positions import sinusoids

register_shared_attention()


def t5_config(config: GeneratorConfig, is_decoder: bool) -> T5Config:
    """T5's configuration of one stack."""
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
    # What was chosen for the whole model; SDPA knows no antigens that rows share.
    chosen = config._attn_implementation
    inner._attn_implementation = cross_attention.NAME if is_decoder and chosen in (None, "sdpa") else chosen
    return inner


def make_stack(config: GeneratorConfig, is_decoder: bool) -> T5Stack:
    """T5's encoder or decoder, in which attention has a dropout of its own."""
    stack = T5Stack(t5_config(config, is_decoder))
    for module in stack.modules():
        if isinstance(module, T5Attention):
            module.dropout = config.attention_dropout
    return stack


class TransformerEncoder(nn.Module):
    """T5's encoder over the antigen's tokens, which `hf_ext.models.packing` knows how to run without padding."""

    main_input_name = "input_ids"  # transformers asks

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.stack = make_stack(config, is_decoder=False)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, layout: Any = None
    ) -> EncoderStates:
        """States of k antigens: (k, tokens, d_model)."""
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
        self.stack.set_input_embeddings(None)  # the model embeds; one that nobody uses would get no gradient
        self.project = None if encoder_width is None else nn.Linear(encoder_width, config.d_model)

    def forward(
        self,
        embedded: torch.Tensor,
        encoded: EncoderStates,
        attention_mask: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        past: Any = None,
        use_cache: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """(rows, tokens, d_model), and the the keys and values if `use_cache`; for the arguments see `LstmDecoder`."""
        states: Any = encoded.last_hidden_state
        if use_cache and past is None:
            past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if self.project is not None and not (past is not None and past.is_updated.get(0)):
            states = self.project(
                states.to(self.project.weight.dtype)
            )  # later only their number is read: keys and values are there
        first = 0 if past is None else past.get_seq_length()
        positions = torch.arange(first, first + embedded.shape[1], device=embedded.device)
        output = self.stack(
            inputs_embeds=embedded + sinusoids(positions, embedded.shape[2]).to(embedded.dtype),
            use_cache=use_cache,
            **{CACHE: past},
            **self._to_read(states, attention_mask, index, is_shared=past is None),
        )
        return output.last_hidden_state, output[CACHE] if use_cache else None

    def _to_read(
        self, states: torch.Tensor, mask: torch.Tensor | None, index: torch.Tensor | None, is_shared: bool
    ) -> dict[str, Any]:
        """The antigens' states as they are, if attention may know which rows share them; else those of each row."""
        if index is None or not is_shared or self.stack.config._attn_implementation != cross_attention.NAME:
            mask = None if mask is None else pick(mask, index)
            return {"encoder_hidden_states": pick(states, index), "encoder_attention_mask": mask}
        shared = SharedAntigens(index, None if mask is None else mask.bool())
        return {"encoder_hidden_states": states, "antigens": shared}

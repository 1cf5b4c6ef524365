"""Encoders without padding: packed at the door, unpacked at the exit, so that no layer in between sees padding.

transformers accepts packed inputs for these encoders and ignores them: proteins then attend to each other and share
positions and token dropout (models/esm/modeling_esm.py and its like, 5.24). Here each sequence keeps its own positions
(rotary for ESM-2 and ESM C, learned for BERT, relative bias for T5), its own token dropout and its own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
)
from transformers.models.bert.modeling_bert import BertModel
from transformers.models.esm.modeling_esm import EsmModel
from transformers.models.esmc.modeling_esmc import EsmcModel
from transformers.models.t5.modeling_t5 import T5Stack

from ...data import VarlenLayout
from ...errors import ArgumentError
from .attention import bias_for_layers
from .replaced_forwards import find_replaceable, replace_forward, restore_forward

# Of the largest gradient of a token: a mask of -100 in place of minus infinity leaves e^-100 of it.
LEAST = 1e-6


class PaddingWatch:
    """Notes, on the device, whether a gradient has come back to a position of padding since `forget`.

    Then something reads what packed encoders do not compute: a label there, or a mean without the mask.

    Cost: two passes over the gradient of an encoder's output; no read from the device.
    """

    def __init__(self) -> None:
        self._found: Tensor | None = None

    def unpack(self, packed: Tensor, segments: VarlenLayout) -> Tensor:
        """Unpacks as `segments` does, the last states of an encoder, whose gradient will be looked at.

        Where it is, padding is not zero.
        """
        is_full = len(segments.indices) == segments.shape[0] * segments.shape[1]
        if is_full or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return segments.unpack(packed)
        states = packed if packed.requires_grad else packed.detach().requires_grad_()  # a frozen encoder's too
        # A token's states in place of zeros, at which squares, norms and products have no gradient.
        flat = segments.scatter(states, filler=packed.detach()[0, 0])
        # Not on the view, which may be changed in place and then has another.
        flat.register_hook(partial(self._note, segments.indices))
        return flat.unflatten(0, segments.shape)

    def _note(self, tokens: Tensor, gradient: Tensor) -> None:
        """Records whether the gradient of states (n * width, features) is zero at padding, all but `tokens`."""
        largest = gradient.detach().abs().amax(-1)
        read = largest.index_fill(0, tokens, 0).max() > LEAST * largest.max()
        self._found = read if self._found is None else self._found.to(read.device) | read

    def forget(self) -> None:
        """Forgets what was recorded."""
        self._found = None

    def is_unread(self, device: torch.device) -> Tensor:
        """Tells whether no padding was read: a scalar, bool, on `device`."""
        if self._found is None:
            return torch.ones((), dtype=torch.bool, device=device)
        return ~self._found.to(device)


class Batch(NamedTuple):
    """What an encoder is given.

    Attributes:
        segments: where each sequence stands in the packed row.
        ids, mask: (n, width), padded.
        embeds, layers: what embeddings and layers are given beside them.
    """

    segments: VarlenLayout
    ids: Tensor
    mask: Tensor | None
    embeds: dict[str, Any]
    layers: dict[str, Any]


PackedPass = Callable[[Any, Batch], Tensor]  # from an encoder and its batch: the last states, packed
PutOut = Callable[[Any, Tensor], Any]  # from an encoder and its last states, padded


def run_esm(encoder: Any, batch: Batch) -> Tensor:
    """Runs ESM-2 and ESM-1b: embeddings of the padded rows, since token dropout counts the tokens of each."""
    embedded = encoder.embeddings(input_ids=batch.ids, attention_mask=batch.mask, **batch.embeds)
    hidden = batch.segments.pack(embedded)
    rotary = None
    if encoder.position_embedding_type == "rotary":
        rotary = encoder.rotary_embeddings(hidden, batch.segments.columns)
    return encoder.encoder(hidden, position_embeddings=rotary, **batch.layers).last_hidden_state


def run_esmc(encoder: Any, batch: Batch) -> Tensor:
    """Runs ESM C."""
    hidden = batch.segments.pack(encoder.embed_tokens(batch.ids))
    rotary = encoder.rotary_emb(hidden, batch.segments.columns)
    for layer in encoder.layers:
        hidden = layer(hidden, None, position_embeddings=rotary, **batch.layers)
    return encoder.norm(hidden)


def run_bert(encoder: Any, batch: Batch) -> Tensor:
    """Runs BERT: embeddings of the padded rows, whose columns are positions."""
    hidden = batch.segments.pack(encoder.embeddings(input_ids=batch.ids, **batch.embeds))
    return encoder.encoder(hidden, **batch.layers).last_hidden_state


def run_t5(encoder: Any, batch: Batch) -> Tensor:
    """Runs T5's encoder, with one bias for all layers and sequences."""
    segments = batch.segments
    hidden = encoder.dropout(segments.pack(encoder.embed_tokens(batch.ids)))
    longest = segments.max_length
    # Distances are the same in every sequence, so the longest one's contains the others'.
    bias = encoder.block[0].layer[0].SelfAttention.compute_bias(longest, longest, device=hidden.device)
    bias = bias_for_layers(encoder.config._attn_implementation, bias, segments, _computing_dtype(hidden))
    for block in encoder.block:
        hidden = block(hidden, None, bias, None, None, None, **batch.layers)[0]
    return encoder.dropout(encoder.final_layer_norm(hidden))


def _with_pooler(encoder: Any, states: Tensor) -> BaseModelOutputWithPoolingAndCrossAttentions:
    pooled = None if encoder.pooler is None else encoder.pooler(states)
    return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=states, pooler_output=pooled)


def _computing_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the dtype of what linear layers put out."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


PACKED: dict[type[nn.Module], tuple[PackedPass, PutOut]] = {
    EsmModel: (run_esm, _with_pooler),
    EsmcModel: (run_esmc, lambda encoder, states: BaseModelOutput(last_hidden_state=states)),
    BertModel: (run_bert, _with_pooler),
    T5Stack: (run_t5, lambda encoder, states: BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)),
}
# Their model types, as configurations name them; mT5's and UMT5's stacks are classes of their own.
PACKED_FAMILIES = ("esm", "esmc", "bert", "t5")
BIASED = (T5Stack,)  # whose attention adds a bias to the scores
# Inputs and outputs that have no packed form: the encoder's own forward answers for them.
_PLAIN = (
    "position_ids",
    "sequence_id",
    "inputs_embeds",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "cache",
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "is_causal",
)
# Attention of transformers that takes the packed row for one sequence.
_ONE_SEQUENCE = (None, "eager", "sdpa", "flex_attention")
_PACKED = "packed_by_hf_ext"  # in a packed encoder: whether its rows are filled up to a few lengths, and its watch
_FOR_EMBEDDINGS = ("token_type_ids",)  # what embeddings are given beside ids


def find_encoders(model: nn.Module) -> list[PreTrainedModel]:
    """Finds the encoders in `model` that have a packed path: ESM-2's, ESM C's, BERT's and T5's, no decoders."""
    found: list[Any] = [module for module in model.modules() if isinstance(module, tuple(PACKED))]
    return [encoder for encoder in found if not getattr(encoder.config, "is_decoder", False)]


def pack_encoders(model: nn.Module, round_up: bool = False, watch: PaddingWatch | None = None) -> int:
    """Makes every encoder in `model` compute without padding; returns how many. Weights and names are untouched.

    Those with another forward than transformers', of a subclass or on the instance, stay as they are.

    Inputs and outputs stay as they were: padded (n, width) token ids in, padded states out, zero where padding is (with
    `watch`, where a gradient is computed, those of some token).
    Calls that ask for attentions or hidden states, or pass embeddings or positions, are answered by the plain forward.

    Args:
        round_up: fill packed rows up to a few lengths, for compiled blocks.
        watch: unpacks the last states of each encoder.

    Raises:
        ArgumentError: in a forward pass, if the encoder's attention takes the row for one sequence, as SDPA does.
    """
    mine = {id(encoder) for encoder in find_encoders(model)}
    encoders = [found for found in find_replaceable(model, *PACKED) if id(found[0]) in mine]
    for encoder, family in encoders:
        replace_forward(encoder, _FORWARDS[family])
        vars(encoder)[_PACKED] = (round_up, watch)
    return len(encoders)


def unpack_encoders(model: nn.Module) -> None:
    """Gives every packed encoder in `model` its own forward back."""
    for encoder in find_encoders(model):
        if is_packed(encoder):
            restore_forward(encoder)
            del vars(encoder)[_PACKED]


def is_packed(encoder: nn.Module) -> bool:
    """Returns whether `pack_encoders` has changed it."""
    return _PACKED in vars(encoder)


def keeps_sequences_apart(encoder: PreTrainedModel) -> bool:
    """Returns whether the encoder's attention reads where sequences begin: ours and flash attention, not SDPA."""
    return encoder.config._attn_implementation not in _ONE_SEQUENCE


def _packed_forward(family: type[nn.Module], run: PackedPass, put_out: PutOut) -> Callable[..., Any]:
    """Returns the forward of packed encoders of one class."""

    def forward(encoder: Any, input_ids: Any = None, attention_mask: Any = None, *others: Any, **kwargs: Any) -> Any:
        segments = _layout(encoder, input_ids, attention_mask, others, kwargs)
        # With holes, relative distances in the packed row would not be those of the padded one.
        if segments is None or (segments.has_holes and isinstance(encoder, BIASED)):
            return type(encoder).forward(encoder, input_ids, attention_mask, *others, **kwargs)
        embeds = {name: kwargs.pop(name) for name in _FOR_EMBEDDINGS if name in kwargs}
        packed = run(encoder, Batch(segments, input_ids, attention_mask, embeds, _for_layers(kwargs, segments)))
        _, watch = vars(encoder)[_PACKED]
        states = segments.unpack(packed) if watch is None else watch.unpack(packed, segments)
        return put_out(encoder, states)

    # Trainer keeps the columns of a dataset that the forward of a model names.
    forward.__signature__ = signature(family.forward)  # type: ignore[attr-defined]
    return forward


_FORWARDS = {family: _packed_forward(family, *parts) for family, parts in PACKED.items()}


def _layout(encoder: Any, ids: Any, mask: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> VarlenLayout | None:
    """Returns where each sequence stands in the packed row; None where the plain forward must answer.

    A batch of `MaskedLMCollator` brings it along as `layout`; else it is read from the mask, and a device waited for.
    """
    layout = kwargs.pop("layout", None)
    if others or _needs_plain_forward(encoder, ids, mask, kwargs):
        return None
    if not keeps_sequences_apart(encoder):
        raise ArgumentError(
            f"The attention {encoder.config._attn_implementation!r} would let packed sequences attend to each other: "
            "choose one of hf_ext's or flash_attention_2 (set_attn_implementation), undo packing (unpack_encoders), or "
            "train --without packing."
        )
    segments = layout and layout.segments
    round_up, _ = vars(encoder)[_PACKED]
    if segments is None or segments.shape != tuple(ids.shape) or segments.rounds_up != round_up:
        given = torch.ones_like(ids) if mask is None else mask
        segments = VarlenLayout.from_mask(given, round_up)
    segments = segments.to(ids.device)
    return segments if segments.max_length else None


def _needs_plain_forward(encoder: Any, input_ids: Any, mask: Any, kwargs: dict[str, Any]) -> bool:
    config = encoder.config
    asked = any(kwargs.get(name) is not None and kwargs[name] is not False for name in _PLAIN)
    configured = config.output_attentions or config.output_hidden_states
    as_tuple = kwargs.get("return_dict", config.return_dict) is False
    return asked or configured or as_tuple or input_ids is None or (mask is not None and mask.dim() != 2)


def _for_layers(kwargs: dict[str, Any], segments: VarlenLayout) -> dict[str, Any]:
    """Returns what layers hand on to attention: ours reads `segments`, flash attention the other names."""
    ends = segments.cu_seqlens
    longest = segments.max_length
    names = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    own = {name: value for name, value in kwargs.items() if name not in (*_PLAIN, "return_dict")}
    return {**own, **names, "segments": segments}

"""Runs the attention of ESM encoders through faesm (https://github.com/pengzhangzhi/faplm) on transformers 5.

Effect: with faesm's flash kernel (flash-attn >= 2.7, CUDA compute capability 8.0 or newer, half precision) padding is
taken out at the encoder's door and put back, as zeros, at its exit, so that no layer computes on it. Its SDPA kernel,
for all other devices, computes bit for bit what transformers' own does, and no faster.

faesm 0.1.1 does not import on transformers 4.57 or newer (https://github.com/pengzhangzhi/faplm/issues/18; merged, not
released: https://github.com/pengzhangzhi/faplm/pull/20), and its own models ignore labels and the caller's attention
mask, force a dropout of 0.1, return a dict and fail under activation checkpointing. So transformers' models stay in
charge of all that, and only what differs is faesm's: `FAEsmSelfAttention.fa_forward` and `.sdpa_forward`, `unpad`, and
the rotary kernel. A live module is given another class, so that modules, parameters and names stay what they are.

`import_faesm` needs no shim once a release of faesm has pull request 20; all may go when it runs on transformers 5.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithCrossAttentions, BaseModelOutputWithPastAndCrossAttentions
from transformers.models.esm import modeling_esm
from transformers.models.esm.modeling_esm import EsmEncoder, EsmSelfAttention, apply_rotary_pos_emb

from ...errors import ArgumentError
from ...optional import import_problem, require

_MOVED = "BaseModelOutputWithPastAndCrossAttentions"  # what faesm.esm looks for in modeling_esm
_MASKS = "flash_attention_2"  # transformers' name for masks that stay (batch, tokens)
OTHER_MASKS = "gives masks that faesm does not read; call model.set_attn_implementation('sdpa') first"


def import_faesm() -> ModuleType:
    """Imports `faesm.esm`, with what it misses in transformers put in place for the time of the import.

    Raises:
        MissingDependencyError: faesm is not installed, or does not import even so.
    """
    lacks_name = not hasattr(modeling_esm, _MOVED)
    if lacks_name:
        setattr(modeling_esm, _MOVED, BaseModelOutputWithPastAndCrossAttentions)
    try:
        import_problem.cache_clear()
        with redirect_stdout(StringIO()):  # it prints several lines where flash-attn is absent
            return require("faesm.esm", "faesm", "faesm attention")
    finally:
        if lacks_name:
            delattr(modeling_esm, _MOVED)


def swap_faesm(model: nn.Module, flash: bool = True) -> int:
    """Makes every ESM encoder inside a live model compute its attention with faesm; `restore_faesm` undoes it.

    Parameters, buffers, hooks and their names stay the same objects, so optimizers, adapters and `save_pretrained` are
    not concerned. Activation checkpointing works as before. The flash kernel waits for the device once per batch, to
    count the real tokens.

    Args:
        model: an ESM model of transformers with any head, or a module that holds some (an `AffinityModel`, a PEFT
            model). Encoders that an `AffinityModel` loads later need `model.transform_encoders`.
        flash: its flash kernel; else its SDPA kernel, which runs everywhere.

    Returns:
        How many encoders compute with faesm now.

    Raises:
        ArgumentError: no ESM encoder in `model`, or one that faesm would compute otherwise than transformers: a
            decoder, absolute positions, attention dropout above 0, or a packed or flex attention implementation.
            All encoders compute with transformers' attention then.
        MissingDependencyError: faesm, or for its flash kernel flash-attn, does not import.
    """
    encoders = _find_encoders(model)
    if not encoders:
        raise ArgumentError(
            f"{type(model).__name__} holds no ESM encoder. faesm serves ESM models of transformers (model_type 'esm'): "
            "EsmModel, EsmForMaskedLM, and models built on them."
        )
    if flash:
        require("faesm.fa_utils", "flash", "faesm's flash kernel")
    bridge = _FlashBridge if flash else _SdpaBridge
    attention_class = type("FaesmAttention", (bridge, import_faesm().FAEsmSelfAttention), {})
    restore_faesm(model)
    for encoder in encoders:
        _check_encoder(encoder)
    for encoder in encoders:
        for layer in encoder.layer:
            layer.attention.self.__class__ = attention_class
        encoder.__class__ = _UnpaddedEncoder if flash else _PaddedEncoder
        encoder.masks_before = encoder.config._attn_implementation
        encoder.config._attn_implementation = _MASKS if flash else "sdpa"
    return len(encoders)


def restore_faesm(model: nn.Module) -> int:
    """Gives every encoder that `swap_faesm` changed transformers' attention back; returns how many."""
    swapped: list[Any] = [encoder for encoder in _find_encoders(model) if isinstance(encoder, _PaddedEncoder)]
    for encoder in swapped:
        for layer in encoder.layer:
            layer.attention.self.__class__ = EsmSelfAttention
        encoder.config._attn_implementation = encoder.masks_before
        del encoder.masks_before
        encoder.__class__ = EsmEncoder
    return len(swapped)


def _find_encoders(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, EsmEncoder)]


def _check_encoder(encoder: Any) -> None:
    """Raises ArgumentError if faesm would compute this encoder otherwise than transformers."""
    config = encoder.config
    modules = [layer.attention.self for layer in encoder.layer]
    foreign = sorted({type(module).__name__ for module in modules if type(module) is not EsmSelfAttention})
    dropout = max((module.dropout for module in modules), default=0.0)
    problems = {
        f"its attention is already replaced by {', '.join(foreign)}": foreign,
        "it is a decoder, and faesm's attention is bidirectional": config.is_decoder or config.add_cross_attention,
        f"its positions are {config.position_embedding_type!r}; only 'rotary' (ESM-2) is served": (
            config.position_embedding_type != "rotary"
        ),
        f"attention_probs_dropout_prob={dropout}, and faesm has no attention dropout; build it with 0.0": dropout,
        f"attn_implementation={config._attn_implementation!r} {OTHER_MASKS}": (
            config._attn_implementation not in ("sdpa", "eager", _MASKS)
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise ArgumentError(f"faesm cannot run an ESM encoder of {len(modules)} layers: {problem}.")


class _Bridge:
    """What transformers calls in `attention.self`, in terms of faesm's class, which comes next in the bases."""

    compute: str  # name of faesm's function
    position_embeddings: Any = None

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any = None, **inputs: Any) -> Any:
        """Calls faesm; it asks for rotation through `self.rotary_embeddings`, so the tables wait on the module."""
        if inputs.get("output_attentions") or inputs.get("cu_seq_lens_q") is not None:
            raise ArgumentError(
                "output_attentions=True (also for contacts) or cu_seq_lens_q: faesm holds no attention weights, and in "
                "packed batches its proteins would attend to each other. Call restore_faesm(model); for weights, also "
                "model.set_attn_implementation('eager')."
            )
        self.position_embeddings = position_embeddings
        (context,) = getattr(self, self.compute)(hidden_states=hidden_states, **inputs)
        del self.position_embeddings
        return context, None


class _SdpaBridge(_Bridge):
    """Padded: states (n, tokens, width), mask as SDPA reads it, cos and sin (1 or n, tokens, head)."""

    compute = "sdpa_forward"

    def transpose_for_scores(self: Any, x: Tensor) -> Tensor:
        """Maps (n, tokens, width) to (n, heads, tokens, head), for faesm: transformers 4 had this method."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def rotary_embeddings(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Applies the rotation by the model's own tables; in transformers 4 each layer had some."""
        return apply_rotary_pos_emb(query, key, *self.position_embeddings)


class _FlashBridge(_Bridge):
    """Unpadded: states (all tokens, width), cos and sin (all tokens, head), no mask."""

    compute = "fa_forward"

    def rotary_embeddings(self, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Applies faesm's rotary kernel to (all tokens, 3, heads, head), in place, with the model's own tables.

        Row i of the tables belongs to token i, so for this kernel all tokens are one sequence: a mask with holes, left
        padding or the caller's position_ids then rotate as in transformers, not by the rank within a sequence.
        """
        from faesm.fa_utils import apply_rotary_emb_qkv_

        num_tokens = len(qkv)
        half = qkv.shape[-1] // 2
        cos, sin = [table[:, :half].to(qkv.dtype) for table in self.position_embeddings]
        ends = torch.tensor([0, num_tokens], dtype=torch.int32, device=qkv.device)
        return apply_rotary_emb_qkv_(qkv, cos, sin, cu_seqlens=ends, max_seqlen=num_tokens)


class _PaddedEncoder(EsmEncoder):
    """transformers' encoder, whose attention is faesm's; the name of its masks before that is kept."""

    masks_before: str


class _UnpaddedEncoder(_PaddedEncoder):
    """The same on the real tokens alone, as faesm's flash kernel needs them."""

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        """Maps (n, tokens, width) to the same, zeros at padding; mask (n, tokens) or None."""
        from faesm.fa_utils import unpad

        if kwargs.get("output_hidden_states") or self.config.output_hidden_states:
            raise ArgumentError(
                "output_hidden_states: under faesm's flash kernel the states between layers hold no padding, so they "
                "have no (batch, tokens) shape. Call restore_faesm(model)."
            )
        if attention_mask is None:
            attention_mask = hidden_states.new_ones(hidden_states.shape[:2])
        if getattr(attention_mask, "ndim", None) != 2:
            given = f"attn_implementation={self.config._attn_implementation!r}"
            raise ArgumentError(f"faesm's flash kernel needs masks of (batch, tokens): {given} {OTHER_MASKS}.")
        mask = attention_mask.bool()
        packed, cu_seqlens, max_seqlen, _, pad = unpad(hidden_states, mask)
        tables = tuple(table.expand(len(mask), -1, -1)[mask] for table in position_embeddings)
        kwargs.update(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        states = super().forward(packed, position_embeddings=tables, **kwargs)[0]
        return BaseModelOutputWithCrossAttentions(last_hidden_state=pad(states))

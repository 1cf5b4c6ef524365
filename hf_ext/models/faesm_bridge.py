"""Runs the attention of ESM encoders through faesm (https://github.com/pengzhangzhi/faplm) on transformers 5.

Effect: with faesm's flash kernel (flash-attn >= 2.7, CUDA compute capability 8.0 or newer, half precision) padding is
taken out at the encoder's door and put back, as zeros, at its exit, so that no layer computes on it. With its SDPA
kernel (everywhere else) the arithmetic is bit for bit that of transformers' own SDPA, and no faster.

faesm 0.1.1 does not import on transformers 4.57 or newer (https://github.com/pengzhangzhi/faplm/issues/18; merged, not
released: https://github.com/pengzhangzhi/faplm/pull/20), and its own models ignore labels and the caller's attention
mask, force a dropout of 0.1, return a dict and fail under activation checkpointing. So transformers' models stay in
charge of all that, and only what differs is faesm's: `FAEsmSelfAttention.sdpa_forward` and `.fa_forward`, `unpad`, and
the rotary kernel (faesm's layers and encoder only hand `cu_seqlens` down, which those of transformers do, too). A live
module is given another class, so that modules, parameters and names stay what they are.

Remove `_importable_faesm` when a release of faesm has pull request 20, and the rest when faesm runs on transformers 5.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn
from transformers.modeling_outputs import (
    BaseModelOutputWithCrossAttentions,
    BaseModelOutputWithPastAndCrossAttentions,
)
from transformers.models.esm import modeling_esm
from transformers.models.esm.modeling_esm import EsmEncoder, EsmSelfAttention, apply_rotary_pos_emb

from ..errors import ArgumentError
from ..hardware import Hardware, detect_hardware
from ..optional import import_problem, require

Kernel = Literal["flash", "sdpa"]

_MOVED = "BaseModelOutputWithPastAndCrossAttentions"  # what faesm.esm looks for in modeling_esm
_PURPOSE = "faesm attention"
_FLASH_MASKS = "flash_attention_2"  # transformers' name for masks that stay (batch, tokens)
_MASKS = ("sdpa", "eager")  # whose masks its SDPA kernel reads


def faesm_kernel(hardware: Hardware | None = None) -> tuple[Kernel, str]:
    """Says which of faesm's two kernels serves a device, and why.

    Args:
        hardware: the device, present or described; None asks for this machine's first one (and so may initialise CUDA).

    Returns:
        "flash" where the device has FlashAttention-2 and what faesm takes from flash-attn imports here, else "sdpa";
        and the reason. Cost: the import of flash-attn, once.
    """
    hardware = hardware or detect_hardware()
    if not hardware.flash_attention_2:
        return "sdpa", f"{hardware.name} cannot run FlashAttention-2, which needs CUDA compute capability 8.0"
    problem = import_problem("faesm.fa_utils")
    if problem is not None:
        return "sdpa", f"flash-attn does not work with faesm here ({problem})"
    return "flash", f"flash-attn on {hardware.name}"


def faesm_problem() -> str | None:
    """What keeps faesm's models from being imported here, in one line; None if nothing does."""
    with _importable_faesm():
        return import_problem("faesm.esm")


def import_faesm() -> ModuleType:
    """Imports `faesm.esm`, with what it misses in transformers put in place for the time of the import.

    Raises:
        MissingDependencyError: faesm is not installed, or does not import even so.
    """
    with _importable_faesm():
        return require("faesm.esm", "faesm", _PURPOSE)


def swap_faesm(model: nn.Module, kernel: Kernel | None = None) -> int:
    """Makes every ESM encoder inside a live model compute its attention with faesm; `restore_faesm` undoes it.

    Parameters, buffers, hooks and their names stay the same objects, so optimizers, adapters and `save_pretrained` are
    not concerned. Activation checkpointing works as before; so do `torch.compile` and `output_hidden_states` with the
    SDPA kernel. The flash kernel waits for the device once per batch, to count the real tokens.

    Args:
        model: an ESM model of transformers with any head, or a module that holds some (an `AffinityModel`, a PEFT
            model). Encoders that an `AffinityModel` loads later need `model.transform_encoders`.
        kernel: "flash" or "sdpa"; None takes `faesm_kernel()`.

    Returns:
        How many encoders compute with faesm now.

    Raises:
        ArgumentError: no ESM encoder in `model`, or one that faesm would compute otherwise than transformers: a
            decoder, absolute positions, attention dropout above 0, or a packed or flex attention implementation.
            All encoders compute with transformers' attention then.
        MissingDependencyError: faesm, or for "flash" flash-attn, does not import.
    """
    encoders = _find_encoders(model)
    if not encoders:
        raise ArgumentError(
            f"{type(model).__name__} holds no ESM encoder. faesm serves ESM models of transformers (model_type 'esm'): "
            "EsmModel, EsmForMaskedLM, and models built on them."
        )
    kernel = faesm_kernel()[0] if kernel is None else kernel
    attention_class = _attention_class(kernel)
    restore_faesm(model)
    for encoder in encoders:
        _check_encoder(encoder, kernel)
    for encoder in encoders:
        for layer in encoder.layer:
            layer.attention.self.__class__ = attention_class
        if kernel == "flash":
            encoder.__class__ = _UnpaddedEncoder
            encoder.masks_before = encoder.config._attn_implementation
            encoder.config._attn_implementation = _FLASH_MASKS
    return len(encoders)


def restore_faesm(model: nn.Module) -> int:
    """Gives every encoder that `swap_faesm` changed transformers' attention back; returns how many."""
    num_restored = 0
    for encoder in _find_encoders(model):
        modules: list[Any] = [layer.attention.self for layer in encoder.layer]
        swapped = [module for module in modules if isinstance(module, _Bridge)]
        for attention in swapped:
            attention.__class__ = EsmSelfAttention  # type: ignore[assignment]
        if isinstance(encoder, _UnpaddedEncoder):
            encoder.config._attn_implementation = encoder.masks_before
            del encoder.masks_before
            encoder.__class__ = EsmEncoder  # type: ignore[assignment]
        num_restored += bool(swapped)
    return num_restored


@contextmanager
def _importable_faesm() -> Iterator[None]:
    """Puts in place what faesm 0.1.1 needs to import, and takes it away again."""
    # Its flash part asks for the CUDA device while it is imported, and the models do not survive the error: where that
    # part does not work, flash-attn is hidden, as if it were not installed.
    hide_flash = import_problem("faesm.fa_utils") is not None
    flash_attn = sys.modules.get("flash_attn")
    add_name = not hasattr(modeling_esm, _MOVED)
    try:
        if hide_flash:
            sys.modules["flash_attn"] = None  # type: ignore[assignment]
        if add_name:
            setattr(modeling_esm, _MOVED, BaseModelOutputWithPastAndCrossAttentions)
        import_problem.cache_clear()
        with redirect_stdout(io.StringIO()):  # it prints a banner where flash-attn is absent
            yield
    finally:
        if add_name:
            delattr(modeling_esm, _MOVED)
        if hide_flash:
            del sys.modules["flash_attn"]
            if flash_attn is not None:
                sys.modules["flash_attn"] = flash_attn


def _find_encoders(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, EsmEncoder)]


def _check_encoder(encoder: Any, kernel: Kernel) -> None:
    """Raises ArgumentError if faesm would compute this encoder otherwise than transformers."""
    config = encoder.config
    modules = [layer.attention.self for layer in encoder.layer]
    foreign = sorted({type(module).__name__ for module in modules if type(module) is not EsmSelfAttention})
    problem = None
    if foreign:
        problem = f"its attention is already replaced by {', '.join(foreign)}; use the model as transformers built it"
    elif config.is_decoder or config.add_cross_attention:
        problem = "it is a decoder, and faesm's attention is bidirectional; use transformers' attention"
    elif config.position_embedding_type != "rotary":
        problem = f"its positions are {config.position_embedding_type!r}; only 'rotary' (ESM-2) is served"
    elif dropout := max((module.dropout for module in modules), default=0.0):
        problem = f"attention_probs_dropout_prob={dropout}, and faesm has no attention dropout; build it with 0.0"
    elif config._attn_implementation not in (*_MASKS, _FLASH_MASKS if kernel == "flash" else "sdpa"):
        problem = _wrong_masks(config)
    if problem:
        raise ArgumentError(f"faesm cannot run an ESM encoder of {len(modules)} layers: {problem}.")


def _wrong_masks(config: Any) -> str:
    return (
        f"attn_implementation={config._attn_implementation!r} gives masks that faesm does not read; "
        "call model.set_attn_implementation('sdpa') first"
    )


def _attention_class(kernel: Kernel) -> type[nn.Module]:
    """faesm's attention class with the bridge in front; made here, since faesm is not imported before it is used."""
    if kernel not in ("flash", "sdpa"):
        raise ArgumentError(f"kernel={kernel!r}: allowed are flash, sdpa, and None for the one that fits the machine.")
    base: Any = import_faesm().FAEsmSelfAttention
    if kernel == "sdpa":
        return type("FaesmSdpaAttention", (_SdpaBridge, base), {})
    require("faesm.fa_utils", "flash", "faesm's flash kernel")
    return type("FaesmFlashAttention", (_FlashBridge, base), {})


class _Bridge:
    """What transformers calls in `attention.self`, in terms of faesm's class, which comes next in the bases."""

    config: Any
    position_embeddings: Any = None

    def attend(self, faesm_forward: Any, position_embeddings: Any, **inputs: Any) -> tuple[torch.Tensor, None]:
        """Calls faesm; it asks for rotation through `self.rotary_embeddings`, so the tables wait on the module."""
        if inputs.get("output_attentions") or inputs.get("cu_seq_lens_q") is not None:
            raise ArgumentError(
                "output_attentions=True (also for contacts) or cu_seq_lens_q: faesm holds no attention weights, and in "
                "packed batches its proteins would attend to each other. Call restore_faesm(model); for weights, also "
                "model.set_attn_implementation('eager')."
            )
        self.position_embeddings = position_embeddings
        (context,) = faesm_forward(**inputs)
        del self.position_embeddings
        return context, None


class _SdpaBridge(_Bridge):
    """Padded: states (n, tokens, width), mask (n, 1, tokens, tokens), cos and sin (1 or n, tokens, head)."""

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
        if self.config._attn_implementation not in _MASKS:
            raise ArgumentError(f"faesm's SDPA kernel: {_wrong_masks(self.config)}.")
        return self.attend(self.sdpa_forward, position_embeddings, hidden_states=hidden_states, **kwargs)

    def transpose_for_scores(self: Any, x: torch.Tensor) -> torch.Tensor:
        """(n, tokens, width) -> (n, heads, tokens, head); transformers 4 had it, faesm calls it."""
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def rotary_embeddings(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Was a module with a buffer in every layer of transformers 4; now it reads the model's one table."""
        return apply_rotary_pos_emb(query, key, *self.position_embeddings)


class _FlashBridge(_Bridge):
    """Unpadded: states (all tokens, width), cos and sin (all tokens, head), no mask."""

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
        return self.attend(self.fa_forward, position_embeddings, hidden_states=hidden_states, **kwargs)

    def rotary_embeddings(self, qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        """faesm's rotary kernel on (all tokens, 3, heads, head), in place, with the model's own tables.

        Row i of the tables belongs to token i, so for this kernel all tokens are one sequence: a mask with holes, left
        padding or the caller's position_ids then rotate as in transformers, not by the rank within a sequence.
        """
        from faesm.fa_utils import apply_rotary_emb_qkv_

        num_tokens, half = len(qkv), qkv.shape[-1] // 2
        cos, sin = (table[:, :half].to(qkv.dtype) for table in self.position_embeddings)
        ends = torch.tensor([0, num_tokens], dtype=torch.int32, device=qkv.device)
        return apply_rotary_emb_qkv_(qkv, cos, sin, cu_seqlens=ends, max_seqlen=num_tokens)


class _UnpaddedEncoder(EsmEncoder):
    """transformers' encoder on the real tokens alone, as faesm's flash kernel needs them."""

    masks_before: str

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        """(n, tokens, width) -> the same, zeros at padding; mask (n, tokens) or None."""
        from faesm.fa_utils import unpad

        if kwargs.get("output_hidden_states") or self.config.output_hidden_states:
            raise ArgumentError(
                "output_hidden_states: under faesm's flash kernel the states between layers hold no padding, so they "
                "have no (batch, tokens) shape. Use swap_faesm(model, kernel='sdpa')."
            )
        if attention_mask is None:
            attention_mask = hidden_states.new_ones(hidden_states.shape[:2])
        if getattr(attention_mask, "ndim", None) != 2:
            raise ArgumentError(f"faesm's flash kernel needs masks of (batch, tokens): {_wrong_masks(self.config)}.")
        mask = attention_mask.bool()
        packed, cu_seqlens, max_seqlen, _, pad = unpad(hidden_states, mask)
        tables = tuple(table.expand(len(mask), -1, -1)[mask] for table in position_embeddings)
        kwargs.update(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        states = super().forward(packed, position_embeddings=tables, **kwargs)[0]
        return BaseModelOutputWithCrossAttentions(last_hidden_state=pad(states))

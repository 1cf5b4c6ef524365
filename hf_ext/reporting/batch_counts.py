"""What training batches hold: residues, tokens, padding and sequences, counted at the model's own door.

A hook on the model sees every batch of every Trainer, whatever collates it and however many workers do. The counts
stay on the device: nothing waits for them until somebody reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError

Unit = Literal["residues", "tokens", "sequences"]
COUNTS = ("residues", "tokens", "padded_tokens", "flops", "sequences")
MAX_RESIDUE_WORDS = 1000  # ProtT5 has 128; of text, whose bytes are letters too, there are thousands
_LAYER = re.compile(r"\.(?:layers?|blocks?|h)\.(\d+)\.")
_FRAMING = ("cls_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "pad_token_id")


def spells_residues(tokenizer: Any) -> bool:
    """Returns whether single amino acids are words of the vocabulary: those of other texts are counted as tokens."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    found = {str(word).lstrip("\u2581").upper() for word in vocabulary}
    return not vocabulary or (found >= {*"ACDEFGHIKLMNPQRSTVWY"} and len(vocabulary) <= MAX_RESIDUE_WORDS)


class BatchCounter:
    """Adds up `COUNTS` over the training batches of one model.

    `residues`: tokens that are neither padding nor framing (begin, end, separator); masked ones count. (Where masked
    language modelling put a framing token at random, one residue in 500 is missed.) `tokens`: those
    that are not padding. `padded_tokens`: all positions of the batch as it was collated. `flops`: of forward and
    backward over real tokens, see `flops.py`. `sequences`: rows. Of an encoder-decoder, what it writes counts too, but
    for FLOPs.

    Args:
        model: is watched from now on, while it is in training mode; `detach` ends that.
        tokenizer: says which tokens frame; None where nobody knows.

    Attributes:
        unit: what a rate should be given in: "residues"; "tokens" where framing tokens cannot be told; "sequences"
            where inputs came as cached embeddings, so that their residues did not pass by.
        flops_unknown: why `flops` is not counted, or an empty text.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None):
        ids = [getattr(tokenizer, name, None) for name in _FRAMING] if spells_residues(tokenizer) else []
        self._framing = [index for index in ids if index is not None]
        self._pad_token_id = getattr(tokenizer or getattr(model, "config", None), "pad_token_id", None)
        self.unit: Unit = "residues"
        self.flops_unknown = ""
        self._coefficients: dict[str, tuple[float, float]] = {}
        self._tokens: list[Tensor] = []  # none, or their sum
        self._sequences: Tensor | int = 0  # on the device where rows are packed
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def detach(self) -> None:
        """Stops watching."""
        self._hook.remove()

    def take(self) -> Tensor:
        """Counts since the last call: (5,), in the order of `COUNTS`, on the device of the batches."""
        [tokens] = self._tokens or [torch.zeros(4, dtype=torch.float64)]
        counts = torch.cat([tokens, torch.as_tensor(self._sequences).to(tokens)[None]])
        self._tokens = []
        self._sequences = 0
        return counts

    @torch.no_grad()
    @torch.compiler.disable  # compiled models call hooks outside the graph, and dynamo is not to look into this one
    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        live = kwargs.get("sequences") or {}  # an AffinityModel's inputs: name -> tensors
        parts = [self._count_tokens(_encoder_of(model, name), name, live[name]) for name in live]
        if torch.is_tensor(kwargs.get("input_ids")):
            parts.append(self._count_tokens(model, "", kwargs))
        if _writes_labels(model, kwargs.get("labels")):
            labels = kwargs["labels"]  # what a decoder writes
            parts.append(self._count_tokens(model, "", {"input_ids": labels, "attention_mask": labels >= 0}))
        if kwargs.get("embeddings") or not parts:
            self.unit = "sequences"
        elif self.unit == "residues" and not live and not self._framing:
            self.unit = "tokens"
        if parts:
            self._tokens = [torch.stack([*self._tokens, *parts]).sum(0)]
        self._sequences += _count_sequences(kwargs)

    def _count_tokens(self, encoder: nn.Module, name: str, batch: Mapping[str, Any]) -> Tensor:
        """Counts residues, tokens, padded tokens and FLOPs (0 of an encoder-decoder) of one input: (4,)."""
        ids = batch["input_ids"]
        dtype = torch.float32 if ids.device.type == "mps" else torch.float64  # Metal has no float64
        real = self._real_tokens(ids, batch.get("attention_mask"))
        tokens = real.sum(dtype=dtype)
        if "residue_mask" in batch:
            residues = batch["residue_mask"].sum(dtype=dtype)
        else:
            residues = (real & ~self._is_framing(ids)).sum(dtype=dtype)
        positions = _packed_positions(batch)  # squares of lengths, L^2 = 1 + 3 + ... + (2 L - 1):
        pairs = real.sum(1).square().sum() if positions is None else (2 * positions + 1).sum()
        per_token, per_pair = self._flops_of(encoder, name)
        flops = per_token * tokens + per_pair * pairs.to(dtype)
        return torch.stack([residues, tokens, torch.full_like(tokens, ids.numel()), flops])

    def _real_tokens(self, ids: Tensor, mask: object) -> Tensor:
        if torch.is_tensor(mask) and mask.shape == ids.shape:
            return mask.bool()
        return torch.ones_like(ids, dtype=torch.bool) if self._pad_token_id is None else ids != self._pad_token_id

    def _is_framing(self, ids: Tensor) -> Tensor:
        # Two to four numbers; comparing with each copies nothing to the device.
        return sum((ids == index for index in self._framing), torch.zeros_like(ids, dtype=torch.bool))

    def _flops_of(self, encoder: nn.Module, name: str) -> tuple[float, float]:
        if name not in self._coefficients:
            try:
                self._coefficients[name] = flops_coefficients(encoder)
            except ArgumentError as error:
                self.flops_unknown = str(error)
                self._coefficients[name] = (0.0, 0.0)
        return self._coefficients[name]


def _encoder_of(model: Any, name: str) -> nn.Module:
    """Returns the encoder of an AffinityModel's input.

    Loads it where it is not in memory yet, as the model is about to.
    """
    index = str(model.tower_of(name).encoder)
    if index not in model.encoders:
        model.attach_encoders()
    return model.encoders[index]


def _writes_labels(model: nn.Module, labels: object) -> bool:
    """Returns whether labels are tokens that an encoder-decoder writes, beside those that it reads."""
    is_written = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(is_written) and torch.is_tensor(labels) and labels.dim() == 2 and not labels.is_floating_point()


def _packed_positions(batch: Mapping[str, Any]) -> Tensor | None:
    """Returns positions that start again with each sequence, where several share a row."""
    positions = batch.get("position_ids")
    return positions if torch.is_tensor(positions) and not torch.is_tensor(batch.get("attention_mask")) else None


def _count_sequences(batch: Mapping[str, Any]) -> Tensor | int:
    """Counts rows of a batch; of an AffinityModel's, its labels, as rows may lack an input."""
    positions = _packed_positions(batch)
    if positions is not None:
        return (positions == 0).sum()
    for name in ("labels", "input_ids", "embeddings", "sequences"):
        value = batch.get(name)
        while isinstance(value, Mapping) and value:
            value = value.get("input_ids", next(iter(value.values())))
        if torch.is_tensor(value):
            return len(value)
    return 0


def flops_coefficients(model: nn.Module) -> tuple[float, float]:
    """Counts FLOPs of one training step: per token for the linear layers, and per token and per token attended to.

    A token of a sequence of L costs the first and L times the second: forward, backward, no optimizer. As in PaLM
    (arXiv:2204.02311, appendix B: 6 N + 12 L H Q T), but each linear layer counts what autograd does for it: 2 forward,
    2 more where a gradient passes through it, 2 more where its weight trains. Recomputed activations do not count.

    Args:
        model: a transformer whose `config` names its layers and heads, such as ESM, BERT or a T5 encoder, with or
            without a head and PEFT adapters; `requires_grad` says what trains.

    Raises:
        ArgumentError: the configuration does not say how many layers and heads there are, or the model is an
            encoder-decoder, whose two sides see different numbers of tokens.

    Linear layers that run once per sequence (a pooler, a classification head) are counted as if they ran per token.
    Cost: one pass over the modules; nothing is computed.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ArgumentError(f"{type(model).__name__} is an encoder-decoder: FLOPs per token are not defined for it.")
    num_layers, width = _attention_shape(config, type(model).__name__)
    linear = 0.0
    has_gradient = False
    with_gradient: dict[int, bool] = {}  # by layer, whether one passes through its attention
    for name, module in model.named_modules():  # in the order in which they are registered: that of the forward pass
        if isinstance(module, nn.Linear):
            # in_features x out_features: a sharded or quantised weight does not have this many elements.
            linear += 2.0 * module.in_features * module.out_features * (1 + has_gradient + module.weight.requires_grad)
        has_gradient = has_gradient or any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if layer := _LAYER.search(f".{name}."):
            with_gradient[int(layer[1])] = has_gradient
    num_with_gradient = min(num_layers, sum(with_gradient.values()))
    # Scores and weighted values: 2 x 2 x width per pair of tokens forward, twice that backward.
    return linear, 4.0 * width * num_layers + 8.0 * width * num_with_gradient


def _attention_shape(config: Any, model_name: str) -> tuple[int, int]:
    """Returns number of layers, and heads x size of a head."""
    num_layers = getattr(config, "num_hidden_layers", None)
    num_heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not (num_layers and num_heads and hidden):
        raise ArgumentError(
            f"{model_name}: its configuration lacks num_hidden_layers, num_attention_heads or hidden_size, so FLOPs "
            "per token are not known."
        )
    head_size = getattr(config, "d_kv", None) or getattr(config, "head_dim", None) or hidden // num_heads
    return int(num_layers), int(num_heads * head_size)

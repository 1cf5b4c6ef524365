"""Floating-point operations of an antibody generator, from its weights and the tokens on its two sides.

Counted as `reporting.flops` counts encoders: products alone, one with a weight 2 forward, and 4 more where all trains.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from ...reporting.flops import flops_coefficients
from .linear_attention import CHUNK


@dataclass(frozen=True)
class GeneratorFlops:
    """FLOPs of a pass, by what they grow with.

    Attributes:
        antigen_token: per token that is encoded: each antigen of a batch once, however many rows have it.
        antigen_square: per token that is encoded and token of the same antigen.
        pair_token: per token that is written.
        pair_square: per token that is written and token of the same antibody.
        cross: per token that is written and token of its antigen.
    """

    antigen_token: float = 0.0
    antigen_square: float = 0.0
    pair_token: float = 0.0
    pair_square: float = 0.0
    cross: float = 0.0

    def __add__(self, other: GeneratorFlops) -> GeneratorFlops:
        return GeneratorFlops(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> GeneratorFlops:
        """Each of them, so many times."""
        return GeneratorFlops(*(factor * getattr(self, f.name) for f in fields(self)))


def count_forward(model: Any) -> GeneratorFlops:
    """Of scoring rows: forward, without a frozen encoder, whose states are cached.

    Args:
        model: `AntibodyGenerator`; on torch's meta device will do.
    """
    return _count_decoder(model) + _count_encoder(model, is_training=False)


def count_training(model: Any) -> GeneratorFlops:
    """Of a training step: forward and backward, no optimizer; see `count_forward`."""
    return _count_decoder(model).times(3) + _count_encoder(model, is_training=True)


def _count_encoder(model: Any, is_training: bool) -> GeneratorFlops:
    config, encoder = model.config, model.encoder
    if config.architecture == "esm":
        if encoder.spec.training == "frozen":
            return GeneratorFlops()
        per_token, per_square = flops_coefficients(encoder.model)
        share = 1.0 if is_training else 1 / 3  # under LoRA a little less than forward costs
        return GeneratorFlops(antigen_token=share * per_token, antigen_square=share * per_square)
    weights, layers, width = 2.0 * _num_weights(encoder), config.num_encoder_layers, config.d_model
    found = {
        "lstm": GeneratorFlops(antigen_token=weights),
        "transformer": GeneratorFlops(antigen_token=weights, antigen_square=4.0 * width * layers),
        "light": GeneratorFlops(antigen_token=layers * (weights + 2 * _sum_flops(config))),
    }[config.architecture]
    return found.times(3 if is_training else 1)


def _count_decoder(model: Any) -> GeneratorFlops:
    config, decoder = model.config, model.decoder
    layers, width = config.num_decoder_layers, config.d_model
    if config.architecture == "lstm":
        keys, combine = (0 if part is None else 2.0 * _num_weights(part) for part in (decoder.keys, decoder.combine))
        written = 2.0 * _num_weights(decoder.lstm) + combine + 2.0 * _num_weights(model.output)
        cross = 4.0 * config.hidden_size if config.attend else 0.0
        return GeneratorFlops(antigen_token=keys, pair_token=written, cross=cross)
    output = 2.0 * width * config.vocab_size  # the embedding once more
    if config.architecture == "light":
        read = decoder.cross_attention
        once = 2.0 * (_num_weights(read.k) + _num_weights(read.v))
        # The sums of earlier tokens, what is read of them and of the antigen's; and CHUNK tokens compared directly.
        applied = 2.0 * _num_weights(decoder) - once + 3 * _sum_flops(config) + 4.0 * CHUNK * width
        return GeneratorFlops(antigen_token=once + _sum_flops(config), pair_token=layers * applied + output)
    keys_and_values = 2.0 * sum(
        _num_weights(one)
        for name, one in decoder.stack.named_modules()
        if name.endswith((".EncDecAttention.k", ".EncDecAttention.v"))
    )
    project = 0.0 if decoder.project is None else 2.0 * _num_weights(decoder.project)
    return GeneratorFlops(
        antigen_token=project + keys_and_values,
        pair_token=2.0 * _num_weights(decoder.stack) - keys_and_values + output,
        pair_square=4.0 * width * layers,
        cross=4.0 * width * layers,
    )


def _sum_flops(config: Any) -> float:
    """Of linear attention, per token: taking it into its heads' sums, or reading them."""
    head = config.d_model // config.num_heads
    return 2.0 * config.d_model * (head + 1)


def _num_weights(module: nn.Module) -> int:
    """Of linear layers and LSTMs, without biases: each is multiplied once per token."""
    total = 0
    for part in module.modules():
        if isinstance(part, nn.Linear):
            total += part.in_features * part.out_features
        elif isinstance(part, nn.LSTM):
            total += sum(p.numel() for name, p in part.named_parameters() if name.startswith("weight"))
    return total

"""From token states to one vector per sequence, and from vectors to outputs: a perceptron, products, or gates.

Padding never counts, special tokens where it is asked for; heads compute in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Pooling(nn.Module):
    """Pools token states in float32.

    A subclass may have weights: they train where the encoder does, and are saved with the model.

    Args:
        width: of the states.
    """

    def __init__(self, width: int):
        super().__init__()

    def forward(self, states: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Maps (n, tokens, width), any float dtype, to (n, width), float32.

        Args:
            states: of all tokens.
            batch: masks, (n, tokens): `attention_mask`, 1 on all but padding, and `residue_mask`, true on residues.
        """
        raise NotImplementedError


class Mean(Pooling):
    """Averages over residues."""

    mask = "residue_mask"

    def forward(self, states: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        weights = batch[self.mask].bool().float()
        # Under Trainer's autocast, einsum would round states of magnitude 100 by 0.3.
        with torch.autocast(states.device.type, enabled=False):
            summed = torch.einsum("ntw,nt->nw", states.float(), weights)
        return summed / weights.sum(1, keepdim=True).clamp(min=1)


class MeanTokens(Mean):
    """Averages over special tokens too, as `last_hidden_state.mean(1)` of one sequence without padding."""

    mask = "attention_mask"


class FirstToken(Pooling):
    """Takes the first token: ESM and BERT's classification token; T5 has none, so its first residue."""

    def forward(self, states: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return states[:, 0].float()


class Maximum(Pooling):
    """Takes the maximum over residues."""

    def forward(self, states: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return states.float().masked_fill(~batch["residue_mask"].unsqueeze(-1), float("-inf")).amax(1)


POOLINGS: dict[str, type[Pooling]] = {"mean": Mean, "mean_tokens": MeanTokens, "cls": FirstToken, "max": Maximum}


def join_layers(layers: nn.ModuleList, norm: nn.Module, numbers: Sequence[int]) -> None:
    """Makes an encoder put out the states of layers `numbers`, from 1, in front of its last's: each as if it were that.

    Hooks do it, in packed passes too. States are as many times as wide.

    Args:
        layers: of the encoder.
        norm: that the last layer's states pass through; an identity where each layer ends with its own.
    """
    kept: dict[int, Tensor] = {}

    def keep(number: int, layer: nn.Module, given: object, output: Any) -> None:
        kept[number] = norm.forward(output if torch.is_tensor(output) else output[0])

    def join(last: nn.Module, given: object, output: Any) -> Any:
        states = output if torch.is_tensor(output) else output[0]
        joined = torch.cat([*(kept.pop(number) for number in numbers), states], -1)
        return joined if torch.is_tensor(output) else (joined, *output[1:])

    for number in numbers:
        layers[number - 1].register_forward_hook(partial(keep, number))
    last = layers[-1] if isinstance(norm, nn.Identity) else norm
    last.register_forward_hook(join)


LIKELIHOOD = "likelihood"
HEADS = ("mlp", "product", "gated", LIKELIHOOD)
ONE_LAYER = ("product", "gated")  # of these one hidden layer, so one size


class RegressionHead(nn.Module):
    """Standardise each embedding feature, then layers with one output or several.

    mlp: Linear, GELU, Dropout, LayerNorm per hidden layer, then outputs; the last hidden layer has no LayerNorm, and
    without hidden layers it is a linear model. product: see `TowerProduct`. gated: see `GatedLayer`. likelihood: what
    `score_variants` gives, as it is.

    Args:
        input_sizes: width of each pooled embedding; one number for their sum where `form` does not tell them apart.
        hidden_sizes: widths of hidden layers; product and gated have one.
        dropout: probability in [0, 1).
        form: one of `HEADS`.
        num_outputs: None for one number, without an axis of its own.
    """

    input_mean: Tensor
    input_scale: Tensor

    def __init__(
        self,
        input_sizes: int | Sequence[int],
        hidden_sizes: list[int],
        dropout: float,
        form: str = "mlp",
        num_outputs: int | None = None,
    ):
        super().__init__()
        self.num_outputs = num_outputs
        widths = [input_sizes] if isinstance(input_sizes, int) else [*input_sizes]
        self.register_buffer("input_mean", torch.zeros(sum(widths)))
        self.register_buffer("input_scale", torch.ones(sum(widths)))
        self.layers: nn.Module
        if form == "product":
            self.layers = TowerProduct(widths, hidden_sizes[0], dropout, num_outputs or 1)
        elif form == "gated":
            self.layers = GatedLayer(sum(widths), hidden_sizes[0], dropout, num_outputs or 1)
        elif form == LIKELIHOOD:
            self.layers = nn.Identity()
        else:
            self.layers = _perceptron(sum(widths), hidden_sizes, dropout, num_outputs or 1)

    @property
    def fill(self) -> Tensor:
        """What stands for the embeddings of inputs that a row lacks: the mean, which is standardised to 0; (width,)."""
        return self.input_mean

    def standardize(self, embeddings: Tensor, missing: Tensor | None = None) -> Tensor:
        """Scales (n, sum of widths) to mean 0 and standard deviation 1, float32; 0 where `missing`, likewise (bool)."""
        if missing is not None:  # chosen, not multiplied: nothing of what stands there gets through, NaN neither
            embeddings = torch.where(missing, self.fill, embeddings.float())
        return (embeddings.float() - self.input_mean) * self.input_scale

    def forward(self, embeddings: Tensor, missing: Tensor | None = None) -> Tensor:
        """Maps (n, sum of widths) float32 to (n,) or (n, num_outputs), float32.

        Where `missing`, bool of the shape of `embeddings`, `fill` is taken instead.
        """
        # A head in half precision rounds predictions to a few hundred values.
        with torch.autocast(embeddings.device.type, enabled=False):
            outputs = self.layers(self.standardize(embeddings, missing))
        return outputs.squeeze(-1) if self.num_outputs is None else outputs

    @torch.no_grad()
    def fit_scaling(self, mean: Tensor, std: Tensor) -> None:
        """Stores the statistics; a feature that does not vary is centred and left unscaled."""
        self.input_mean.copy_(mean)
        varies = std > 1e-6 * (1 + mean.abs())
        self.input_scale.copy_(torch.where(varies, 1 / std.clamp(min=1e-12), torch.ones_like(std)))


def _perceptron(input_size: int, hidden_sizes: list[int], dropout: float, num_outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise([input_size, *hidden_sizes])):
        layers += [nn.Linear(fan_in, fan_out), nn.GELU(), nn.Dropout(dropout)]
        if i < len(hidden_sizes) - 1:
            layers.append(nn.LayerNorm(fan_out))
    layers.append(nn.Linear([input_size, *hidden_sizes][-1], num_outputs))
    return nn.Sequential(*layers)


class TowerProduct(nn.Module):
    """What each input is worth for the others: the product of their projections, beside a hidden layer on all of them.

    Antibodies that were not seen keep what an antigen is worth in general, and the product learns which directions of
    one input matter for which of the other with few weights.

    Args:
        widths: of each input.
        rank: directions per input, and width of the hidden layer.
        dropout: probability in [0, 1), on both.
        num_outputs: per row.
    """

    def __init__(self, widths: Sequence[int], rank: int, dropout: float, num_outputs: int):
        super().__init__()
        self.widths = [*widths]
        self.projections = nn.ModuleList(nn.Linear(width, rank) for width in widths)
        self.hidden = nn.Sequential(nn.Linear(sum(widths), rank), nn.GELU())
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * rank, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Maps (n, sum of widths) to (n, num_outputs)."""
        projected = [layer(part) for layer, part in zip(self.projections, features.split(self.widths, dim=-1))]
        product = torch.stack(projected).prod(0)
        return self.output(self.dropout(torch.cat([product, self.hidden(features)], dim=-1)))


class GatedLayer(nn.Module):
    """One hidden layer whose units are linear in the features, each weighed by a gate that looks at all of them.

    Args:
        input_size: sum of the widths.
        size: units.
        dropout: probability in [0, 1), on the weighed units.
        num_outputs: per row.
    """

    def __init__(self, input_size: int, size: int, dropout: float, num_outputs: int):
        super().__init__()
        self.units_and_gates = nn.Linear(input_size, 2 * size)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(size, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Maps (n, input_size) to (n, num_outputs)."""
        return self.output(self.dropout(nn.functional.glu(self.units_and_gates(features))))


def score_variants(
    encoder: nn.Module,
    wild_type: Sequence[int],
    batch: Mapping[str, Tensor],
) -> Tensor:
    """Sums over substitutions log p(residue) - log p(wild type's), both given the wild type: (n, 1), float32.

    The wild type's own score is 0. Rows of another length have NaN.

    Args:
        encoder: a masked language model.
        wild_type: its token ids, special ones included.
        batch: `ResidueTokenizer`'s tensors, (n, tokens).

    Cost: one pass of the wild type, whatever n is.
    """
    mask = batch["attention_mask"]
    given = torch.tensor([wild_type], device=mask.device)
    logits = encoder(input_ids=given, attention_mask=torch.ones_like(given)).logits[0].float()
    relative = logits - logits.gather(1, given.T)  # what log_softmax takes off is the same for all residues
    variants = batch["input_ids"][:, : len(wild_type)]
    is_variant = mask.sum(1) == len(wild_type)
    padded = nn.functional.pad(variants, (0, len(wild_type) - variants.shape[1]))
    return relative.gather(1, padded.T).sum(0).masked_fill(~is_variant, float("nan"))[:, None]

"""What a model keeps of what was fitted after training: a calibration, a ridge beside its head, widths of intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from ..errors import ArgumentError

# Of the distance between the two most alike partners: as far as an embedding may be from a partner's to be taken for
# it. Cached in half precision, or computed on another machine, it is not the same to the bit.
TOLERANCE = 0.1


def calibrate(values: Any, calibration: Mapping[str, Any] | None, ridge: Any = None) -> Any:
    """Maps predictions onto calibrated ones.

    Args:
        values: a tensor or array of any shape, floating point, label units.
        calibration: of kind "line" with `slope` and `intercept`, and, where it stacks, `ridge`, the weight of a ridge
            regression beside the model, with `partners` where it has some (see `AffinityModel.new_ridge`). None
            changes nothing.
        ridge: predictions of that regression, label units; like `values`, or broadcast to them.

    Returns:
        Of the shape and dtype of `values`.

    Raises:
        ArgumentError: a calibration of another kind.
    """
    if calibration is None:
        return values
    if calibration["kind"] != "line":
        raise ArgumentError(f"calibration={dict(calibration)!r}: its kind must be line.")
    mapped = values * calibration["slope"] + calibration["intercept"]
    return mapped if ridge is None else mapped + ridge * calibration["ridge"]


def stacks_ridge(calibration: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether a calibration mixes in a ridge regression, whose weights the model then holds."""
    return bool(calibration and calibration.get("ridge"))


def is_ridge_alone(calibration: Mapping[str, Any] | None) -> bool:
    """Whether the model's own head has no weight in what it predicts."""
    return stacks_ridge(calibration) and calibration["slope"] == 0


def half_width(stored: Mapping[str, Any] | None, level: float) -> float:
    """Half the width of an interval around a prediction, label units.

    Args:
        stored: `AffinityConfig.prediction_intervals`: `levels`, rising, each with one of `half_widths`, and what stands
            behind them (`num_rows`, `num_limits` left out, `unit`, `num_units`); or `reason`, why there are none.
        level: share of rows that the interval is to hold, above 0, below 1; between two stored ones the higher counts.

    Raises:
        ArgumentError: not a level; the model has no intervals, or none of this level.
    """
    if not 0 < level < 1:  # also NaN
        raise ArgumentError(f"An interval of level {level:g}: give the share of rows that it is to hold, 0.9 say.")
    if stored is None:
        raise ArgumentError(
            f"An interval of level {level:g}: this model holds no residuals of validation rows: an earlier version "
            "wrote it, or it is one head of --num_seeds. Run `hf-ext train` again with the arguments of that "
            "run: training that has ended is not repeated where its last checkpoint is there (--resume auto)."
        )
    if stored.get("reason"):
        raise ArgumentError(f"An interval of level {level:g}: this model has none: {stored['reason']}.")
    known = zip(stored["levels"], stored["half_widths"])
    found = next((width for at, width in known if at >= level - 1e-9), None)
    if found is None:
        highest, noun = stored["levels"][-1], "rows" if stored.get("unit") is None else f"values of {stored['unit']}"
        raise ArgumentError(
            f"An interval of level {level:g} needs at least {least_units(level):,} {noun} for validation; "
            f"behind this model's intervals are {describe_basis(stored)}, which allow {highest:g} at most. Ask for "
            "less, or train with more to validate on."
        )
    return float(found)


def least_units(level: float) -> int:
    """How many rows, or units that were held out together, an interval of a level needs at least."""
    return math.ceil(level / (1 - level) - 1e-9)


def describe_basis(stored: Mapping[str, Any]) -> str:
    """120 validation rows; or 12 values of heavy in 120 validation rows."""
    rows = f"{stored['num_rows']:,} validation rows" + (" with exact labels" if stored.get("num_limits") else "")
    return rows if stored.get("unit") is None else f"{stored['num_units']:,} values of {stored['unit']} in {rows}"


class StackedRidge(nn.Module):
    """Predicts from embeddings; a row whose partner (such as its antigen) has weights of its own by these.

    Args:
        width: of the embeddings of all inputs together.
        blocks: (first, width) of those among them that tell partners apart; empty without partners.
        num_partners: how many have weights of their own: none, or two or more.

    Buffers, float32: `weights` (1 + partners, width) and `intercepts` (1 + partners,), label units, those of all rows
    first; `partners` (partners, widths of the blocks), the embedding of each; `reach`, how near another has to be.
    """

    weights: torch.Tensor
    intercepts: torch.Tensor
    partners: torch.Tensor
    reach: torch.Tensor

    def __init__(self, width: int, blocks: Sequence[tuple[int, int]] = (), num_partners: int = 0):
        super().__init__()
        self.blocks = [*blocks]
        self.register_buffer("weights", torch.zeros(1 + num_partners, width))
        self.register_buffer("intercepts", torch.zeros(1 + num_partners))
        if num_partners:
            self.register_buffer("partners", torch.zeros(num_partners, sum(size for _, size in blocks)))
            self.register_buffer("reach", torch.zeros(()))

    @property
    def num_partners(self) -> int:
        """How many have weights of their own."""
        return len(self.weights) - 1

    @torch.no_grad()
    def fill(self, weights: torch.Tensor, intercepts: torch.Tensor, examples: torch.Tensor | None = None) -> None:
        """Takes over what was fitted: see the buffers; `examples`, (partners, width), embeddings of a row of each."""
        self.weights.copy_(weights)
        self.intercepts.copy_(intercepts)
        if examples is not None:
            self.partners.copy_(self._own(examples))
            self.reach.copy_(TOLERANCE * torch.pdist(self.partners.double()).min())

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(n, width), float32 or float64 -> (n,) of that dtype, label units."""
        weights, intercepts = self.weights.to(embeddings), self.intercepts.to(embeddings)
        with torch.autocast(embeddings.device.type, enabled=False):
            if not self.num_partners:
                return embeddings @ weights[0] + intercepts[0]
            number = self._find(embeddings)
            return (embeddings * weights[number]).sum(1) + intercepts[number]

    def _find(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Of each row the number of its weights: 0 where its partner has none, (n,)."""
        # Distances by a product of matrices round away what tells near partners apart.
        exactly = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(self._own(embeddings), self.partners.to(embeddings), compute_mode=exactly)
        nearest = distances.min(1)
        return torch.where(nearest.values <= self.reach, nearest.indices + 1, 0)

    def _own(self, embeddings: torch.Tensor) -> torch.Tensor:
        return torch.cat([embeddings.narrow(1, first, size) for first, size in self.blocks], dim=1)

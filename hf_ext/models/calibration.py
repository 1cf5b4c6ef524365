"""What is stored of a calibration, and how a model applies it: raw predictions in, calibrated ones out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeGuard

import torch

from ..errors import ArgumentError

KINDS = ("line", "isotonic")


def calibrate(
    values: torch.Tensor, calibration: Mapping[str, Any] | None, ridge: torch.Tensor | None = None
) -> torch.Tensor:
    """Maps predictions onto calibrated ones.

    Args:
        values: any shape, floating point, label units.
        calibration: of kind "line" with `slope` and `intercept`, and, where it stacks, `ridge`, the weight of a ridge
            regression beside the model, with `partners` where it has some (see `AffinityModel.new_ridge`); of kind
            "isotonic" with `x`, rising, and `y`, not falling: in between straight, beyond the ends constant. None
            changes nothing.
        ridge: predictions of that regression, label units; like `values`, or broadcast to them.

    Returns:
        Of the shape and dtype of `values`.
    """
    if calibration is None:
        return values
    if calibration["kind"] == "line":
        mapped = values * calibration["slope"] + calibration["intercept"]
        return mapped if ridge is None else mapped + ridge * calibration["ridge"]
    x, y = (torch.tensor(calibration[axis], dtype=values.dtype, device=values.device) for axis in "xy")
    right = torch.searchsorted(x, values.contiguous()).clamp(1, len(x) - 1)
    share = ((values - x[right - 1]) / (x[right] - x[right - 1])).clamp(0, 1)
    return y[right - 1] + share * (y[right] - y[right - 1])


def stacks_ridge(calibration: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether a calibration mixes in a ridge regression, whose weights the model then holds."""
    return bool(calibration and calibration.get("ridge"))


def is_ridge_alone(calibration: Mapping[str, Any] | None) -> bool:
    """Whether the model's own head has no weight in what it predicts."""
    return stacks_ridge(calibration) and calibration["slope"] == 0


def check_calibration(calibration: Any) -> None:
    """Refuses what `calibrate` could not apply, or what would turn the order of predictions around.

    Raises:
        ArgumentError: names what is wrong.
    """
    if calibration is None:
        return
    kind = calibration.get("kind") if isinstance(calibration, Mapping) else None
    if kind not in KINDS:
        raise ArgumentError(f"calibration={calibration!r}: needs a kind, one of {', '.join(KINDS)}.")
    axes = [calibration.get(name) for name in (("slope", "intercept") if kind == "line" else "xy")]
    axes += [calibration["ridge"]] if kind == "line" and "ridge" in calibration else []
    if "partners" in calibration and not _are_partners(calibration["partners"]):
        raise ArgumentError(f"calibration with partners {calibration['partners']!r}: needs inputs and their number.")
    numbers = [axis if isinstance(axis, list) else [axis] for axis in axes]
    if not all(isinstance(v, int | float) and math.isfinite(v) for axis in numbers for v in axis):
        raise ArgumentError(f"calibration of kind {kind}: every number must be finite.")
    if kind == "line":
        slope, ridge = axes[0], calibration.get("ridge", 0.0)
        if slope < 0 or ridge < 0 or not slope + ridge > 0:
            weights = f"slope {slope} and ridge {ridge}" if "ridge" in calibration else f"slope {slope}"
            raise ArgumentError(f"calibration with {weights}: must be above 0, or it would reverse the order.")
        return
    x, y = numbers
    if len(x) != len(y) or len(x) < 2 or any(a >= b for a, b in pairwise(x)) or any(a > b for a, b in pairwise(y)):
        raise ArgumentError(
            "calibration of kind isotonic: needs two or more x, rising, each with a y that never falls."
        )


def _are_partners(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"inputs", "number"}:
        return False
    inputs, number = value["inputs"], value["number"]
    are_names = isinstance(inputs, list) and bool(inputs) and all(isinstance(name, str) for name in inputs)
    return are_names and type(number) is int and number > 1

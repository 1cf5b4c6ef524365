"""What is stored of a calibration, and how a model applies it: raw predictions in, calibrated ones out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from ..errors import ArgumentError

KIND = "line"


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
    """
    if calibration is None:
        return values
    mapped = values * calibration["slope"] + calibration["intercept"]
    return mapped if ridge is None else mapped + ridge * calibration["ridge"]


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
    if kind != KIND:
        raise ArgumentError(f"calibration={calibration!r}: needs a kind, which is {KIND}.")
    if "partners" in calibration and not _are_partners(calibration["partners"]):
        raise ArgumentError(f"calibration with partners {calibration['partners']!r}: needs inputs and their number.")
    numbers = [calibration.get("slope"), calibration.get("intercept"), calibration.get("ridge", 0.0)]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ArgumentError(f"calibration of kind {kind}: every number must be finite.")
    slope, _, ridge = numbers
    if slope < 0 or ridge < 0 or not slope + ridge > 0:
        weights = f"slope {slope} and ridge {ridge}" if "ridge" in calibration else f"slope {slope}"
        raise ArgumentError(f"calibration with {weights}: must be above 0, or it would reverse the order.")


def _are_partners(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"inputs", "number"}:
        return False
    inputs, number = value["inputs"], value["number"]
    are_names = isinstance(inputs, list) and bool(inputs) and all(isinstance(name, str) for name in inputs)
    return are_names and type(number) is int and number > 1

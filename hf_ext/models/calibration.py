"""What is stored of a calibration, and how a model applies it: raw predictions in, calibrated ones out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from ..errors import ArgumentError

KINDS = ("line", "isotonic")


def calibrate(values: torch.Tensor, calibration: Mapping[str, Any] | None) -> torch.Tensor:
    """Maps predictions onto calibrated ones.

    Args:
        values: any shape, floating point, label units.
        calibration: of kind "line" with `slope` and `intercept`; of kind "isotonic" with `x`, rising, and `y`, not
            falling: in between straight, beyond the ends constant. None changes nothing.

    Returns:
        Of the shape and dtype of `values`.
    """
    if calibration is None:
        return values
    if calibration["kind"] == "line":
        return values * calibration["slope"] + calibration["intercept"]
    x, y = (torch.tensor(calibration[axis], dtype=values.dtype, device=values.device) for axis in "xy")
    right = torch.searchsorted(x, values.contiguous()).clamp(1, len(x) - 1)
    share = ((values - x[right - 1]) / (x[right] - x[right - 1])).clamp(0, 1)
    return y[right - 1] + share * (y[right] - y[right - 1])


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
    numbers = [axis if isinstance(axis, list) else [axis] for axis in axes]
    if not all(isinstance(v, int | float) and math.isfinite(v) for axis in numbers for v in axis):
        raise ArgumentError(f"calibration of kind {kind}: every number must be finite.")
    if kind == "line":
        if not axes[0] > 0:
            raise ArgumentError(f"calibration with slope {axes[0]}: must be above 0, or it would reverse the order.")
        return
    x, y = numbers
    if len(x) != len(y) or len(x) < 2 or any(a >= b for a, b in pairwise(x)) or any(a > b for a, b in pairwise(y)):
        raise ArgumentError(
            "calibration of kind isotonic: needs two or more x, rising, each with a y that never falls."
        )

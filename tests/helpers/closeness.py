"""How far numbers are from those they should be, in a way that a number that is none cannot slip through."""

import math

import torch


def largest(values) -> float:
    """The largest of some numbers; NaN if one is, which Python's `max` forgets unless it comes first."""
    numbers = [float(value.detach() if isinstance(value, torch.Tensor) else value) for value in values]
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = 2e-5) -> float:
    """The largest over tensors of max |found - expected| / max |expected|; infinite if one has a tensor more.

    Of a sum whose terms cancel (the gradient of a query whose sequence has one token) rounding is all that is left,
    and how much differs between CPUs. Terms are about as large as the largest tensor's values, and rounded to 2^-24 of
    them: a tensor so small that four such roundings are more than `bound` of it is measured against four / `bound`.
    """
    if found.keys() != expected.keys():
        return math.inf
    scales = {name: x.abs().max().item() for name, x in expected.items()}
    least = 4 * 2**-24 / bound * largest(scales.values())
    errors = {name: (found[name].double() - expected[name]).abs().max().item() for name in expected}
    return largest(error / max(scales[name], least) if error else 0.0 for name, error in errors.items())


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of what two vectors differ by, over that of the second."""
    return ((found - expected).norm() / expected.norm()).item()

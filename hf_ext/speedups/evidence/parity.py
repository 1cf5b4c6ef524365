"""Proof that a changed encoder still computes what it did: the first real rows through the old and the new one.

Of encoders that train, gradients are compared too: those of the embedded tokens, which come through the backward pass
of every layer, of two rows cut to 160 and 100 tokens. Memory for them: about 1 GiB at 650M parameters.

Bounds, on the last hidden states of real tokens, in evaluation mode:
- float32: the largest difference is at most 1e-4, relative to the largest state where that is above 1;
- autocast to bf16 or fp16: the new states are at most twice as far from the float32 result as the old ones were
  (L2; a distance of 0.1 % of that result counts as none);
- weights stored in half precision: new and old states differ by at most 5 % (relative L2).

The loss of a model around such an encoder, on rows from all over the data, may differ by 1e-4 of it (5 % of weights in
half precision). Packed encoders leave positions of padding empty, which a mean without the mask, or a label there,
would read.

Bounds on gradients:
- float32: relative L2 of at most 1 %. TF32, where it is on, rounds factors to 2^-11 of them; the roundings of 400
  products one after the other add up to their root, 20 x 2^-11 = 1 %. A lost or wrong term is far above it;
- autocast: at most twice as far from the float32 gradients as the old ones, as states are;
- weights stored in half precision: 5 %, as states.
Gradients that are not finite are only allowed where the old ones are not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...models import find_encoders
from ..base import Run
from .sample import Sample, evaluating, find_samples, first_rows, sample_model

MAX_DIFFERENCE = 1e-4
MAX_NOISE_RATIO = 2.0  # rounding scores too, as eager attention does, makes about 1.3
MAX_HALF_DISTANCE = 0.05
MAX_GRADIENT_DISTANCE = 0.01
NOT_MEASURED = {"parity": "not measured: no whole encoder and rows at hand"}


@dataclass(frozen=True)
class Parity:
    """How far the new states are from the old ones; no numbers where there are no new ones to compare.

    `max_difference`: absolute, in units of the states. `gradient_distance`: new to old gradients, relative (L2).
    `noise_ratio`, `gradient_noise_ratio`: distance to the float32 result, new over old, under autocast.
    `problem`: what is above its bound, or None.
    """

    max_difference: float | None = None
    noise_ratio: float | None = None
    problem: str | None = None
    gradient_distance: float | None = None
    gradient_noise_ratio: float | None = None

    def evidence(self) -> dict[str, float]:
        """Returns the numbers, with three digits."""
        return {name: float(f"{value:.3g}") for name, value in asdict(self).items() if isinstance(value, float)}


@torch.no_grad()
def prove(run: Run, change: Callable[[], Any], samples: list[Sample] | None = None) -> Parity | None:
    """Makes `change` and compares; None where there is nothing to compare.

    `samples`: what is compared; left out, the encoders with a packed path (`find_samples`).

    Returns the comparison of what is furthest off. Undoing a change that has a `problem` is the caller's.
    Cost: two (float32) or three (autocast) forward passes over four rows, and as many backward passes over two where
    encoders train. The model is moved to the run's device.
    """
    samples = find_samples(run) if samples is None else samples
    around = _sample_around(run, samples)
    with ExitStack() as modes:
        for sample in (*samples, *around):
            modes.enter_context(evaluating(sample.module))
        exact = [_measure(sample, None) for sample in samples]
        before = [_measure(s, s.autocast) if s.autocast else found for s, found in zip(samples, exact)]
        losses = [sample.loss() for sample in around]
        try:
            change()
            after = [_measure(sample, sample.autocast) for sample in samples]
            losses_after = [sample.loss() for sample in around]
        except (RuntimeError, ValueError, TypeError, ImportError) as error:  # what kernels raise where they cannot run
            return Parity(problem=f"it does not run here ({one_line(error)})")
    found = [_score(*measured) for measured in zip(exact, before, after, samples)]
    worst = max(found, key=lambda parity: (parity.problem is not None, parity.max_difference), default=None)
    for sample, old, new in zip(around, losses, losses_after):
        distance = _distance(old, new)
        bound = MAX_HALF_DISTANCE if sample.is_half else MAX_DIFFERENCE
        if worst and not worst.problem and not distance <= bound:
            reads = "the loss reads positions that attention_mask leaves out (a mean without the mask?)"
            worst = replace(worst, problem=f"{reads}: it differs by {distance:.3g} (bound {bound})")
    return worst


def _sample_around(run: Run, samples: list[Sample]) -> list[Sample]:
    """Samples the model around packed encoders; towers of an `AffinityModel` read nothing of padding."""
    if not samples or samples[0].module is run.model or hasattr(run.model, "attach_encoders"):
        return []
    return sample_model(run, first_rows(run.train_dataset, is_spread=True), None)


def _measure(sample: Sample, autocast: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Measures states, and gradients where an encoder trains."""
    has_gradients = sample.trains and find_encoders(sample.module)
    return sample.states(autocast), sample.gradients(autocast) if has_gradients else None


def _score(exact: Any, before: Any, after: Any, sample: Sample) -> Parity:
    """Scores states and gradients `after` against those `before`; `exact` are in float32 where autocast is on."""
    ratio, problem = _compare("states", exact[0], before[0], after[0], sample)
    found = Parity((after[0] - before[0]).abs().max().item(), ratio, problem)
    if before[1] is None or not before[1].isfinite().all():  # they overflow in the training dtype: no kernel's doing
        return found
    ratio, problem = _compare("gradients", exact[1], before[1], after[1], sample)
    distance = _distance(before[1], after[1])
    return replace(found, gradient_distance=distance, gradient_noise_ratio=ratio, problem=found.problem or problem)


def _compare(
    what: str, exact: Tensor, before: Tensor, after: Tensor, sample: Sample
) -> tuple[float | None, str | None]:
    """Compares: the ratio of noise, under autocast, and what is above its bound."""
    if sample.autocast:
        ratio = _noise_ratio(exact, before, after)
        too_noisy = f"{what} have {ratio:.3g} times the rounding noise of the old ones (bound {MAX_NOISE_RATIO})"
        return ratio, None if ratio <= MAX_NOISE_RATIO else too_noisy
    if sample.is_half:
        distance = _distance(before, after)
        bound = MAX_HALF_DISTANCE
    elif what == "states":  # a norm has made them of about 1
        distance = (after - before).abs().max().item() / max(1.0, before.abs().max().item())
        bound = MAX_DIFFERENCE
    else:
        distance = _distance(before, after)
        bound = MAX_GRADIENT_DISTANCE
    return None, None if distance <= bound else f"{what} differ by {distance:.3g} (bound {bound})"


def one_line(error: BaseException) -> str:
    """Shows type and first two lines of an error (torch's compilers name the cause in the second), shortened."""
    lines = " ".join(str(error).strip().splitlines()[:2])
    return f"{type(error).__name__}: {lines[:200]}" if lines else type(error).__name__


def _distance(before: Tensor, after: Tensor) -> float:
    """Computes the relative distance, L2."""
    return ((after - before).norm() / before.norm().clamp(min=torch.finfo(before.dtype).tiny)).item()


def _noise_ratio(exact: Tensor, before: Tensor, after: Tensor) -> float:
    """Computes how much further from `exact` than `before` `after` is; 0.1 % of `exact` counts as no distance."""
    noise, allowed = (found.sub(exact).norm().item() for found in (after, before))
    return noise / max(allowed, 1e-3 * exact.norm().item())

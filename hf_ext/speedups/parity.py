"""Proof that a changed model still computes what it did: the first real rows through the old and the new one.

Encoders of packed families are compared one by one; any other model as a whole, by what it puts out (`sample.py`).

Of encoders that train, gradients are compared too: those of the embedded tokens, which come through the backward pass
of every layer, of two rows cut to 160 and 100 tokens; of other models, those of the first repeated layer that trains.
Memory for them: about 1 GiB at 650M parameters.

Bounds, on the last hidden states of real tokens, in evaluation mode:
- float32: the largest difference is at most 1e-4, relative to the largest state where that is above 1 (always, of what
  other models put out, which may be small);
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
No weight may be replaced or re-initialised, and no dropout changed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from .base import Run
from .sample import EncoderSample, Sample, evaluating, find_samples, first_rows, sample_model

MAX_DIFFERENCE = 1e-4
MAX_NOISE_RATIO = 2.0  # rounding scores too, as eager attention does, makes about 1.3
MAX_HALF_DISTANCE = 0.05
MAX_GRADIENT_DISTANCE = 0.01
NOT_MEASURED = {"parity": "not measured: no whole encoder and rows at hand"}


@dataclass(frozen=True)
class Parity:
    """How far the new states are from the old ones; no numbers where there are no new ones to compare.

    `max_difference` and `mean_difference`: absolute, in units of the states. `cosine`: the smallest over tokens.
    `noise_ratio`: distance to the float32 result, new over old, where the encoder runs under autocast.
    `gradient_distance`: new to old gradients, relative (L2); `gradient_noise_ratio`: as of states, under autocast.
    `problem`: what is above its bound, or None.
    """

    max_difference: float | None = None
    mean_difference: float | None = None
    cosine: float | None = None
    noise_ratio: float | None = None
    problem: str | None = None
    gradient_distance: float | None = None
    gradient_noise_ratio: float | None = None

    def evidence(self) -> dict[str, float]:
        """The numbers, with three digits; the cosine, which is close to 1, with six decimals."""
        numbers = {name: float(f"{value:.3g}") for name, value in asdict(self).items() if isinstance(value, float)}
        return numbers if self.cosine is None else {**numbers, "cosine": round(self.cosine, 6)}


@torch.no_grad()
def prove(run: Run, change: Callable[[], Any]) -> Parity | None:
    """Makes `change` and compares; None where there is nothing to compare (`find_samples`).

    Returns the comparison of what is furthest off. Undoing a change that has a `problem` is the caller's.
    Cost: two (float32) or three (autocast) forward passes over four rows, and as many backward passes over two where
    encoders train. The model is moved to the run's device.
    """
    samples = find_samples(run)
    around = _sample_around(run, samples)
    with ExitStack() as modes:
        for sample in (*samples, *around):
            modes.enter_context(evaluating(sample.module))
        exact = [_measure(sample, None) for sample in samples]
        before = [_measure(s, s.autocast) if s.autocast else found for s, found in zip(samples, exact)]
        losses = [sample.loss() for sample in around]
        identity = [identify(sample.module) for sample in samples]
        try:
            change()
            after = [_measure(sample, sample.autocast) for sample in samples]
            losses_after = [sample.loss() for sample in around]
        except (RuntimeError, ValueError, TypeError, ImportError) as error:  # what kernels raise where they cannot run
            return Parity(problem=f"it does not run here ({one_line(error)})")
    if [identify(sample.module) for sample in samples] != identity:
        return Parity(problem="a weight was replaced or re-initialised, or a dropout changed")
    found = [_judge(*measured) for measured in zip(exact, before, after, samples)]
    worst = max(found, key=lambda parity: (parity.problem is not None, parity.max_difference), default=None)
    for sample, old, new in zip(around, losses, losses_after):
        distance, bound = _distance(old, new), MAX_HALF_DISTANCE if _is_half(sample.dtype) else MAX_DIFFERENCE
        if worst and not worst.problem and not distance <= bound:
            reads = "the loss reads positions that attention_mask leaves out (a mean without the mask?)"
            worst = replace(worst, problem=f"{reads}: it differs by {distance:.3g} (bound {bound})")
    return worst


def _sample_around(run: Run, samples: list[Sample]) -> list[Sample]:
    """The model around packed encoders; towers of an `AffinityModel` read nothing of padding."""
    is_around = bool(samples) and isinstance(samples[0], EncoderSample) and samples[0].module is not run.model
    if not is_around or hasattr(run.model, "attach_encoders"):
        return []
    whole = sample_model(run, first_rows(run.train_dataset, is_spread=True), None)
    return [whole] if whole else []


def _measure(sample: Sample, autocast: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States, and gradients where the encoder trains."""
    return sample.states(autocast), sample.gradients(autocast) if sample.trains else None


def _judge(exact: Any, before: Any, after: Any, sample: Sample) -> Parity:
    states = judge_states(exact[0], before[0], after[0], sample)
    if before[1] is None:
        return states
    gradients = judge_gradients(exact[1], before[1], after[1], sample)
    numbers = {name: getattr(gradients, name) for name in ("gradient_distance", "gradient_noise_ratio")}
    return replace(states, **numbers, problem=states.problem or gradients.problem)


def one_line(error: BaseException) -> str:
    """Type and first two lines of an error (torch's compilers name the cause in the second), 200 characters at most."""
    lines = " ".join(str(error).strip().splitlines()[:2])
    return f"{type(error).__name__}: {lines[:200]}" if lines else type(error).__name__


def judge_states(exact: torch.Tensor, before: torch.Tensor, after: torch.Tensor, sample: Sample) -> Parity:
    """Judges `after` against `before`; `exact` is the float32 result where `sample` runs under autocast."""
    difference = (after - before).abs()
    cosine = nn.functional.cosine_similarity(after, before, dim=1).min().item()
    ratio, problem = None, None
    if sample.autocast:
        ratio = _noise_ratio(exact, before, after)
        if not ratio <= MAX_NOISE_RATIO:
            problem = _too_noisy(ratio)
    elif before.numel() and _is_half(sample.dtype):
        distance = _distance(before, after)
        if not distance <= MAX_HALF_DISTANCE:
            problem = f"states differ by {distance:.3g} (bound {MAX_HALF_DISTANCE})"
    elif not difference.max().item() <= MAX_DIFFERENCE * max(sample.least_scale, before.abs().max().item()):
        problem = f"states differ by {difference.max().item():.3g} (bound {MAX_DIFFERENCE})"
    return Parity(difference.max().item(), difference.mean().item(), cosine, ratio, problem)


def judge_gradients(exact: torch.Tensor, before: torch.Tensor, after: torch.Tensor, sample: Sample) -> Parity:
    """Judges gradients `after` against `before`; `exact` are those in float32 where `sample` runs under autocast."""
    if not before.isfinite().all():  # they overflow in the training dtype: no kernel's doing
        return Parity()
    distance = _distance(before, after)
    if not sample.autocast:
        bound = MAX_HALF_DISTANCE if _is_half(sample.dtype) else MAX_GRADIENT_DISTANCE
        problem = None if distance <= bound else f"gradients differ by {distance:.3g} (bound {bound})"
        return Parity(gradient_distance=distance, problem=problem)
    ratio = _noise_ratio(exact, before, after)
    problem = None if ratio <= MAX_NOISE_RATIO else _too_noisy(ratio) + ", in gradients"
    return Parity(gradient_distance=distance, gradient_noise_ratio=ratio, problem=problem)


def _is_half(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).bits < 32


def _distance(before: torch.Tensor, after: torch.Tensor) -> float:
    """Relative, L2."""
    return ((after - before).norm() / before.norm().clamp(min=torch.finfo(before.dtype).tiny)).item()


def _noise_ratio(exact: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> float:
    """How much further from `exact` than `before` `after` is; 0.1 % of `exact` counts as no distance."""
    noise, allowed = (found.sub(exact).norm().item() for found in (after, before))
    return noise / max(allowed, 1e-3 * exact.norm().item())


def _too_noisy(ratio: float) -> str:
    return f"{ratio:.3g} times the rounding noise of the old one (bound {MAX_NOISE_RATIO})"


def identify(encoder: nn.Module) -> dict[str, Any]:
    """What must not change: each weight (the object, and how often it was written to) and each dropout."""
    weights = {name: (id(weight), weight._version) for name, weight in encoder.named_parameters()}
    rates = [(name, getattr(module, at, None)) for name, module in encoder.named_modules() for at in ("p", "dropout")]
    dropouts = [(name, rate) for name, rate in rates if isinstance(rate, float)]
    config = getattr(encoder, "config", None)
    settings = {name: value for name, value in vars(config).items() if "drop" in name} if config else {}
    return {"weights": weights, "dropouts": dropouts, "settings": settings}

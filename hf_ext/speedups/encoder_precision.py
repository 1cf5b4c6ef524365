"""Half precision for frozen encoders, as long as it leaves the differences between sequences intact.

Class N. Effect: frozen encoders run in bf16 (fp16 before compute capability 8.0); on a GPU their weights are stored in
it too and take half the memory; on a CPU the products run under autocast, where the residual stream stays float32.
Evidence: up to 32 distinct training sequences are encoded both ways; the rounding noise is reported as a share of the
spread between sequences (both centred), per input. Variants of one protein differ little, so the same rounding that is
harmless for a varied set can drown them: above `max_encoder_noise`, or where a probe overflows, the encoders stay in
float32. A single sequence that overflows later is encoded in float32; the plan counts them (`embedding_cache`).
Cost: the probe, 32 sequences twice.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..data.columns import read_columns
from .base import Context, Decision, Kind, Run, off
from .precision import best_precision

NAME = "encoder_precision"
KIND: Kind = "N"
PROBE_SEQUENCES = 32
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def decide(context: Context) -> Decision:
    """Applies to frozen encoders on hardware with a native half precision."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    if not context.model.frozen_inputs:
        return Decision(NAME, KIND, "skipped", "no frozen encoder")
    if context.data.num_rows is None:
        return Decision(NAME, KIND, "skipped", "no training rows at hand to measure the rounding on")
    best = best_precision(context.hardware)
    if best == "fp32":
        return Decision(NAME, KIND, "skipped", f"{context.hardware.name} computes neither bf16 nor fp16 natively")
    mode = "autocast" if context.hardware.kind == "cpu" else "weights"
    settings = {"dtype": best, "mode": mode, "max_noise": context.args.max_encoder_noise}
    return Decision(NAME, KIND, "applied", f"{best} {mode} on {context.hardware.name}", settings)


def apply(decision: Decision, run: Run) -> Decision:
    """Switches the encoders over if the probe allows it; otherwise leaves them in float32 and says so."""
    dtype, mode, bound = (decision.settings[key] for key in ("dtype", "mode", "max_noise"))
    if run.model.config.save_full and mode == "weights":  # weights that are saved with the model stay in float32
        mode = "autocast"
        reason = f"{dtype} autocast: --save_full keeps the weights in float32"
        decision = replace(decision, reason=reason, settings={**decision.settings, "mode": mode})
    run.model.to(run.args.device)
    samples = {name: _sample(run, name) for name in run.model.frozen_inputs}
    reference = {name: _encode(run.model, name, sample) for name, sample in samples.items()}
    set_encoder_dtype(run.model, dtype, mode)
    noise = {name: relative_noise(_encode(run.model, name, samples[name]), reference[name]) for name in samples}
    shown = {name: round(value, 4) if math.isfinite(value) else "not finite" for name, value in noise.items()}
    evidence = {"noise_share": shown, "bound": bound}
    beyond = {name: value for name, value in noise.items() if not value <= bound}  # a NaN is beyond every bound
    if not beyond:
        return decision.with_evidence(**evidence)
    set_encoder_dtype(run.model, None, mode)
    return Decision(NAME, KIND, "skipped", _explain(beyond, dtype, bound), {}, evidence)


def _explain(beyond: dict[str, float], dtype: str, bound: float) -> str:
    overflown = [name for name, value in beyond.items() if not math.isfinite(value)]
    if overflown:
        return f"in {dtype} '{overflown[0]}' has embeddings that are NaN or infinite"
    worst = max(beyond, key=lambda name: beyond[name])
    return f"{dtype} noise on '{worst}' is {beyond[worst]:.0%} of the spread between sequences (bound {bound:.0%})"


def set_encoder_dtype(model: Any, dtype: str | None, mode: str) -> None:
    """Makes frozen encoders compute in `dtype`; None restores float32. Reloads them where weights are stored in it."""
    half = _DTYPES[dtype] if dtype else None
    if mode == "autocast":
        model.config.encoder_autocast = half
    else:
        model.config.encoder_dtype = half or "float32"
        model.release_encoders()


def relative_noise(candidate: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean distance of centred candidate from centred reference, over the reference's mean distance from its centre.

    Args:
        candidate, reference: (n, width), float32. With n < 2 there is no spread to compare with, and the result is 0.
    """
    if len(reference) < 2:
        return 0.0
    centred = reference - reference.mean(0)
    difference = (candidate - candidate.mean(0)) - centred
    return (difference.norm(dim=1).mean() / centred.norm(dim=1).mean().clamp(min=1e-12)).item()


def _sample(run: Run, name: str) -> list[dict[str, torch.Tensor]]:
    """Model inputs of up to 32 distinct training sequences, spread over the set, one sequence each."""
    rows = read_columns(run.train_dataset, run.collator.columns[name])
    distinct = [parts for parts in dict.fromkeys(rows) if any(parts)]  # an input that a row lacks is not encoded
    chosen = distinct[:: max(1, len(distinct) // PROBE_SEQUENCES)][:PROBE_SEQUENCES]
    return [run.collator.encode(name, *[[part] for part in parts]) for parts in chosen]


@torch.no_grad()
def _encode(model: Any, name: str, sample: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    batches = ({key: value.to(model.device) for key, value in batch.items()} for batch in sample)
    return torch.cat([model.encode(name, batch).cpu() for batch in batches])

"""What frozen encoders compute in and are stored in, and the noise that this makes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..data import read_columns
from ..hardware import Hardware
from ..models import VECTORS
from ..processes import fsdp_version
from .base import Context, Costs, Decision, Run, Settings, Speedup, applied, are_weights_split, off, refused, skipped
from .precision import best_precision, no_half

PROBE_SEQUENCES = 16
MAX_NOISE = 0.05  # of the spread between sequences
ADAPTERS = (
    "--load_in_8bit is for frozen encoders, --load_in_4bit for these and, with --use_peft, for the towers of hf-ext "
    "train. For adapters in other models, load them with transformers' BitsAndBytesConfig, adapt them with "
    "peft.get_peft_model, and pass them to FastTrainer"
)
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def asked_bits(args: Any) -> int | None:
    """Returns what `--load_in_8bit` and `--load_in_4bit` ask for; None without either."""
    if args.load_in_8bit:
        return 8
    return 4 if args.load_in_4bit else None


class EncoderPrecision(Speedup):
    """Half precision for frozen encoders, as long as it leaves the differences between sequences intact.

    Class N. Effect: frozen encoders run in bf16 (fp16 before compute capability 8.0); on a GPU their weights are stored
    in it too and take half the memory; on a CPU the products run under autocast, where the residual stream stays
    float32.
    Evidence: up to 16 distinct training sequences are encoded both ways; the rounding noise is reported as a
    share of the spread between sequences (both centred), per input, and the lowest cosine of a sequence's two
    embeddings. Variants of one protein differ little, so the same rounding that is harmless for a varied set can drown
    them: above 5 % of the spread, or where a probe overflows, the encoders stay in float32. A single sequence that
    overflows later is encoded in float32; the plan counts them (`embedding_cache`).
    With `--load_in_8bit` or `--load_in_4bit` linear layers are stored in as many bits, 1 or 0.56 bytes a weight (by
    bitsandbytes, which dequantises 4 bits at each use). The same noise decides; above the bound the run is refused,
    with the number; `--bf16 false` leaves half precision out. The saved model keeps bits and precision, and predicts
    with them. Fast products of 8-bit integers on CPUs were taken out: on trained weights they left five times the noise
    of bf16, above the bound on each of five data sets (benchmarks/README.md, `int8_noise`).
    Cost: the probe, 16 sequences twice; in bits, the encoders' codes are made.
    """

    NAME = "encoder_precision"
    KIND = "N"
    compared = ("dtype", "mode")

    def decide(self, context: Context) -> Decision:
        """Applies to frozen encoders on hardware with a native half precision, and in 8 or 4 bits where asked for."""
        bits = asked_bits(context.args)
        is_wanted = self.wanted(context)
        if not is_wanted and bits is None:
            return off()
        if not context.model.frozen_inputs or VECTORS in context.model.families:
            is_for_adapters = bits == 4 and context.args.use_peft and "AffinityModel" in context.model.classes
            return refused(ADAPTERS) if bits and not is_for_adapters else skipped("no frozen encoder")
        best = best_precision(context.hardware)
        if bits is not None:
            says_no = best != "fp32" and context.user_set(best) and not getattr(context.args, best)  # --bf16 false
            return _decide_bits(context, bits, best if is_wanted and not says_no else "fp32")
        if context.data.num_rows is None:
            return skipped("no training rows at hand to measure the rounding on")
        if best == "fp32":
            return skipped(no_half(context.hardware))
        settings = _settings(context.hardware, best)
        return applied(f"{best} {settings['mode']} on {context.hardware.name}", settings)

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Switches the encoders over if the probe allows it; otherwise leaves them in float32 and says so.

        Bits that were asked for and are beyond the bound are refused.

        Raises:
            MissingDependencyError: bits without a bitsandbytes that works here.
        """
        dtype, mode, bound = (decision.settings[key] for key in ("dtype", "mode", "max_noise"))
        bits = decision.settings.get("bits")
        if run.model.config.save_full and bits:
            reason = "--save_full, which saves the weights in float32: leave out one of the two"
            return refused(f"--load_in_{bits}bit and {reason}")
        if run.model.config.save_full and mode == "weights":  # weights that are saved with the model stay in float32
            mode = "autocast"
            reason = f"{dtype} autocast: --save_full keeps the weights in float32"
            decision = replace(decision, reason=reason, settings={**decision.settings, "mode": mode})
        run.model.to(run.args.device)
        samples = {name: _sample(run, name) for name in run.model.frozen_inputs}
        reference = {name: _encode(run.model, name, sample) for name, sample in samples.items()}
        set_encoder_dtype(run.model, dtype, mode, bits)
        rounded = {name: _encode(run.model, name, sample) for name, sample in samples.items()}
        noise = {name: relative_noise(rounded[name], reference[name]) for name in samples}
        cosines = {name: cosine_similarity(rounded[name], reference[name]).min().item() for name in samples}
        evidence: dict[str, Any] = {"noise_share": _shown(noise, 4), "lowest_cosine": _shown(cosines, 6)}
        evidence["bound"] = bound
        beyond = {name: value for name, value in noise.items() if not value <= bound}  # a NaN is beyond every bound
        if not beyond:
            reason = decision.reason
            if any(noise.values()):  # one sequence has no spread
                lowest = f"cosines from {min(cosines.values()):.5f}"
                reason += f": noise {max(noise.values()):.1%} of the spread between sequences, {lowest}"
            return replace(decision, reason=reason).with_evidence(**evidence)
        set_encoder_dtype(run.model, "fp32", mode)
        if bits:
            reason = f"{_explain(beyond, f'{bits} bit', bound)}: leave out --load_in_{bits}bit"
            return refused(reason).with_evidence(**evidence)
        return skipped(_explain(beyond, dtype, bound), evidence)

    def count(self, costs: Costs, settings: Settings) -> Costs:
        """Lets frozen encoders compute in it."""
        return replace(costs, frozen_dtype=settings["dtype"])


def _decide_bits(context: Context, bits: int, best: str) -> Decision:
    args = context.args
    flag = f"--load_in_{bits}bit"
    if args.load_in_8bit and args.load_in_4bit:
        return refused("--load_in_8bit and --load_in_4bit: give one of the two")
    if EncoderPrecision().left_out(context):
        return refused(f"{flag} and --without {EncoderPrecision.NAME} contradict each other: keep one")
    if context.data.num_rows is None:
        return refused(f"{flag}: no training rows at hand to measure the rounding on. A trained model keeps its bits")
    if are_weights_split(args) or fsdp_version(args) is not None:
        return refused(f"{flag}: FSDP and ZeRO split weights, for which there are no codes: leave it out, or use DDP")
    if context.replicas:
        return refused(context.replicas)
    return applied(f"linear layers in {bits} bits", {**_settings(context.hardware, best), "bits": bits})


def _settings(hardware: Hardware, dtype: str) -> dict[str, Any]:
    mode = "autocast" if hardware.kind == "cpu" else "weights"
    return {"dtype": dtype, "mode": mode, "max_noise": MAX_NOISE}


def halve_encoders(run: Run, hardware: Hardware) -> None:
    """Puts the frozen encoders of `run.model` in half precision, where it has one and the probe allows it."""
    best = best_precision(hardware)
    if best != "fp32":
        EncoderPrecision().apply(applied(best, _settings(hardware, best)), run)


def _shown(values: dict[str, float], digits: int) -> dict[str, float | str]:
    return {name: round(value, digits) if math.isfinite(value) else "not finite" for name, value in values.items()}


def _explain(beyond: dict[str, float], dtype: str, bound: float) -> str:
    overflown = [name for name, value in beyond.items() if not math.isfinite(value)]
    if overflown:
        return f"in {dtype} '{overflown[0]}' has embeddings that are NaN or infinite"
    worst = max(beyond, key=beyond.__getitem__)
    return f"{dtype} noise on '{worst}' is {beyond[worst]:.0%} of the spread between sequences (bound {bound:.0%})"


def set_encoder_dtype(model: Any, dtype: str, mode: str, bits: int | None = None) -> None:
    """Makes frozen encoders compute in `dtype`, "bf16", "fp16" or "fp32", and stores linear layers in `bits`.

    Reloads them where they are stored otherwise than before.
    """
    config = model.config
    stored = (config.encoder_dtype, config.encoder_bits)
    if mode == "autocast":
        config.encoder_autocast = _DTYPES.get(dtype)
    else:
        config.encoder_dtype = _DTYPES.get(dtype, "float32")
    config.encoder_bits = bits
    if (config.encoder_dtype, config.encoder_bits) != stored:
        model.release_encoders()


def relative_noise(candidate: Tensor, reference: Tensor) -> float:
    """Computes the mean distance of centred candidate and reference, over the reference's from its centre.

    Args:
        candidate, reference: (n, width), float32. With n < 2 there is no spread to compare with, and the result is 0.
    """
    if len(reference) < 2:
        return 0.0
    centred = reference - reference.mean(0)
    difference = (candidate - candidate.mean(0)) - centred
    return (difference.norm(dim=1).mean() / centred.norm(dim=1).mean().clamp(min=1e-12)).item()


def _sample(run: Run, name: str) -> list[dict[str, Tensor]]:
    """Samples model inputs of up to 16 distinct training sequences, spread over the set, one sequence each."""
    rows = read_columns(run.train_dataset, run.collator.columns[name])
    distinct = [parts for parts in dict.fromkeys(rows) if any(parts)]  # an input that a row lacks is not encoded
    chosen = distinct[:: max(1, len(distinct) // PROBE_SEQUENCES)][:PROBE_SEQUENCES]
    return [run.collator.encode(name, *[[part] for part in parts]) for parts in chosen]


@torch.no_grad()
def _encode(model: Any, name: str, sample: list[dict[str, Tensor]]) -> Tensor:
    batches = ({key: value.to(model.device) for key, value in batch.items()} for batch in sample)
    return torch.cat([model.encode(name, batch).cpu() for batch in batches])

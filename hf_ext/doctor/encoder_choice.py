"""Which published encoder a device should take: the best that fits its memory and is not too slow on it.

Rates and memory are computed, not measured: two FLOPs per weight and token forward, as many again for gradients of
states and of weights, at 30 % of the published peak; bytes as the doctor counts those of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..hardware import Hardware
from ..memory.stored import GRADIENT_BYTES, HALF_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES
from ..models.configuration import Training
from .sizes import ACTIVATION_BYTES, CHECKPOINTED_BYTES

TOKENS = 8192  # in one pass, layers computed again in the backward pass
SHARE_OF_PEAK = 0.3
LEAST_RATE = {"cuda": 5000, "rocm": 5000, "mps": 500, "cpu": 500}  # residues a second, by kind of device
FLOPS_PER_WEIGHT = {"frozen": 2, "lora": 4, "full": 6}
# Of devices that publish no peak: ESM-2 8M trains at about 3,000 residues/s on two cores (compare_mlm_8M_cpu.json).
UNPUBLISHED_TFLOPS = 3000 * 6 * 7.4e6 / SHARE_OF_PEAK / 1e12
LEAST_GAIN = 0.02  # nats; a larger model must be better by this


@dataclass(frozen=True)
class Candidate:
    """A published encoder.

    Attributes:
        name: on the Hub.
        num_layers, width: of its Transformer.
        num_parameters: in its layers.
        loss: of masked residues of UniRef50's validation sequences, nats (Synthyra/SpeedrunningPLMs, README, 2026-06).
    """

    name: str
    num_layers: int
    width: int
    num_parameters: float
    loss: float


CANDIDATES = (
    Candidate("facebook/esm2_t6_8M_UR50D", 6, 320, 7.4e6, 2.575),
    Candidate("facebook/esm2_t12_35M_UR50D", 12, 480, 33.2e6, 2.453),
    Candidate("facebook/esm2_t30_150M_UR50D", 30, 640, 147.6e6, 2.324),
    Candidate("biohub/ESMC-300M", 30, 960, 331.8e6, 2.161),
    Candidate("biohub/ESMC-600M", 36, 1152, 573.3e6, 2.109),
    Candidate("facebook/esm2_t33_650M_UR50D", 33, 1280, 648.8e6, 2.165),
    Candidate("facebook/esm2_t36_3B_UR50D", 36, 2560, 2831.2e6, 2.053),
)


@dataclass(frozen=True)
class Choice:
    """What to take for one way to train; `candidate` is None where not even the smallest would do.

    Attributes:
        rate: residues a second that it should reach.
        num_bytes: of the device's memory.
        next_one: the better one that was left, and why; empty where there is none.
    """

    training: Training
    candidate: Candidate | None
    rate: float = 0.0
    num_bytes: float = 0.0
    next_one: str = ""


def choose_encoders(hardware: Hardware, room: float | None) -> list[Choice]:
    """For frozen encoders, LoRA and full fine-tuning: the lowest loss of those that fit and are fast enough.

    Args:
        hardware: the device.
        room: bytes of its memory that a run may take; None: not known, all fit.
    """
    return [_choose(hardware, room, training) for training in ("frozen", "lora", "full")]


def needed_bytes(candidate: Candidate, training: Training) -> float:
    """Weights, what trains, and the activations of `TOKENS` tokens in one pass, layers computed again."""
    layer = TOKENS * candidate.width * ACTIVATION_BYTES["half"]
    if training == "frozen":
        return HALF_BYTES * candidate.num_parameters + layer
    inputs = candidate.num_layers * TOKENS * candidate.width * CHECKPOINTED_BYTES
    stored = HALF_BYTES if training == "lora" else WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES
    return stored * candidate.num_parameters + layer + inputs


def expected_rate(candidate: Candidate, training: Training, hardware: Hardware) -> float:
    """Residues a second."""
    peaks = hardware.peak_tflops
    peak = peaks.get("bf16" if hardware.native_bf16 else "fp16") or peaks.get("fp32") or UNPUBLISHED_TFLOPS
    return SHARE_OF_PEAK * peak * 1e12 / (FLOPS_PER_WEIGHT[training] * candidate.num_parameters)


def describe_choices(choices: list[Choice]) -> Iterator[str]:
    """One line for each way to train."""
    words = {"frozen": "frozen", "lora": "LoRA", "full": "all weights"}
    for choice in choices:
        if choice.candidate is None:
            yield f"{words[choice.training]}: none"
            continue
        numbers = f"{choice.num_bytes / 2**30:.1f} GiB, about {choice.rate:,.0f} residues/s expected"
        left = f"; {choice.next_one}" if choice.next_one else ""
        yield f"{words[choice.training]}: {choice.candidate.name} ({numbers}{left})"


def _choose(hardware: Hardware, room: float | None, training: Training) -> Choice:
    taken: Candidate | None = None
    left = ""
    for candidate in sorted(CANDIDATES, key=lambda one: one.num_parameters):
        if taken and candidate.loss > taken.loss - LEAST_GAIN:
            continue
        problem = _problem(candidate, training, hardware, room)
        if not problem:
            taken, left = candidate, ""
        elif taken:
            left = left or f"{candidate.name} {problem}"
    if taken is None:
        return Choice(training, None)
    return Choice(training, taken, expected_rate(taken, training, hardware), needed_bytes(taken, training), left)


def _problem(candidate: Candidate, training: Training, hardware: Hardware, room: float | None) -> str:
    needed, rate = needed_bytes(candidate, training), expected_rate(candidate, training, hardware)
    if room is not None and needed > room:
        return f"takes {needed / 2**30:.0f} GiB"
    return f"would reach {rate:,.0f}" if rate < LEAST_RATE[hardware.kind] else ""

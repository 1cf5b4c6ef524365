"""Which published encoder a device should take: the best that fits its memory and is not too slow on it.

One answer for the doctor, for `--encoders` left out and for the tables in docs/. Rates and bytes are computed, not
measured: two FLOPs per weight and token forward, as many again for gradients of states and of weights, at 30 % of the
published peak. transformers has the classes of each, so no code from the Hub is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware import Hardware
from .configuration import Training

TOKENS = 8192  # in one pass, layers computed again in the backward pass
SHARE_OF_PEAK = 0.3
LEAST_RATE = {"cuda": 5000, "rocm": 5000, "mps": 500, "cpu": 500}  # residues a second, by kind of device
FLOPS_PER_WEIGHT = {"frozen": 2, "lora": 4, "full": 6}
STORED_BYTES = {"frozen": 2, "lora": 2, "full": 16}  # of a weight; that which trains has gradients and AdamW's states
LAYER_BYTES, INPUT_BYTES = 60, 4  # per token and unit of width: what one layer keeps, and what goes into each
USABLE = 0.91  # of a card's nominal memory, as drivers report it
# Of devices that publish no peak: ESM-2 8M trains at about 3,000 residues/s on two cores (compare_mlm_8M_cpu.json).
UNPUBLISHED_TFLOPS = 3000 * 6 * 7.4e6 / SHARE_OF_PEAK / 1e12


@dataclass(frozen=True)
class Candidate:
    """A published encoder: its id on the Hub; layers, their width and their weights.

    `loss`: of masked residues of UniRef50's validation sequences, nats (Synthyra/SpeedrunningPLMs, README, 2026-06).
    """

    name: str
    num_layers: int
    width: int
    num_parameters: float
    loss: float

    def needed_bytes(self, training: Training) -> float:
        """Weights, what trains, and the activations of `TOKENS` tokens in one pass, layers computed again."""
        layers = 0 if training == "frozen" else self.num_layers
        activations = TOKENS * self.width * (LAYER_BYTES + layers * INPUT_BYTES)
        return STORED_BYTES[training] * self.num_parameters + activations

    def expected_rate(self, training: Training, hardware: Hardware) -> float:
        """Residues a second."""
        peaks = hardware.peak_tflops
        peak = peaks.get("bf16" if hardware.native_bf16 else "fp16") or peaks.get("fp32") or UNPUBLISHED_TFLOPS
        return SHARE_OF_PEAK * peak * 1e12 / (FLOPS_PER_WEIGHT[training] * self.num_parameters)


# The best first. ESM-2 650M is left out: ESM C has half of its weights and a lower loss.
CANDIDATES = (
    Candidate("facebook/esm2_t36_3B_UR50D", 36, 2560, 2831.2e6, 2.053),
    Candidate("biohub/ESMC-600M", 36, 1152, 573.3e6, 2.109),
    Candidate("biohub/ESMC-300M", 30, 960, 331.8e6, 2.161),
    Candidate("facebook/esm2_t30_150M_UR50D", 30, 640, 147.6e6, 2.324),
    Candidate("facebook/esm2_t12_35M_UR50D", 12, 480, 33.2e6, 2.453),
    Candidate("facebook/esm2_t6_8M_UR50D", 6, 320, 7.4e6, 2.575),
)


def choose_encoder(hardware: Hardware, training: Training = "frozen") -> Candidate:
    """The encoder to take on a device: the lowest loss of those that fit and are fast enough; else the smallest."""
    room = float("inf") if hardware.memory_gib is None else hardware.memory_gib * 2**30 * USABLE
    for candidate in CANDIDATES:
        is_fast = candidate.expected_rate(training, hardware) >= LEAST_RATE[hardware.kind]
        if is_fast and candidate.needed_bytes(training) <= room:
            return candidate
    return CANDIDATES[-1]

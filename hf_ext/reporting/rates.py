"""Rates from sums of counts and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..hardware import Hardware


@dataclass(frozen=True)
class Device:
    """What a run computes on: `dtype` is a key of `hardware.peak_tflops`."""

    hardware: Hardware
    dtype: str
    num_processes: int

    @property
    def peak_flops(self) -> float:
        """Of all processes together, per second."""
        return self.hardware.peak_tflops[self.dtype] * 1e12 * self.num_processes

    def why_no_mfu(self, flops_unknown: str) -> str:
        """Why MFU is not given; empty where it is."""
        if self.dtype not in self.hardware.peak_tflops:
            return f"no published {self.dtype} peak for {self.hardware.name}"
        return flops_unknown


def mean_rates(sums: Mapping[str, float], unit: str) -> dict[str, float]:
    """Rates per second and shares from sums over steps; empty where no time was measured.

    Args:
        sums: `seconds`, `data_wait_seconds`, `residues`, `tokens`, `padded_tokens`, `sequences`.
        unit: "residues", "tokens" or "sequences": the finest that was counted in full.
    """
    seconds = sums["seconds"]
    if seconds <= 0:
        return {}
    rates = {f"{unit}_per_s": sums[unit] / seconds, "sequences_per_s": sums["sequences"] / seconds}
    if sums["padded_tokens"] and unit != "sequences":
        rates["padded_tokens_per_s"] = sums["padded_tokens"] / seconds
        rates["padding_share"] = 1 - sums["tokens"] / sums["padded_tokens"]
    rates["data_wait_share"] = sums["data_wait_seconds"] / seconds
    return rates

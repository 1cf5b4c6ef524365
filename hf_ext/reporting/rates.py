"""Rates from sums of counts and seconds, and how they compare with a baseline that was measured before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
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


def read_baseline(path: str, hardware_name: str) -> dict[str, float]:
    """Rates of the baseline in a comparison that `recipes/compare.py` wrote: name -> median over its rounds.

    Raises:
        ArgumentError: the file cannot be read, is no such comparison, or was measured on other hardware.
    """
    try:
        with open(path, encoding="utf-8") as file:
            baseline = json.load(file)["baseline"]
        rates, device = dict(baseline["rates"]), baseline["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"--baseline_json {path}: not a comparison.json of recipes/compare.py ({type(error).__name__}: {error})."
        ) from error
    if device != hardware_name:
        raise ArgumentError(
            f"--baseline_json {path}: measured on {device}, this is {hardware_name}: speeds of two machines do not "
            "compare. Measure a baseline here with recipes/compare.py, or leave --baseline_json out."
        )
    return rates


def find_baseline(args: Any, hardware_name: str) -> dict[str, float]:
    """Rates of the baseline that `args` name, from a file or as batches per second; empty where they name none.

    Raises:
        ArgumentError: as `read_baseline`.
    """
    if path := getattr(args, "baseline_json", None):
        return read_baseline(path, hardware_name)
    batches = getattr(args, "baseline_batches_per_second", None)
    return {"sequences_per_s": batches * args.baseline_batch_size} if batches else {}


def speed_against(baseline: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
    """`speed_vs_baseline`: the ratio of the finest unit that both have; empty where there is none."""
    for name in ("residues_per_s", "tokens_per_s", "sequences_per_s"):
        if baseline.get(name) and name in rates:
            return {"speed_vs_baseline": rates[name] / baseline[name]}
    return {}

"""What a card could reach at most: matrix products and attention near their peaks, the rest at memory speed.

Of ESM-2 650M under autocast, forward and backward, element-wise operations move 972 kB per layer and token in 108
kernels (counted on a CPU); 759 bytes per unit of width. Products run at 80 % of the published peak, attention at 55 %,
memory at 85 %: usual shares, assumed here and not measured on a card.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_ext.hardware import Hardware

BYTES_PER_UNIT = 972_000 / 1280  # element-wise, per layer, token and unit of width
PRODUCTS, ATTENTION, MEMORY = 0.80, 0.55, 0.85
LEFT = (1.0, 0.45, 0.30)  # of the element-wise traffic, after fusing
# GB/s, from the data sheets that hf_ext/hardware.csv names.
BANDWIDTH = {
    **{"T4": 320, "V100-16GB": 900, "V100-32GB": 900, "A100-40GB": 1555, "A100-80GB": 2039, "A10": 600, "A10G": 600},
    **{"A30": 933, "A40": 696, "RTX-A6000": 768, "RTX-6000-Ada": 960, "L4": 300, "L40S": 864, "H100-SXM": 3350},
    **{"H100-PCIe": 2000, "H100-NVL": 3900, "GH200-96GB": 4000, "GH200-144GB": 4900, "H200": 4800, "B200": 8000},
    **{"RTX-3090": 936, "RTX-4090": 1008, "RTX-5090": 1792},
}


def find_bandwidth(hardware: Hardware) -> float | None:
    """Bytes per second of the device's memory; of a card without a data sheet from its driver; None where unknown."""
    if hardware.name in BANDWIDTH:
        return BANDWIDTH[hardware.name] * 1e9
    if hardware.kind != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2.0 * clock * 1e3 * width / 8 or None  # kHz, bits; two transfers per clock


def find_roofline(
    flops: tuple[float, float],
    attended: float,
    shape: tuple[int, int],
    peak: float,
    bandwidth: float,
    left: float,
) -> dict[str, float]:
    """Tokens per second and MFU of a full training step.

    Args:
        flops: per token, and per token and token attended to; `flops_coefficients`.
        attended: tokens that a token attends to, in the mean over tokens.
        shape: layers, width.
        peak: FLOP/s.
        bandwidth: bytes per second.
        left: of the element-wise traffic.
    """
    linear, attention = flops[0], flops[1] * attended
    traffic = BYTES_PER_UNIT * shape[0] * shape[1] * left
    seconds = linear / (PRODUCTS * peak) + attention / (ATTENTION * peak) + traffic / (MEMORY * bandwidth)
    return {"left": left, "tokens_per_s": 1 / seconds, "mfu": (linear + attention) / seconds / peak}


def describe_roofline(
    hardware: Hardware, dtype: str, flops: tuple[float, float], attended: float, shape: tuple[int, int]
) -> dict[str, Any]:
    """Rooflines at each share of `LEFT`, or why there is none."""
    bandwidth, peak = find_bandwidth(hardware), hardware.peak_tflops.get(dtype)
    if peak is None or bandwidth is None:
        what = f"{dtype} peak" if peak is None else "memory bandwidth"
        return {"not_known": f"no published {what} of {hardware.name}"}
    found = [find_roofline(flops, attended, shape, peak * 1e12, bandwidth, left) for left in LEFT]
    return {"peak_tflops": peak, "bandwidth_gb_s": bandwidth / 1e9, "at": found}

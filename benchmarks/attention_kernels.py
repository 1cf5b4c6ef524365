"""Attention kernels for packed sequences on this machine: forward and backward, interleaved, medians.

    python benchmarks/attention_kernels.py --output benchmarks/results/attention_kernels_cpu.json

`blocked` is hf_ext's kernel for CPUs, `padded` is torch SDPA with padding around attention only,
`segments` is SDPA on each sequence by itself. 20 heads of 16, as in ESM-2 8M. `matmul` is torch's float32 setting:
"medium" is what the `cpu_matmul` speed-up selects where it is exact; with "highest", `blocked` hands float32 over to
SDPA. (The kernel `grouped` of older results is gone: `benchmarks/results/cpu_step_fast_bf16.json`.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_ext.data.varlen_layout import VarlenLayout
from hf_ext.hardware import detect_hardware
from hf_ext.models.attention import KERNELS

HEADS, HEAD_SIZE = 20, 16
# Token counts per sequence, with the two framing tokens.
CASES = {
    "32 x 50": [50] * 32,
    "8 x 122": [122] * 8,
    "8 x 267": [267] * 8,
    "4 x 632": [632] * 4,
    "2 x 1022": [1022] * 2,
    "3 x 109, 3 x 122, 2 x 632": [109] * 3 + [122] * 3 + [632] * 2,
}


def segments_attention(query, key, value, segments, scaling, dropout, bias):
    """SDPA on one sequence after the other."""
    parts = []
    for start, end in zip(segments.cu_seqlens[:-1].tolist(), segments.cu_seqlens[1:].tolist()):
        one = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        parts.append(scaled_dot_product_attention(*one, scale=scaling)[0].transpose(0, 1))
    return torch.cat(parts)


def make_pass(kernel: Callable, lengths: list[int], dtype: torch.dtype) -> Callable[[], float]:
    """A function that runs forward and backward once and returns the seconds."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    segments = VarlenLayout.from_mask(mask)
    shape = (sum(lengths), HEADS, HEAD_SIZE)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape, dtype=dtype)

    def run() -> float:
        start = time.perf_counter()
        kernel(*inputs, segments, HEAD_SIZE**-0.5, 0.0, None).backward(grad)
        return time.perf_counter() - start

    return run


def measure(rounds: int) -> list[dict]:
    """One row per case and dtype: milliseconds per kernel, and each kernel's time over `blocked`'s, round by round."""
    kernels = {
        "blocked": KERNELS["blocked"],
        "padded": KERNELS["padded"],
        "segments": segments_attention,
    }
    rows = []
    for name, lengths in CASES.items():
        for dtype, matmul in ((torch.float32, "highest"), (torch.float32, "medium"), (torch.bfloat16, "highest")):
            torch.set_float32_matmul_precision(matmul)
            passes = {kernel: make_pass(function, lengths, dtype) for kernel, function in kernels.items()}
            for run in passes.values():
                run()
            times = [{kernel: run() for kernel, run in passes.items()} for _ in range(rounds)]
            row: dict = {"sequences": name, "dtype": str(dtype).removeprefix("torch."), "matmul": matmul}
            row["rounds"] = rounds
            for kernel in kernels:
                row[f"{kernel}_ms"] = round(1e3 * statistics.median(t[kernel] for t in times), 2)
                ratios = sorted(t[kernel] / t["blocked"] for t in times)
                row[f"{kernel}_over_blocked"] = [round(ratios[int(q * (rounds - 1))], 2) for q in (0.25, 0.5, 0.75)]
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    device = detect_hardware("cpu")
    result = {
        "device": device.name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "heads": HEADS,
        "head_size": HEAD_SIZE,
        "rows": measure(args.rounds),
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

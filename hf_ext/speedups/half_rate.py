"""Whether a CPU multiplies matrices faster in bf16 than in float32: having the instructions does not say so.

On one core of a virtual Xeon that lists AVX512-BF16 and hides AMX it measured half as fast
(`benchmarks/results/cpu_step_avx512.json`). So it is measured, once per machine (`measured_once.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..matmul import read_matmul_precision
from .measured_once import measure_once
from .taking_turns import times_as_fast

GAIN = "bf16_over_float32"  # rates of products, as evidence
MIN_GAIN = 1.2  # casts cost too; below it, noise would choose
_SHAPE = (1024, 512, 1024)  # tokens, width in, width out: of a small encoder's feed-forward layer


def half_gain(args: Any, name: str) -> float:
    """How many times as fast products of matrices are in bf16 as in float32 with the settings in force, on the CPU.

    All processes call it and go by the main one's time, or by what the plan of the run that is continued records, or an
    earlier run found on this machine.

    Args:
        args: of the run.
        name: of the decision that keeps it, as `GAIN`, in its evidence.

    Cost: about a tenth of a second of processor time, once.
    """
    return measure_once(args, name, GAIN, measure_half_gain, settings=read_matmul_precision())


def measure_half_gain() -> float:
    """The ratio; see `times_as_fast`."""
    tokens, width, out = _SHAPE
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(shape, generator=generator) for shape in ((tokens, width), (width, out))]
    return times_as_fast(partial(torch.mm, *(x.bfloat16() for x in exact)), partial(torch.mm, *exact))


def too_slow(gain: float) -> str | None:
    """Why bf16 is not taken on this CPU; None where it pays."""
    return None if gain >= MIN_GAIN else f"products in bf16 are {gain:.2f} times as fast as in float32 on this CPU"

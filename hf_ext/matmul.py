"""What float32 matrix products are computed in: read, set and put back, whichever of torch's two ways set it.

torch 2.13 has a general setting (`set_float32_matmul_precision`) and one per backend (`fp32_precision`). Reading the
first raises where the second was used, as `--tf32` and `--torch_compile` of transformers do. So it is never read here;
it is written, before those of the backends, since others read it, torch's compiler among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from .held import Held

General = Literal["highest", "high", "medium"]


@dataclass(frozen=True)
class MatmulPrecision:
    """`on_gpu` and `on_cpu` (oneDNN): "none" and "ieee" are float32, others "tf32" and "bf16"."""

    on_gpu: str
    on_cpu: str

    @property
    def general(self) -> General:
        """The general setting that agrees with both."""
        if self.on_cpu == "bf16":
            return "medium"
        return "high" if "tf32" in (self.on_gpu, self.on_cpu) else "highest"

    def name(self, device_type: str) -> str:
        """ "float32", "tf32" or "bf16": what products of a device ("cuda", "cpu", ...) are computed in."""
        found = {"cuda": self.on_gpu, "cpu": self.on_cpu}.get(device_type, "none")
        return "float32" if found in ("none", "ieee") else found


FAST_GPU = MatmulPrecision("tf32", "tf32")  # what "high" means
FAST_CPU = MatmulPrecision("tf32", "bf16")  # what "medium" means


def read_matmul_precision() -> MatmulPrecision:
    """The settings of this process; raises nothing."""
    return MatmulPrecision(torch.backends.cuda.matmul.fp32_precision, _onednn().fp32_precision)


def set_matmul_precision(precision: MatmulPrecision) -> None:
    """Sets all of torch's settings so that they agree."""
    torch.set_float32_matmul_precision(precision.general)
    torch.backends.cuda.matmul.fp32_precision = precision.on_gpu
    _onednn().fp32_precision = precision.on_cpu


def _onednn() -> Any:
    return cast(Any, torch.backends.mkldnn).matmul  # not in torch's type stubs


HELD_MATMUL = Held(read_matmul_precision, set_matmul_precision)

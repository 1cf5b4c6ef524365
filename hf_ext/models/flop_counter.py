"""torch's counter of FLOPs, with the attention on CPUs that it leaves out.

torch before 2.15 counts no `_scaled_dot_product_flash_attention_for_cpu`, which SDPA calls on a CPU, and none knows the
operation of `cpu_attention.py`. Remove what `torch.utils.flop_counter.flop_registry` has by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from .cpu_attention import BLOCKED


def flop_counter() -> FlopCounterMode:
    """Counts the products of matrices of all that runs inside, attention included, on any device.

    As torch counts its fused kernels, a backward pass of attention has the scores that it computes again in it: 7
    products forward and backward, where model FLOPs utilisation counts 6.
    """
    aten = torch.ops.aten
    formulas: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        BLOCKED: _blocked,  # its backward pass is made of products that are seen
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _attention(query: Any, key: Any, value: Any, *others: Any, **settings: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *others: Any, **settings: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _blocked(query: Any, key: Any, value: Any, **settings: Any) -> int:
    """Of (sequences * heads, tokens, head size)."""
    return sdpa_flop_count(*((shape[0], 1, *shape[1:]) for shape in (query, key, value)))

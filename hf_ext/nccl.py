"""NCCL's environment variables for four kinds of machine: few of them, each with its reason.

NCCL finds out how GPUs are connected. Presets hold variables of its guide's chapter "System configuration" only, and
leave alone what overrules its choice ("should not be used in production"), so `pcie` and `nvlink` set little.
Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

_ERRORS = {"NCCL_DEBUG": "WARN"}
_THREADS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
NCCL_PRESETS: Mapping[str, Mapping[str, str]] = {
    "pcie": _ERRORS,
    "nvlink": _ERRORS,
    "infiniband": _ERRORS | {"NCCL_NET": "IB"},
    "sockets": _ERRORS | {"NCCL_NET": "Socket"} | _THREADS,
}
REASONS = {
    "NCCL_DEBUG": "NCCL prints why a call failed, which it does not otherwise",
    "NCCL_NET": "machines talk by this network, or NCCL fails: it would take another one silently",
    **dict.fromkeys(
        _THREADS, "the guide's value for 100 Gbit/s networks, where one socket is the limit; takes CPU time"
    ),
}


def known_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those set variables that presets are about; no others, because NCCL_PSK is a secret key."""
    return {name: environment[name] for name in sorted(REASONS) if name in environment}


def is_connected() -> bool:
    """Whether NCCL has read its variables: it does when it connects processes, in torch at their first message."""
    if not distributed.is_initialized() or "nccl" not in distributed.get_backend():
        return False
    group: Any = distributed.group.WORLD
    return bool(group._get_backend(torch.device("cuda"))._is_initialized())

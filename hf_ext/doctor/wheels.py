"""Whether the installed torch has kernels for a CUDA card; each wheel is built for some."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..hardware import Hardware

# Default wheels of torch 2.11 and later are built for CUDA 13, which has no Pascal and no Volta.
DEFAULT_WHEELS_FROM = (7, 5)


def lacks_kernels(hardware: Hardware, architectures: Iterable[str]) -> bool:
    """Whether none of `architectures`, as `torch.cuda.get_arch_list()` names them, runs on a card.

    "sm_86" runs on cards of the same major capability from 8.6 on, "sm_90a" on 9.0 only; "compute_90" is compiled
    anew for every later card. A build without CUDA has none; then it is what the default wheels have.
    """
    card, known = hardware.compute_capability, [*architectures]
    if card is None:
        return False
    return not any(_runs(name, card) for name in known) if known else card < DEFAULT_WHEELS_FROM


def _runs(architecture: str, card: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    built = int(match[2]), int(match[3])
    if match[4] == "a":
        return built == card
    return built <= card if match[1] == "compute" else built[0] == card[0] and built[1] <= card[1]


def advise(hardware: Hardware, architectures: Iterable[str]) -> str:
    """What to install: older cards have kernels in the wheels of older CUDA versions, newer ones in newer wheels."""
    built = [(int(m[1]), int(m[2])) for name in architectures if (m := re.fullmatch(r"sm_(\d+)(\d)[a-z]?", name))]
    oldest = min(built, default=DEFAULT_WHEELS_FROM)
    if hardware.compute_capability is not None and hardware.compute_capability < oldest:
        return (
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126 (built for CUDA "
            "12.6, which has kernels from compute capability 5.0 on)"
        )
    return "pip install --upgrade torch (newer wheels have kernels for newer cards)"

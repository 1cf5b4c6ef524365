"""Flash attention 3 and 4 where `varlen` and torch's SDPA call 2, by torch's own switch.

`torch.nn.attention.activate_flash_attention_impl` (a prototype in torch 2.13) registers the kernels of an installed
package for the process. Remove when torch takes the newest that it finds by itself.
"""

from __future__ import annotations

from ..hardware import Hardware
from ..held import Held
from ..optional import import_problem

# By torch's name: the module it imports, and the major compute capabilities it answers (torch/nn/attention/_fa3.py and
# _fa4.py, 2.13). On Hopper 3 comes first: 4 is compiled when it is first called.
VERSIONS: dict[str, tuple[str, tuple[int, ...]]] = {
    "FA3": ("flash_attn_interface", (9,)),
    "FA4": ("flash_attn.cute.interface", (9, 10)),
}


def find_newer_flash(hardware: Hardware) -> str | None:
    """The first of `VERSIONS` that was made for a card and whose package imports here; None where there is none."""
    major = hardware.compute_capability[0] if hardware.kind == "cuda" and hardware.compute_capability else None
    for name, (module, majors) in VERSIONS.items():
        if major in majors and import_problem(module) is None and _knows(name):
            return name
    return None


def _knows(name: str) -> bool:
    """Whether this torch has a switch for it."""
    import torch.nn.attention as attention

    return name in getattr(attention, "list_flash_attention_impls", list)()


def _read() -> str | None:
    import torch.nn.attention as attention

    return attention.current_flash_attention_impl()


def _switch(name: str | None) -> None:
    import torch.nn.attention as attention

    if name is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(name)


# What torch's flash attention is in this process; None is its own. To hold a version raises RuntimeError or ImportError
# where the package has no kernels that torch can register.
HELD_FLASH = Held(_read, _switch)

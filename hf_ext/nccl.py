"""NCCL's environment variables for four kinds of machine: few of them, each with its reason and its source.

    eval "$(python -m hf_ext.nccl infiniband)"      # in the shell that runs accelerate launch, on each machine
    accelerate launch ... --nccl_preset infiniband  # or in each process, before the process group exists

NCCL finds out how GPUs are connected and chooses the way between them. Its guide keeps what suits production, "System
configuration", apart from what overrules that choice, "Debugging", which "should not be used in production". Presets
hold variables of the first chapter only, so `pcie` and `nvlink` set little: they are checked against the machine
instead. Not set, because the default is right: NCCL_P2P_LEVEL, NCCL_SHM_DISABLE, NCCL_NET_GDR_LEVEL (chosen by NCCL),
NCCL_IB_TIMEOUT (20 since NCCL 2.23), NCCL_CROSS_NIC (2), TORCH_NCCL_ASYNC_ERROR_HANDLING (3: the process ends).
Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (docs/userguide/source/env.rst of
NVIDIA/nccl); torch's: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ArgumentError, exit_on_errors

RDMA_FOLDER = "/sys/class/infiniband"


@dataclass(frozen=True)
class Variable:
    """One environment variable of a preset; `source` is its section in NVIDIA's guide."""

    name: str
    value: str
    reason: str

    @property
    def source(self) -> str:
        return f"NCCL guide, System configuration, {self.name}"


_ERRORS = Variable("NCCL_DEBUG", "WARN", "NCCL prints why a call failed, which it does not otherwise")
_THREADS = "the guide's value for 100 Gbit/s networks, where one socket is the limit; takes CPU time"
NCCL_PRESETS: Mapping[str, tuple[Variable, ...]] = {
    "pcie": (_ERRORS,),
    "nvlink": (_ERRORS,),
    "infiniband": (
        _ERRORS,
        Variable("NCCL_NET", "IB", "machines talk by RDMA, or NCCL fails: it would fall back to slow sockets silently"),
    ),
    "sockets": (
        _ERRORS,
        Variable("NCCL_NET", "Socket", "machines talk by TCP, also where RDMA cards that lead nowhere are found"),
        Variable("NCCL_SOCKET_NTHREADS", "4", _THREADS),
        Variable("NCCL_NSOCKS_PERTHREAD", "4", _THREADS),
    ),
}

# What the guide's chapter "Debugging" offers as a workaround, and what it costs while it is set.
_WORKAROUNDS = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a machine do not reach each other by NVLink or PCIe",
    ("NCCL_P2P_LEVEL", "LOC"): "GPUs of a machine do not reach each other by NVLink or PCIe",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of a machine that cannot reach each other use the network",
    ("NCCL_IB_DISABLE", "1"): "no RDMA between machines",
}


def preset_variables(preset: str) -> tuple[Variable, ...]:
    """The variables of a preset.

    Raises:
        ArgumentError: an unknown name.
    """
    if preset not in NCCL_PRESETS:
        raise ArgumentError(f"nccl_preset={preset}: allowed are {', '.join(NCCL_PRESETS)}.")
    return NCCL_PRESETS[preset]


def set_preset(preset: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what is not set yet. Takes effect on process groups made after it; what the user set stays as it is."""
    for variable in preset_variables(preset):
        environment.setdefault(variable.name, variable.value)


def missing_variables(preset: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the preset's variables that are not set at all."""
    return [variable.name for variable in preset_variables(preset) if variable.name not in environment]


def find_conflicts(preset: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What in the environment is not as the preset has it, a sentence each: other values, and workarounds."""
    found = []
    for variable in preset_variables(preset):
        value = environment.get(variable.name, variable.value)
        if value != variable.value:
            found.append(f"{variable.name}={value} was set before and stays, the preset has {variable.value}")
    for (name, value), effect in _WORKAROUNDS.items():
        if environment.get(name, "").upper() == value:
            found.append(f"{name}={value} is set: {effect}")
    return found


def known_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those set variables that presets and conflicts are about; no others, because NCCL_PSK is a secret key."""
    names = {v.name for variables in NCCL_PRESETS.values() for v in variables} | {name for name, _ in _WORKAROUNDS}
    return {name: environment[name] for name in sorted(names) if name in environment}


@dataclass(frozen=True)
class Topology:
    """How the GPUs of this machine are connected: kinds of `nvidia-smi topo -m` (NV4, PIX, PXB, PHB, NODE, SYS).

    Attributes:
        links: kind of link of each pair of GPUs; empty with a single GPU. Of all GPUs, also hidden ones.
        rdma_devices: names of InfiniBand or RoCE devices with an active port.
    """

    links: tuple[str, ...]
    rdma_devices: tuple[str, ...] = ()

    @property
    def num_nvlinks(self) -> int:
        """Pairs of GPUs that NVLink connects."""
        return sum(link.startswith("NV") for link in self.links)

    def suggest(self, num_machines: int = 1) -> str:
        """The preset for this machine, or for several like it."""
        if num_machines > 1:
            return "infiniband" if self.rdma_devices else "sockets"
        return "nvlink" if self.num_nvlinks else "pcie"

    def __str__(self) -> str:
        gpus = f"GPUs connected by {', '.join(sorted(set(self.links)))}" if self.links else "a single GPU"
        return f"{gpus}; RDMA devices: {', '.join(self.rdma_devices) or 'none'}"


def read_topology() -> Topology | None:
    """Asks nvidia-smi and /sys; None where there is no nvidia-smi or it fails. Cost: less than a second."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return Topology(parse_links(done.stdout), find_rdma_devices(RDMA_FOLDER))


def parse_links(matrix: str) -> tuple[str, ...]:
    """The link of each pair of GPUs, from what `nvidia-smi topo -m` prints.

    Columns of GPUs come first, those of network cards and affinities after them; the header is underlined by escapes.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    rows = [words for words in lines if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words]  # X: itself
    return tuple(row[1 + j] for i, row in enumerate(rows) for j in range(i + 1, len(rows)))


def find_rdma_devices(folder: str) -> tuple[str, ...]:
    """Names of devices below `folder` (/sys/class/infiniband) that have an active port."""
    ports = sorted(Path(folder).glob("*/ports/*/state"))
    active = [port.parents[2].name for port in ports if "ACTIVE" in port.read_text(encoding="utf-8")]
    return tuple(dict.fromkeys(active))


def export_lines(preset: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Lines for a shell's `eval`: each variable with its reason; what is set already is a comment."""
    lines = []
    for variable in preset_variables(preset):
        lines.append(f"# {variable.reason} ({variable.source})")
        if variable.name in environment:
            lines.append(f"# {variable.name} is set already and stays as it is")
        else:
            lines.append(f"export {variable.name}={shlex.quote(variable.value)}")
    return lines + [f"# {conflict}" for conflict in find_conflicts(preset, environment)]


def main(words: Sequence[str]) -> None:
    """Prints the lines of a preset; without one, what was found and which presets there are."""
    topology = read_topology()
    seen = "no topology read" if topology is None else f"{topology}: --nccl_preset {topology.suggest()} on one machine"
    print(f"# {seen}")
    if len(words) != 1:
        raise ArgumentError(f"Give one preset: python -m hf_ext.nccl {'|'.join(NCCL_PRESETS)}.")
    print("\n".join(export_lines(words[0])))


if __name__ == "__main__":
    with exit_on_errors():
        main(sys.argv[1:])

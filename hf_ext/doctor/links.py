"""What connects GPUs: published bandwidth in one direction."""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware import Hardware

_PCIE = "PCI-SIG: {} GT/s x 16 lanes x 128/130"
_NVLINK = "NVIDIA {} datasheet: {} GB/s, half of it in each direction"
_NETWORK = "{}, {}"


@dataclass(frozen=True)
class Link:
    """`per_gpu`: every GPU has its own; else the GPUs of a machine share one."""

    name: str
    gb_per_second: float
    source: str
    per_gpu: bool = True


LINKS = {
    link.name: link
    for link in (
        Link("nvlink2", 150, _NVLINK.format("V100 SXM2", 300)),
        Link("nvlink3", 300, _NVLINK.format("A100 SXM", 600)),
        Link("nvlink4", 450, _NVLINK.format("H100 SXM", 900)),
        Link("nvlink5", 900, _NVLINK.format("Blackwell", 1800)),
        Link("pcie3", 15.75, _PCIE.format(8)),
        Link("pcie4", 31.5, _PCIE.format(16)),
        Link("pcie5", 63, _PCIE.format(32)),
        Link("infiniband-hdr", 25, _NETWORK.format("InfiniBand HDR 200 Gbit/s", "one per GPU, as in DGX A100")),
        Link("infiniband-ndr", 50, _NETWORK.format("InfiniBand NDR 400 Gbit/s", "one per GPU, as in DGX H100")),
        Link("ethernet-10g", 1.25, _NETWORK.format("10 Gbit/s Ethernet", "one per machine"), per_gpu=False),
        Link("ethernet-25g", 3.125, _NETWORK.format("25 Gbit/s Ethernet", "one per machine"), per_gpu=False),
        Link("ethernet-100g", 12.5, _NETWORK.format("100 Gbit/s Ethernet", "one per machine"), per_gpu=False),
    )
}

_NVLINK_CARDS = {
    "V100-16GB": "nvlink2",
    "V100-32GB": "nvlink2",
    "A100-40GB": "nvlink3",
    "A100-80GB": "nvlink3",
    "H100-SXM": "nvlink4",
    "H200": "nvlink4",
    "B200": "nvlink5",
}
_PCIE_CARDS = {
    "T4": "pcie3",
    "V100-PCIe-16GB": "pcie3",
    "V100-PCIe-32GB": "pcie3",
    "RTX-4060": "pcie3",  # eight lanes of PCIe 4 carry what sixteen of PCIe 3 do
    "H100-PCIe": "pcie5",
    "RTX-5070": "pcie5",
    "RTX-5080": "pcie5",
    "RTX-5090": "pcie5",
}


def usual_link(hardware: Hardware) -> str:
    """The link by which machines with several of these cards connect them; PCIe 4 where it is not known."""
    return {**_PCIE_CARDS, **_NVLINK_CARDS}.get(hardware.name, "pcie4")


def ring_bandwidth(link: Link, network: Link, num_gpus: int, gpus_per_machine: int) -> float:
    """Bytes per second of a ring's slowest link, in one direction, as published: no collective reaches more in a ring.

    A ring over several machines crosses each machine's border once; NCCL lays one ring per network card, so cards add.
    """
    inside = link.gb_per_second * 1e9
    if num_gpus <= gpus_per_machine:
        return inside
    return min(inside, network.gb_per_second * 1e9 * (gpus_per_machine if network.per_gpu else 1))

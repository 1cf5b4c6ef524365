"""Families that recipes take, and the encoder that each kind of card should take: computed, as the doctor does."""

from __future__ import annotations

from hf_ext.doctor.encoder_choice import Choice, choose_encoders
from hf_ext.hardware import describe_hardware
from hf_ext.models.families import FAMILIES
from hf_ext.models.packing import PACKED_FAMILIES

DEVICES = ("cpu", "T4", "L4", "RTX-4090", "A100", "H100", "H200")
DRIVER_SHARE = 0.91  # of the nominal memory, as drivers report it


def family_rows() -> list[list[str]]:
    """A row per family: model type, models, what packs it, LoRA's layers."""
    packed = {True: "no layer computes on padding", False: "padded, rows grouped by length"}
    return [
        [f"`{name}`", family.models, packed[name in PACKED_FAMILIES], ", ".join(family.lora_targets)]
        for name, family in FAMILIES.items()
    ]


def choice_rows() -> list[list[str]]:
    """A row per device: what it should take frozen, with LoRA, and with all weights training."""
    return [[device, *map(_cell, _choices(device))] for device in DEVICES]


def _choices(device: str) -> list[Choice]:
    hardware = describe_hardware(device)
    room = None if hardware.memory_gib is None else hardware.memory_gib * 2**30 * DRIVER_SHARE
    return choose_encoders(hardware, room)


def _cell(choice: Choice) -> str:
    if choice.candidate is None:
        return "-"
    return f"{choice.candidate.name.split('/')[1]} ({choice.num_bytes / 2**30:.1f} GiB)"

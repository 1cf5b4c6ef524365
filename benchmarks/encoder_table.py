"""Families that recipes take, and the encoder that each kind of card should take: computed, as the doctor does."""

from __future__ import annotations

from hf_ext.hardware import describe_hardware
from hf_ext.models.configuration import Training
from hf_ext.models.encoder_choice import choose_encoder
from hf_ext.models.families import FAMILIES
from hf_ext.models.packing import PACKED_FAMILIES

DEVICES = ("cpu", "T4", "L4", "RTX-4090", "A100", "H100", "H200")
TRAININGS: tuple[Training, ...] = ("frozen", "lora", "full")


def family_rows() -> list[list[str]]:
    """A row per family: model type, models, what packs it, LoRA's layers."""
    packed = {True: "no layer computes on padding", False: "padded, rows grouped by length"}
    return [
        [f"`{name}`", family.models, packed[name in PACKED_FAMILIES], ", ".join(family.lora_targets)]
        for name, family in FAMILIES.items()
    ]


def choice_rows() -> list[list[str]]:
    """A row per device: what it should take frozen, with LoRA, and with all weights training."""
    return [[device, *(_cell(device, training) for training in TRAININGS)] for device in DEVICES]


def _cell(device: str, training: Training) -> str:
    chosen = choose_encoder(describe_hardware(device), training)
    return f"{chosen.name.split('/')[1]} ({chosen.needed_bytes(training) / 2**30:.1f} GiB)"

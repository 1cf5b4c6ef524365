"""What the doctor itself is asked, beside the arguments of the run that it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..errors import ArgumentError


@dataclass
class DoctorArguments:
    """Which machine to look at, and how.

    Raises:
        ArgumentError: a negative `measure_seconds`; `gpus` or `gpus_per_machine` below 1.
    """

    _argument_group_name = "doctor"  # in --help
    _first_flags = ("device", "json", "plan_scale", "gpus", "dollars_per_hour")  # beside those of the run

    device: None | str = field(  # noqa: RUF036
        default=None,
        metadata={"help": "A machine that is not this one: t4, a100, a100-80gb, h100, rtx-4090, sm86, ... (its card)."},
    )
    measure_seconds: float = field(
        default=2.0, metadata={"help": "How long to time a layer, or steps, of the model on this machine; 0: do not."}
    )
    json: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": "File to write the same findings to, as JSON."}
    )
    plan_scale: bool = field(
        default=False,
        metadata={"help": "Also what the run would take on several GPUs of that kind, and which launcher file to use."},
    )
    gpus: list[int] = field(
        default_factory=lambda: [1, 2, 4, 8, 16], metadata={"help": "Numbers of GPUs that --plan_scale looks at."}
    )
    gpus_per_machine: int = field(default=8, metadata={"help": "GPUs of one machine, for --plan_scale."})
    gpu_link: Literal["auto", "nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5"] = field(
        default="auto", metadata={"help": "What connects the GPUs of a machine; auto: what is usual for the card."}
    )
    network: Literal["infiniband-hdr", "infiniband-ndr", "ethernet-10g", "ethernet-25g", "ethernet-100g"] = field(
        default="ethernet-100g", metadata={"help": "What connects machines, for --plan_scale."}
    )

    def __post_init__(self) -> None:
        if self.measure_seconds < 0:
            raise ArgumentError(f"measure_seconds={self.measure_seconds}: must not be negative; 0 measures nothing.")
        if not self.gpus or min(self.gpus) < 1:
            raise ArgumentError(f"gpus={self.gpus}: give numbers of GPUs of 1 or more, such as --gpus 1 2 4.")
        if self.gpus_per_machine < 1:
            raise ArgumentError(f"gpus_per_machine={self.gpus_per_machine}: must be at least 1.")

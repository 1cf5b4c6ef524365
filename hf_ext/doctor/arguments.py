"""What the doctor itself is asked, beside the arguments of the run that it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ArgumentError


@dataclass
class DoctorArguments:
    """Which machine to look at, and how.

    Raises:
        ArgumentError: a negative `measure_seconds`.
    """

    _argument_group_name = "doctor"  # in --help
    _first_flags = ("device", "json", "dollars_per_hour")  # beside those of the run

    device: None | str = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "Look at another card instead of this machine: t4, a100, a100-80gb, h100, rtx-4090, sm86, ..."
        },
    )
    measure_seconds: float = field(
        default=2.0,
        metadata={"help": "Seconds for timing a layer, or steps, of the model on this machine; 0 times nothing."},
    )
    json: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": "File to write the same findings to, as JSON."}
    )

    def __post_init__(self) -> None:
        if self.measure_seconds < 0:
            raise ArgumentError(f"measure_seconds={self.measure_seconds}: must not be negative; 0 measures nothing.")

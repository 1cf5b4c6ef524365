"""What the model is made of, as command-line arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional

from ..errors import ArgumentError


@dataclass
class AffinityArguments:
    """Encoders, how they are used, and the head."""

    encoders: list[str] = field(
        default_factory=list,
        metadata={
            "help": "One encoder per tower: Hub ids or folders. Towers that name the same encoder share its weights."
        },
    )
    encoder_revisions: list[str] = field(
        default_factory=list, metadata={"help": "A commit, tag or branch per encoder; one is used for all."}
    )
    tower_inputs: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Sequence columns per tower: 'heavy,light' encodes each by itself, 'heavy+light' as one pair. Left "
            "out: one tower reads all columns, as many towers as columns read one each."
        },
    )
    pooling: list[str] = field(
        default_factory=lambda: ["mean"], metadata={"help": "mean, cls or max per tower; one is used for all."}
    )
    tower_training: list[str] = field(
        default_factory=list,
        metadata={
            "help": "frozen, lora or full per tower; one is used for all. Left out: lora with --use_peft, else frozen. "
            "Frozen towers are embedded once."
        },
    )
    init_head_from: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Model folder of a run with frozen encoders: its head, and its scales, are where to start."},
    )
    merge_lora: bool = field(
        default=False, metadata={"help": "Also save the model with its adapters merged, in the folder 'merged'."}
    )
    head_sizes: list[int] = field(
        default_factory=lambda: [1024, 512, 256, 128], metadata={"help": "Widths of the head's hidden layers."}
    )
    head_dropout: float = field(default=0.3, metadata={"help": "Dropout after each hidden layer of the head."})
    loss: Literal["mse", "huber", "tobit", "ranking"] = field(
        default="mse", metadata={"help": "tobit uses --censor_column; ranking learns the order only."}
    )
    huber_delta: float = field(default=1.0, metadata={"help": "Where Huber turns linear, in standard deviations."})
    tobit_scale: float = field(default=0.25, metadata={"help": "Noise of the measurement, in standard deviations."})
    save_full: bool = field(default=False, metadata={"help": "Save frozen encoders' weights too, not only their id."})
    binder_threshold: Optional[float] = field(  # noqa: UP045
        default=9.0, metadata={"help": "Labels at or above this count as hits for recall, precision and F1."}
    )

    def per_tower(self, name: str) -> list[str]:
        """The values of a list argument, one per encoder.

        Raises:
            ArgumentError: neither one value nor one per encoder.
        """
        values = getattr(self, name)
        if len(values) not in (1, len(self.encoders)):
            raise ArgumentError(
                f"--{name} has {len(values)} values for {len(self.encoders)} encoders: give 1 or as many."
            )
        return values * len(self.encoders) if len(values) == 1 else values

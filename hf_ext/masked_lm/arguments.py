"""What is trained and how it is masked, as command-line arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from ..arguments.checks import Range, check_ranges, ranges_in_types
from ..arguments.training_fields import REQUIRE, Count, option
from ..errors import ArgumentError

# Shapes of published models: layers, width, attention heads.
SIZES = {
    "esm2_8M": (6, 320, 20),
    "esm2_35M": (12, 480, 20),
    "esm2_150M": (30, 640, 20),
    "esm2_650M": (33, 1280, 20),
    "esm2_3B": (36, 2560, 40),
    "esmc_300M": (30, 960, 15),
    "esmc_600M": (36, 1152, 18),
    "esmc_6B": (80, 2560, 40),
}
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads")
SHARE = Range("above 0 and at most 1", lambda value: 0 < value <= 1)


@dataclass
class MaskedLMArguments:
    """A pretrained model to continue, or the shape of a new one; the share of residues to mask; which Trainer.

    Raises:
        ArgumentError: a value outside what is allowed, or both a pretrained model and a shape.
    """

    _argument_group_name = "model"  # in --help
    _argument_groups = {"evaluation": ("require",)}
    _first_flags = (
        *("dataset_name", "sequence_columns", "streaming", "max_residues", "model_name_or_path", "model_size"),
        *("mlm_probability", "use_peft", "preset", "max_steps", "max_tokens_per_batch", "eval_steps"),
        *("output_dir", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "seed", "report_to"),
        *("resume", "max_hours", "push_to_hub", "hub_model_id"),
    )

    model_name_or_path: str | None = option(
        None, "Model to continue training: Hub id or folder. Left out: a new ESM-2."
    )
    model_revision: str | None = option(
        None, "Commit, tag or branch of a Hub model; a commit makes the run repeatable."
    )
    model_size: str | None = option(
        None, f"Shape of a new ESM-2 or ESM C ({', '.join(SIZES)}); the four flags below change parts of it."
    )
    num_hidden_layers: Count | None = option(None, "Layers of a new model.")
    hidden_size: Count | None = option(None, "Width of a new model; a multiple of twice the attention heads.")
    num_attention_heads: Count | None = option(None, "Attention heads of a new model.")
    intermediate_size: Count | None = option(
        None, "Feed-forward width of a new model; left out: 4 times hidden_size, of ESM C 8/3 times."
    )
    mlm_probability: Annotated[float, SHARE] = option(
        0.15, "Share of residues to predict; ESM-2's token dropout is made for 0.15."
    )
    stock_trainer: bool = option(
        False, "Train with transformers.Trainer itself, the control that comparisons measure against."
    )
    require: list[str] = field(default_factory=list, metadata=REQUIRE)

    def __post_init__(self) -> None:
        check_ranges(self, ranges_in_types(MaskedLMArguments))
        if self.model_size is not None and self.model_size not in SIZES:
            raise ArgumentError(f"model_size={self.model_size!r}: allowed are {', '.join(SIZES)}.")
        given = [name for name in ("model_size", *SHAPE, "intermediate_size") if getattr(self, name) is not None]
        if self.model_name_or_path and given:
            raise ArgumentError(
                f"model_name_or_path={self.model_name_or_path!r} brings its own shape; leave {', '.join(given)} out."
            )
        if self.model_revision and not self.model_name_or_path:
            raise ArgumentError(f"model_revision={self.model_revision!r} only acts with --model_name_or_path.")

    @property
    def makes_esmc(self) -> bool:
        """Whether the new model is an ESM C, not an ESM-2."""
        return str(self.model_size).startswith("esmc")

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of the configuration of a new model.

        Raises:
            ArgumentError: parts of the shape are missing, or the width does not divide into heads of even width.
        """
        named = SIZES[self.model_size] if self.model_size else (None, None, None)
        shape: dict[str, Any] = {name: getattr(self, name) or size for name, size in zip(SHAPE, named)}
        if missing := [name for name, value in shape.items() if value is None]:
            raise ArgumentError(
                f"What to train? Give --model_name_or_path, or --model_size ({', '.join(SIZES)}), or a shape: "
                f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing."
            )
        width, heads = shape["hidden_size"], shape["num_attention_heads"]
        if width % (2 * heads):
            raise ArgumentError(
                f"hidden_size={width} with num_attention_heads={heads}: rotary positions need heads of even width, so "
                "the width must be a multiple of twice the heads."
            )
        # ESM C's feed-forward layers are gated, and as wide as the next multiple of 256.
        inner = -(-width * 8 // (3 * 256)) * 256 if self.makes_esmc else 4 * width
        return {**shape, "intermediate_size": self.intermediate_size or inner}

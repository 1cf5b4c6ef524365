"""What is trained and how it is masked, as command-line arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ..arguments import FIRST_FLAGS, REQUIRE, Range, check_ranges, option, ranges_in_types
from ..errors import ArgumentError

# Shapes of published models, and of one for a demo: layers, width, attention heads.
SIZES = {
    "demo": (2, 64, 4),
    "esm2_8M": (6, 320, 20),
    "esm2_35M": (12, 480, 20),
    "esm2_150M": (30, 640, 20),
    "esm2_650M": (33, 1280, 20),
    "esm2_3B": (36, 2560, 40),
    "esmc_300M": (30, 960, 15),
    "esmc_600M": (36, 1152, 18),
    "esmc_6B": (80, 2560, 40),
}
SHARE = Range("above 0 and at most 1", lambda value: 0 < value <= 1)


@dataclass
class MaskedLMArguments:
    """A pretrained model to continue, or the size of a new one; the share of residues to mask; which Trainer.

    Raises:
        ArgumentError: a value outside what is allowed, or both a pretrained model and a size.
    """

    _argument_group_name = "model"  # in --help
    _argument_groups = {"evaluation": ("require",)}
    _first_flags = (
        *("dataset_name", "sequence_columns", "streaming", "max_residues", "model_name_or_path", "model_size"),
        *("mlm_probability", "use_peft", "max_steps", "max_tokens_per_batch", "eval_steps"),
        *FIRST_FLAGS,
    )

    model_name_or_path: str | None = option(
        None, "Model to continue training: Hub id or folder. Left out: a new ESM-2."
    )
    model_revision: str | None = option(
        None, "Commit, tag or branch of a Hub model; a commit makes the run repeatable."
    )
    model_size: str | None = option(None, f"Size of a new ESM-2 or ESM C: {', '.join(SIZES)}.")
    mlm_probability: Annotated[float, SHARE] = option(
        0.15, "Share of residues to predict; ESM-2's token dropout is made for 0.15."
    )
    stock_trainer: bool = option(
        False, "Train with transformers.Trainer itself, the control that comparisons measure against."
    )
    require: list[str] = option([], REQUIRE)

    def __post_init__(self) -> None:
        check_ranges(self, ranges_in_types(MaskedLMArguments))
        if self.model_size is not None and self.model_size not in SIZES:
            raise ArgumentError(f"model_size={self.model_size!r}: allowed are {', '.join(SIZES)}.")
        if self.model_name_or_path and self.model_size:
            raise ArgumentError(f"model_name_or_path={self.model_name_or_path!r} has a size: leave model_size out.")
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
            ArgumentError: no size was given.
        """
        if self.model_size is None:
            raise ArgumentError(f"What to train? Give --model_name_or_path, or --model_size ({', '.join(SIZES)}).")
        layers, width, heads = SIZES[self.model_size]
        # ESM C's feed-forward layers are gated, and as wide as the next multiple of 256.
        inner = -(-width * 8 // (3 * 256)) * 256 if self.makes_esmc else 4 * width
        shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
        return {**shape, "intermediate_size": inner}

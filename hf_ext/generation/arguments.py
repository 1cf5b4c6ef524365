"""What a generator is made of, what it reads, how its outputs are judged, as command-line arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..arguments import COUNT, FINITE, FIRST_FLAGS, NOT_NEGATIVE, check_choices, check_ranges, option
from ..errors import ArgumentError
from ..files import Json, parse_json
from ..models import GENERATOR_RANGES
from .judging.discriminator import THRESHOLD
from .sampling import RANGES, TEMPERATURE
from .stages import GATES, STAGES, describe_gates

SHAPE = ("d_model", "d_ff", "hidden_size", "num_heads", "num_encoder_layers", "num_decoder_layers")
# Only act with this architecture.
BELONGS = {"antigen_encoder_revision": "esm", "encoder_training": "esm", "save_full": "esm", "attend": "lstm"}
_RANGES = {
    **{name: GENERATOR_RANGES[name] for name in (*SHAPE, "dropout", "unknown_affinity_dropout")},
    **{name: RANGES[name] for name in ("temperature", "top_p")},
    **dict.fromkeys(("max_validation_samples", "num_judged", "num_reproduced"), COUNT),
    "num_epoch_samples": NOT_NEGATIVE,
    **dict.fromkeys(("min_affinity", "affinity_threshold"), FINITE),
}


@dataclass
class WritingArguments:
    """How antibodies are drawn, and what they are examined by: for all recipes that write some."""

    _argument_group_name = "sampling"  # in --help

    temperature: float = option(
        TEMPERATURE, "Of sampling; below 1, likely tokens become likelier. 0: the likeliest each time."
    )
    top_p: float | None = option(None, "Draw only from the likeliest tokens that together have this probability.")
    discriminator: str | None = option(
        None, "Folder or Hub id of a model of `hf-ext train`, which predicts affinities of outputs."
    )


@dataclass
class GeneratorArguments(WritingArguments):
    """Stage, columns, model, decoding, judges and the thresholds of gates.

    Raises:
        ArgumentError: a value out of range, or two that contradict each other.
    """

    _argument_group_name = "model"  # in --help
    _argument_groups = {"model": ("temperature", "top_p", "discriminator")}
    _first_flags = (
        *("dataset_name", "antigen_column", "heavy_column", "light_column", "label_column", "stage", "architecture"),
        *("size", "antigen_encoder", "encoder_training", "discriminator"),
        *FIRST_FLAGS,
    )

    stage: Literal["1", "2", "3", "auto"] = option(
        "1",
        "1: proof, 2: quality, 3: full. auto: one after the other, each in a folder of its own and with new weights, "
        "as long as gates pass.",
    )
    antigen_column: str = option("antigen", "Column with the antigen's sequence.")
    heavy_column: str = option("heavy", "Column with the heavy chain's variable domain.")
    light_column: str | None = option(
        "light", "Column with the light chain's variable domain; '' for heavy chains alone."
    )
    may_lack_light: bool = option(
        False,
        "Rows may have an empty light chain; then a heavy chain alone is a valid antibody, also in hf-ext sample.",
    )
    min_affinity: float | None = option(
        None,
        "Train on rows with a larger label only; validation and test keep all of theirs. Left out: of --stage.",
    )
    max_validation_samples: int | None = option(
        None, "Validate on a random subset of this many rows. Left out: of --stage."
    )
    architecture: Literal["lstm", "transformer", "light", "esm"] = option(
        "lstm", "lstm, transformer, light (linear attention, one layer's weights), esm (--antigen_encoder)."
    )
    size: Literal["tiny", "small", "full"] | None = option(
        None, "Size of the model; the flags below change parts of it. Left out: of --stage."
    )
    d_model: int | None = option(None, "Width of embeddings and layers.")
    d_ff: int | None = option(None, "Feed-forward width of a Transformer.")
    hidden_size: int | None = option(None, "Width of the LSTM's states.")
    num_heads: int | None = option(None, "Attention heads.")
    num_encoder_layers: int | None = option(None, "Layers of the encoder.")
    num_decoder_layers: int | None = option(None, "Layers of the decoder.")
    attend: bool = option(False, "The LSTM's decoder attends to the encoder's states.")
    dropout: float = option(0.1, "Dropout of layers, wherever the architecture has some.")
    unknown_affinity_dropout: float = option(
        0.1, "With --label_column: share of training rows whose affinity is hidden in a pass."
    )
    antigen_encoder: str | None = option(None, "ESM-2 that reads antigens, Hub id or folder; with --architecture esm.")
    antigen_encoder_revision: str | None = option(None, "Commit, tag or branch of --antigen_encoder.")
    encoder_training: Literal["frozen", "lora", "full"] = option(
        "frozen",
        "How --antigen_encoder trains. Frozen, each distinct antigen is encoded once, before training; lora adds "
        "adapters (--lora_r and the like).",
    )
    save_full: bool = option(False, "Save a frozen encoder's weights too, not its id alone.")
    num_epoch_samples: int = option(
        16, "Antibodies written and scored at each evaluation, for some validation antigens; 0: none."
    )
    num_judged: int = option(
        200,
        "Antibodies that are written for test antigens and judged in full, the same number for each antigen; "
        "if there are more antigens, for a random choice of them.",
    )
    num_reproduced: int = option(100, "Training antigens for which greedy decoding should reproduce the antibody.")
    affinity_threshold: float = option(THRESHOLD, "Outputs that the discriminator predicts at or above it are counted.")
    gates: Json | str | None = option(
        None,
        "Thresholds of your own, by name: a table in YAML (gates: {valid: 0.9}), JSON on the command line. "
        + describe_gates(),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, _RANGES)
        self.gates = self._read_gates()
        if (self.architecture == "esm") != (self.antigen_encoder is not None):
            raise ArgumentError(
                f"--architecture {self.architecture} with --antigen_encoder {self.antigen_encoder or 'left out'}: the "
                "encoder belongs to --architecture esm, and that needs one, such as facebook/esm2_t12_35M_UR50D."
            )
        for name, architecture in BELONGS.items():
            if getattr(self, name) != getattr(type(self), name) and self.architecture != architecture:
                raise ArgumentError(f"--{name} only acts with --architecture {architecture}; drop it.")
        if self.may_lack_light and not self.light_column:
            raise ArgumentError("--may_lack_light: there is no --light_column that rows could lack.")
        chains = self.sequence_columns
        if len(chains) != len(set(chains)) or not (self.antigen_column and self.heavy_column):
            raise ArgumentError(
                f"--antigen_column {self.antigen_column!r}, --heavy_column {self.heavy_column!r}, --light_column "
                f"{self.light_column!r}: name different columns."
            )

    @property
    def sequence_columns(self) -> list[str]:
        """Heavy, light where there is one, antigen."""
        return [self.heavy_column, *([self.light_column] if self.light_column else []), self.antigen_column]

    def _read_gates(self) -> dict[str, float]:
        try:
            given = parse_json(self.gates) if isinstance(self.gates, str) else self.gates or {}
            thresholds = {name: float(threshold) for name, threshold in given.items()}
        except (ValueError, TypeError, AttributeError):
            raise ArgumentError(f"gates={self.gates!r}: give names with numbers, {{valid: 0.9}} say.") from None
        known = list(dict.fromkeys(name for stage in self.stages for name in GATES[stage]))
        for name, threshold in thresholds.items():
            if name not in known:
                raise ArgumentError(f"gates: stage {self.stage} has no {name!r}; it has {', '.join(known)}.")
            if not math.isfinite(threshold):
                raise ArgumentError(f"gates: {name}={threshold}: must be a finite number.")
        return thresholds

    @property
    def decoding(self) -> Json:
        """How what is judged is written, for `sample_pairs`."""
        return {"temperature": self.temperature, "top_p": self.top_p}

    @property
    def shape(self) -> dict[str, int]:
        """Parts of the model's size that were given."""
        return {name: getattr(self, name) for name in SHAPE if getattr(self, name) is not None}

    @property
    def stages(self) -> list[int]:
        """Those to run, in order."""
        return [*STAGES] if self.stage == "auto" else [int(self.stage)]

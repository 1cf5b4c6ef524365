"""What a generator is made of, what it reads, how its outputs are judged, as command-line arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from ..arguments.checks import (
    ABOVE_ZERO,
    COUNT,
    COUNT_FROM_ZERO,
    FINITE,
    SHARE_BELOW_ONE,
    WIDTH,
    Range,
    check_choices,
    check_ranges,
)
from ..errors import ArgumentError
from .judging.discriminator import THRESHOLD
from .judging.gates import REQUIREMENTS
from .sampling import TEMPERATURE
from .stages import STAGES, describe_defaults, describe_gate

SHARE = Range("from 0 to 1", lambda value: 0 <= value <= 1)
GATE = "gate_"  # what flags of thresholds begin with
SHAPE = ("d_model", "d_ff", "hidden_size", "num_heads", "num_encoder_layers", "num_decoder_layers")
RANGES = {
    **dict.fromkeys(("d_model", "d_ff", "hidden_size"), WIDTH),
    **dict.fromkeys(("num_heads", "num_encoder_layers", "num_decoder_layers"), COUNT),
    **dict.fromkeys(("max_validation_samples", "num_judged", "num_reproduced", "top_k"), COUNT),
    "num_epoch_samples": COUNT_FROM_ZERO,
    **dict.fromkeys(("dropout", "attention_dropout"), SHARE_BELOW_ONE),
    "unknown_affinity_dropout": SHARE,
    **dict.fromkeys(("min_affinity", "affinity_threshold"), FINITE),
    "temperature": ABOVE_ZERO,
    "top_p": Range("above 0 and at most 1", lambda value: 0 < value <= 1),
}


def _gate(name: str) -> Any:
    return field(default=None, metadata={"help": describe_gate(name)})


@dataclass
class GeneratorArguments:
    """Stage, columns, model, decoding, judges and the thresholds of gates.

    Raises:
        ArgumentError: a value out of range, or two that contradict each other.
    """

    _argument_group_name = "model"  # in --help
    _first_flags = (
        *("dataset_name", "antigen_column", "heavy_column", "light_column", "label_column", "stage", "architecture"),
        *("size", "antigen_encoder", "encoder_training", "discriminator", "preset"),
        *("output_dir", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "seed", "report_to"),
        *("resume", "max_hours", "push_to_hub", "hub_model_id"),
    )

    stage: Literal["1", "2", "3", "auto"] = field(
        default="1",
        metadata={
            "help": "1: proof, 2: quality, 3: full. auto: one after the other, each in a folder of its own and with "
            "new weights, as long as gates pass."
        },
    )
    antigen_column: str = field(default="antigen", metadata={"help": "Column with the antigen's sequence."})
    heavy_column: str = field(default="heavy", metadata={"help": "Column with the heavy chain's variable domain."})
    light_column: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads these types)
        default="light", metadata={"help": "Column with the light chain's; '' for heavy chains alone."}
    )
    may_lack_light: bool = field(
        default=False,
        metadata={"help": "Rows may have an empty light chain, as nanobodies among pairs do."},
    )
    min_affinity: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "Train on rows with a larger --label_column only; validation and test keep all of theirs. "
            + describe_defaults("min_affinity")
        },
    )
    max_validation_samples: Optional[int] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "Validate on a random subset of this many rows. " + describe_defaults("max_validation_samples")
        },
    )
    architecture: Literal["lstm", "transformer", "light", "esm"] = field(
        default="lstm",
        metadata={"help": "lstm, transformer, light (linear attention, one layer's weights), esm (--antigen_encoder)."},
    )
    size: Optional[Literal["tiny", "small", "full"]] = field(  # noqa: UP045
        default=None, metadata={"help": "Of the model; flags below change parts of it. " + describe_defaults("size")}
    )
    d_model: Optional[int] = field(default=None, metadata={"help": "Width of embeddings and layers."})  # noqa: UP045
    d_ff: Optional[int] = field(default=None, metadata={"help": "Feed-forward width of a Transformer."})  # noqa: UP045
    hidden_size: Optional[int] = field(default=None, metadata={"help": "Width of the LSTM's states."})  # noqa: UP045
    num_heads: Optional[int] = field(default=None, metadata={"help": "Attention heads."})  # noqa: UP045
    num_encoder_layers: Optional[int] = field(default=None, metadata={"help": "Layers of the encoder."})  # noqa: UP045
    num_decoder_layers: Optional[int] = field(default=None, metadata={"help": "Layers of the decoder."})  # noqa: UP045
    attend: bool = field(default=False, metadata={"help": "The LSTM's decoder attends to the encoder's states."})
    dropout: float = field(default=0.1, metadata={"help": "Dropout of layers, wherever the architecture has some."})
    attention_dropout: float = field(
        default=0.0,
        metadata={"help": "Dropout of attention weights in a Transformer, drawn for every pair of tokens."},
    )
    unknown_affinity_dropout: float = field(
        default=0.1,
        metadata={"help": "With --label_column: share of training rows whose affinity is hidden in a pass."},
    )
    antigen_encoder: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "ESM-2 that reads antigens, Hub id or folder; with --architecture esm."}
    )
    antigen_encoder_revision: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Commit, tag or branch of --antigen_encoder."}
    )
    encoder_training: Literal["frozen", "lora", "full"] = field(
        default="frozen",
        metadata={
            "help": "How --antigen_encoder trains. Frozen, each distinct antigen is encoded once, before training; "
            "lora adds adapters (--lora_r and the like)."
        },
    )
    save_full: bool = field(default=False, metadata={"help": "Save a frozen encoder's weights too, not its id alone."})
    num_epoch_samples: int = field(
        default=16,
        metadata={"help": "Antibodies written and scored at each evaluation, for some validation antigens; 0: none."},
    )
    num_judged: int = field(
        default=200,
        metadata={
            "help": "Antibodies written for test antigens and judged in full: as many for each antigen; of more "
            "antigens than that, a random choice."
        },
    )
    num_reproduced: int = field(
        default=100, metadata={"help": "Training antigens whose antibody greedy decoding is asked for."}
    )
    temperature: float = field(
        default=TEMPERATURE, metadata={"help": "Of what is written to be judged; below 1 the likely becomes likelier."}
    )
    top_k: Optional[int] = field(default=None, metadata={"help": "Only so many of the likeliest tokens."})  # noqa: UP045
    top_p: Optional[float] = field(  # noqa: UP045
        default=None, metadata={"help": "Only the likeliest tokens that together have this probability."}
    )
    discriminator: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Folder or Hub id of a model of recipes/max_speed.py, which predicts affinities of outputs."},
    )
    affinity_threshold: float = field(
        default=THRESHOLD, metadata={"help": "Outputs that the discriminator predicts at or above it are counted."}
    )
    numbering: Literal["auto", "immunum", "anarcii", "off"] = field(
        default="auto",
        metadata={"help": "Number outputs as variable domains; auto: by immunum (extra 'numbering') if installed."},
    )
    humanness: Literal["auto", "on", "off"] = field(
        default="auto", metadata={"help": "OASis humanness (extra 'humanness'); auto: where that is installed."}
    )
    gate_token_loss: Optional[float] = _gate("token_loss")  # noqa: UP045
    gate_reproduced: Optional[float] = _gate("reproduced")  # noqa: UP045
    gate_valid: Optional[float] = _gate("valid")  # noqa: UP045
    gate_num_validation_falls: Optional[float] = _gate("num_validation_falls")  # noqa: UP045
    gate_share_above: Optional[float] = _gate("share_above")  # noqa: UP045
    gate_unique: Optional[float] = _gate("unique")  # noqa: UP045
    gate_correlation: Optional[float] = _gate("correlation")  # noqa: UP045
    gate_beats_random: Optional[float] = _gate("beats_random")  # noqa: UP045

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, RANGES)
        for name in self.gates:
            check_ranges(self, {f"{GATE}{name}": FINITE})
        if (self.architecture == "esm") != (self.antigen_encoder is not None):
            raise ArgumentError(
                f"--architecture {self.architecture} with --antigen_encoder {self.antigen_encoder or 'left out'}: the "
                "encoder belongs to --architecture esm, and that needs one, such as facebook/esm2_t12_35M_UR50D."
            )
        default = {"antigen_encoder_revision": None, "encoder_training": "frozen", "save_full": False}
        for name, value in default.items():
            if getattr(self, name) != value and self.architecture != "esm":
                raise ArgumentError(f"--{name} only acts with --architecture esm.")
        if self.attend and self.architecture != "lstm":
            raise ArgumentError(f"--attend with --architecture {self.architecture}: it attends in any case; drop it.")
        if self.attention_dropout and self.architecture not in ("transformer", "esm"):
            raise ArgumentError(f"--attention_dropout with --architecture {self.architecture}: it has none; drop it.")
        if self.may_lack_light and not self.light_column:
            raise ArgumentError("--may_lack_light: there is no --light_column that rows could lack.")
        chains = [name for name in self.sequence_columns if name]
        if len(chains) != len(set(chains)) or not (self.antigen_column and self.heavy_column):
            raise ArgumentError(
                f"--antigen_column {self.antigen_column!r}, --heavy_column {self.heavy_column!r}, --light_column "
                f"{self.light_column!r}: name different columns."
            )

        unused = {*self.gates} - {name for stage in self.stages for name in self.gates_of(stage)}
        if unused:
            name = sorted(unused)[0]
            known = ", ".join(one.name for one in REQUIREMENTS[int(self.stage)])
            raise ArgumentError(f"--{GATE}{name}: stage {self.stage} has no such gate; its gates are {known}.")

    @property
    def sequence_columns(self) -> list[str]:
        """Heavy, light where there is one, antigen."""
        return [self.heavy_column, *([self.light_column] if self.light_column else []), self.antigen_column]

    @property
    def gates(self) -> dict[str, float]:
        """Name of a requirement -> threshold, of those that were given."""
        names = [name for name in vars(self) if name.startswith(GATE) and getattr(self, name) is not None]
        return {name.removeprefix(GATE): float(getattr(self, name)) for name in names}

    def gates_of(self, stage: int) -> dict[str, float]:
        """Those of `gates` that a stage has."""
        names = {one.name for one in REQUIREMENTS[stage]}
        return {name: threshold for name, threshold in self.gates.items() if name in names}

    @property
    def shape(self) -> dict[str, int]:
        """Parts of the model's size that were given."""
        return {name: getattr(self, name) for name in SHAPE if getattr(self, name) is not None}

    @property
    def stages(self) -> list[int]:
        """Those to run, in order."""
        return [*STAGES] if self.stage == "auto" else [int(self.stage)]

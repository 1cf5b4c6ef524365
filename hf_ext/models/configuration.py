"""What an affinity model is made of: encoders, the towers that use them, the head, the loss, the label's scale."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from transformers import PretrainedConfig

from ..errors import ArgumentError
from ..labels import LabelKind, kind_from_state
from .head import HEADS, ONE_LAYER, POOLINGS

Training = Literal["frozen", "lora", "full"]
MAX_TOWERS = 3
VECTORS = "vectors"  # model type of what stands in an encoder's place: vectors that another program wrote


@dataclass
class EncoderSpec:
    """One set of encoder weights. `config` is the encoder's own configuration as a dict.

    `layer`: the number, from 1, of the layer whose states are read; those above it are dropped. None: the last.
    `also`: layers below it whose states are read, too; theirs stand in front, in this order.
    `masked_head`: whether its head of a masked language model is loaded, too.
    """

    name_or_path: str
    config: dict[str, Any]
    revision: str | None = None
    fingerprint: str | None = None
    training: Training = "frozen"
    lora: dict[str, Any] = field(default_factory=dict)
    layer: int | None = None
    also: list[int] = field(default_factory=list)
    masked_head: bool = False


@dataclass
class TowerSpec:
    """Inputs that share an encoder. Each entry of `inputs` is one column, or two columns that form a pair.

    `encoder` indexes `AffinityConfig.encoders`; towers with the same index share weights. `pooling`: one of
    `POOLINGS`; not read where each residue has a label.
    """

    encoder: int
    inputs: list[list[str]]
    pooling: str = "mean"

    @property
    def names(self) -> list[str]:
        """Of its inputs."""
        return [input_name(columns) for columns in self.inputs]


def input_name(columns: list[str]) -> str:
    """Names an encoder input: `heavy`, or `heavy+light` for a pair."""
    return "+".join(columns)


class AffinityConfig(PretrainedConfig):
    """Configuration of `AffinityModel`.

    Args:
        encoders: `EncoderSpec` as dicts.
        towers: `TowerSpec` as dicts; one to three.
        head_form: "product", "gated" or "likelihood", see `hf_ext.models.head`; None: a perceptron.
        wild_type: of "likelihood", token ids of what rows are variants of.
        head_sizes: widths of the head's hidden layers.
        head_dropout: dropout probability after each hidden layer.
        label_kind: `state()` of a `LabelKind`; None: one number per row.
        numbers: `state()` of the `NumberColumns` that are read beside sequences; None: none.
        temperature: logits of classes are divided by it, see `hf_ext.heads.calibration`.
        loss: "mse", "huber", "tobit" (censored rows) or "ranking" (pairwise); of several numbers, or one per residue,
            "mse" or "huber". Classes have cross entropy with "mse", or "focal".
        focal_gamma: of the loss "focal", see `losses.ClassLoss`.
        class_weights: of each class in the loss; of several labels a list for lacking each, and one for having it; none
            count all alike.
        huber_delta: where Huber turns linear, in standardised label units.
        label_mean, label_std: in label units; the head predicts `label_mean + label_std * output`. Lists where a row
            has several numbers; not read of classes.
        layer_choice: how encoders' layers were chosen, see `hf_ext.heads.layers`; None where they were not.
        ensemble: `ranks` and `networks` of a `HeadEnsemble`, which predicts in place of the head; None for none.
        prediction_intervals: see `hf_ext.heads.intervals`; None for none.
        prediction_spread: see `hf_ext.heads.spread`; None for none.
        tobit_scale: standard deviation of the measurement noise for "tobit", in standardised label units.
        distill_weight, distill_temperature: of a teacher's predictions in the loss, of rows that have some.
        encoder_dtype, encoder_autocast: how frozen encoders compute, as torch dtype names; kept so that predictions are
            made from the same embeddings as training.
        encoder_bits: 8 or 4 where frozen encoders' linear layers are stored so, see `load_encoder`.
        base_bits: 4 where linear layers beside adapters are stored so (`--load_in_4bit` with LoRA).
        is_scaled: whether label and embedding scales have been measured.
        save_full: save frozen encoders' weights too, instead of their id, revision and fingerprint.

    Raises:
        ArgumentError: more than three towers, a column used twice, a pair of more than two columns, or no such head,
            pooling or loss; labels of residues of more than one sequence column.
    """

    model_type = "hf_ext_affinity"
    keys_to_ignore_at_inference = ["cache", "std"]

    encoders: list | None = None
    towers: list | None = None
    head_form: None | str = None  # noqa: RUF036
    wild_type: None | list = None  # noqa: RUF036
    head_sizes: list | None = None
    head_dropout: float = 0.3
    label_kind: None | dict = None  # noqa: RUF036
    numbers: None | dict = None  # noqa: RUF036
    temperature: float = 1.0
    loss: str = "mse"
    focal_gamma: float = 2.0
    class_weights: list | None = None
    huber_delta: float = 1.0
    tobit_scale: float = 0.25
    distill_weight: float = 0.5
    distill_temperature: float = 2.0
    label_mean: float | list = 0.0
    label_std: float | list = 1.0
    layer_choice: None | dict = None  # noqa: RUF036
    ensemble: None | dict = None  # noqa: RUF036
    prediction_intervals: None | dict = None  # noqa: RUF036
    prediction_spread: None | dict = None  # noqa: RUF036
    encoder_dtype: str = "float32"
    encoder_autocast: None | str = None  # noqa: RUF036
    encoder_bits: None | int = None  # noqa: RUF036
    base_bits: None | int = None  # noqa: RUF036
    is_scaled: bool = False
    save_full: bool = False

    def __post_init__(self, **kwargs):
        self.encoders = list(self.encoders or [])
        self.towers = list(self.towers or [])
        self.class_weights = list(self.class_weights or [])  # not None, which runs are not compared by
        self.head_sizes = [1024, 512, 256, 128] if self.head_sizes is None else list(self.head_sizes)
        if self.head_form not in (None, *HEADS):
            raise ArgumentError(f"head_form={self.head_form!r}: allowed are {', '.join(HEADS)}.")
        if self.head_form in ONE_LAYER and len(self.head_sizes) != 1:
            given = f"head_form={self.head_form!r} with head_sizes={self.head_sizes}"
            raise ArgumentError(f"{given}: it has one hidden layer, so one size.")
        _check_towers(self.tower_specs)
        kind = self.kind
        if self.loss not in kind.losses:
            what = f" for {self.label_kind['task']}" if self.label_kind else ""
            raise ArgumentError(f"loss={self.loss!r}: allowed{what} are {', '.join(kind.losses)}.")
        kind.check_inputs([*self.input_columns])
        super().__post_init__(**kwargs)

    @property
    def kind(self) -> LabelKind:
        """What is predicted."""
        return kind_from_state(self.label_kind)

    @property
    def encoder_specs(self) -> list[EncoderSpec]:
        return [EncoderSpec(**spec) for spec in self.encoders or []]

    @property
    def tower_specs(self) -> list[TowerSpec]:
        return [TowerSpec(**spec) for spec in self.towers or []]

    @property
    def reads_vectors(self) -> bool:
        """Whether vectors of a file are read, and there is no encoder."""
        return any(spec.config["model_type"] == VECTORS for spec in self.encoder_specs)

    @property
    def input_columns(self) -> dict[str, list[str]]:
        """Input name -> its columns, in the order in which the head sees the embeddings."""
        return {input_name(columns): columns for tower in self.tower_specs for columns in tower.inputs}


def _check_towers(towers: list[TowerSpec]) -> None:
    if len(towers) > MAX_TOWERS:
        raise ArgumentError(f"{len(towers)} towers: an affinity model has one to {MAX_TOWERS}.")
    inputs = [columns for tower in towers for columns in tower.inputs]
    names = [input_name(columns) for columns in inputs]
    used = [column for columns in inputs for column in columns]
    if len(set(used)) != len(used):
        raise ArgumentError(f"Encoder inputs {names} repeat a column; each column goes to one tower.")
    if any(not 1 <= len(columns) <= 2 for columns in inputs):
        raise ArgumentError(f"Encoder inputs {names}: an input is one column or a pair such as heavy+light.")
    if unknown := {tower.pooling for tower in towers} - {*POOLINGS}:
        raise ArgumentError(f"pooling={min(unknown)!r}: allowed are {', '.join(POOLINGS)}.")


def build_config(encoders: list[EncoderSpec], towers: list[TowerSpec], **settings: Any) -> AffinityConfig:
    """Builds an `AffinityConfig` from specs.

    Raises:
        ArgumentError: no tower; and as `AffinityConfig`.
    """
    if not towers:
        raise ArgumentError(f"0 towers: an affinity model has one to {MAX_TOWERS}.")
    return AffinityConfig(encoders=[asdict(e) for e in encoders], towers=[asdict(t) for t in towers], **settings)

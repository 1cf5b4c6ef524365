"""What an affinity model is made of: encoders, the towers that use them, the head, the loss, the label's scale."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from transformers import PretrainedConfig

from ..arguments.checks import ABOVE_ZERO, COUNT, FINITE, SHARE_BELOW_ONE, WIDTH, check_ranges
from ..errors import ArgumentError
from .calibration import check_calibration
from .head import HEADS, ONE_LAYER
from .losses import LOSSES
from .pooling import POOLINGS
from .prediction_intervals import check_prediction_intervals

Training = Literal["frozen", "lora", "full"]
Pooling = Literal["mean", "mean_tokens", "cls", "max"]
MAX_TOWERS = 3
RANGES = {
    "head_sizes": WIDTH,
    "ensemble_size": COUNT,
    **dict.fromkeys(("huber_delta", "tobit_scale", "label_std"), ABOVE_ZERO),
    "head_dropout": SHARE_BELOW_ONE,
    "label_mean": FINITE,
}


@dataclass
class EncoderSpec:
    """One set of encoder weights. `config` is the encoder's own configuration as a dict."""

    name_or_path: str
    config: dict[str, Any]
    revision: str | None = None
    fingerprint: str | None = None
    training: Training = "frozen"
    lora: dict[str, Any] = field(default_factory=dict)


@dataclass
class TowerSpec:
    """Inputs that share an encoder. Each entry of `inputs` is one column, or two columns that form a pair.

    `encoder` indexes `AffinityConfig.encoders`; towers with the same index share weights. `pooling`: see `pool`.
    """

    encoder: int
    inputs: list[list[str]]
    pooling: Pooling = "mean"


def input_name(columns: list[str]) -> str:
    """Name of an encoder input: `heavy`, or `heavy+light` for a pair."""
    return "+".join(columns)


class AffinityConfig(PretrainedConfig):
    """Configuration of `AffinityModel`.

    Args:
        encoders: `EncoderSpec` as dicts.
        towers: `TowerSpec` as dicts; one to three.
        head_form: "product" or "gated", see `hf_ext.models.head`; None: a perceptron.
        head_sizes: widths of the head's hidden layers.
        head_dropout: dropout probability after each hidden layer.
        ensemble_size: number of heads; more than 1: trained apart, and predictions are their mean.
        loss: "mse", "huber", "tobit" (censored rows) or "ranking" (pairwise).
        huber_delta: where Huber turns linear, in standardised label units.
        label_mean, label_std: in label units; predictions are `label_mean + label_std * head output`, calibrated.
        calibration: as in `hf_ext.models.calibration`; None for none. It changes predictions, never the loss.
        prediction_intervals: as in `hf_ext.models.prediction_intervals`; None for none. Of calibrated predictions.
        tobit_scale: standard deviation of the measurement noise for "tobit", in standardised label units.
        encoder_dtype, encoder_autocast: how frozen encoders compute, as torch dtype names; kept so that predictions are
            made from the same embeddings as training.
        encoder_bits: 8 or 4 where frozen encoders' linear layers are stored so, see `hf_ext.models.frozen_weights`.
        is_scaled: whether label and embedding scales have been measured.
        save_full: save frozen encoders' weights too, instead of their id, revision and fingerprint.

    Raises:
        ArgumentError: more than three towers, a column used twice, a pair of more than two columns, a number outside of
            its range, or no such head, pooling or loss.
    """

    model_type = "hf_ext_affinity"
    keys_to_ignore_at_inference = ["member_logits"]  # else `Trainer.predict` would return a tuple

    encoders: list | None = None
    towers: list | None = None
    head_form: None | str = None  # noqa: RUF036
    head_sizes: list | None = None
    head_dropout: float = 0.3
    ensemble_size: int = 1
    loss: str = "mse"
    huber_delta: float = 1.0
    tobit_scale: float = 0.25
    label_mean: float = 0.0
    label_std: float = 1.0
    calibration: None | dict = None  # noqa: RUF036
    prediction_intervals: None | dict = None  # noqa: RUF036
    encoder_dtype: str = "float32"
    encoder_autocast: None | str = None  # noqa: RUF036
    encoder_bits: None | int = None  # noqa: RUF036
    is_scaled: bool = False
    save_full: bool = False

    def __post_init__(self, **kwargs):
        self.encoders = list(self.encoders or [])
        self.towers = list(self.towers or [])
        self.head_sizes = [1024, 512, 256, 128] if self.head_sizes is None else list(self.head_sizes)
        check_ranges(self, RANGES)
        _check_head(self.head_form, self.head_sizes)
        _check_towers(self.tower_specs)
        check_calibration(self.calibration)
        check_prediction_intervals(self.prediction_intervals)
        if self.loss not in LOSSES:
            raise ArgumentError(f"loss={self.loss!r}: allowed are {', '.join(LOSSES)}.")
        super().__post_init__(**kwargs)

    @property
    def encoder_specs(self) -> list[EncoderSpec]:
        return [EncoderSpec(**spec) for spec in self.encoders or []]

    @property
    def tower_specs(self) -> list[TowerSpec]:
        return [TowerSpec(**spec) for spec in self.towers or []]

    @property
    def input_columns(self) -> dict[str, list[str]]:
        """Input name -> its columns, in the order in which the head sees the embeddings."""
        return {input_name(columns): columns for tower in self.tower_specs for columns in tower.inputs}


def _check_head(form: str | None, sizes: list) -> None:
    if form not in (None, *HEADS):
        raise ArgumentError(f"head_form={form!r}: allowed are {', '.join(HEADS)}.")
    if form in ONE_LAYER and len(sizes) != 1:
        raise ArgumentError(f"head_form={form!r} with head_sizes={sizes}: it has one hidden layer, so one size.")


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
    for tower in towers:
        if tower.pooling not in POOLINGS:
            raise ArgumentError(f"pooling={tower.pooling!r}: allowed are {', '.join(POOLINGS)}.")


def build_config(encoders: list[EncoderSpec], towers: list[TowerSpec], **settings: Any) -> AffinityConfig:
    """An `AffinityConfig` from specs.

    Raises:
        ArgumentError: no tower; and as `AffinityConfig`.
    """
    if not towers:
        raise ArgumentError(f"0 towers: an affinity model has one to {MAX_TOWERS}.")
    return AffinityConfig(encoders=[asdict(e) for e in encoders], towers=[asdict(t) for t in towers], **settings)

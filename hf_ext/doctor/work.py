"""What a run has to compute: its encoders, without weights, and the residues that pass through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel

from ..affinity.arguments import AffinityArguments
from ..affinity.building import model_settings, read_towers
from ..data.columns import read_columns
from ..masked_lm.arguments import MaskedLMArguments
from ..masked_lm.building import build_model, freeze_contact_head, read_config, reading_model
from ..models.affinity import AffinityModel
from ..models.blocks import find_base_layers
from ..models.configuration import EncoderSpec, build_config, input_name
from ..models.encoders import build_encoder
from ..models.lora import LoraSettings
from ..reporting.flops import flops_coefficients

SPECIAL_TOKENS = 2  # <cls> and <eos>
STREAM_ROWS = 1000  # rows of a stream whose lengths stand for all


@dataclass(frozen=True)
class Tokens:
    """How many tokens pass, the sum of squares of their sequences' lengths, which attention costs, and the longest.

    Sums over several inputs add the longest of each: rows have one sequence per input.
    """

    total: int = 0
    squares: int = 0
    longest: int = 0

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Tokens:
        """Sums over sequences of these lengths in tokens."""
        values = np.asarray(lengths, np.int64)
        return cls(int(values.sum()), int((values**2).sum()), int(values.max(initial=0)))

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.total + other.total, self.squares + other.squares, self.longest + other.longest)


@dataclass(frozen=True)
class Encoder:
    """One encoder without its weights, and what passes through it.

    Attributes:
        source: Hub id or folder of its weights; None for a new model.
        config: its configuration as a dict, with "model_type".
        flops: per token, and per token and token attended to, of one pass as it trains; forward only if frozen.
        forward_flops: the same, forward only.
        distinct: tokens of each distinct sequence of all splits, once.
        train, evaluated: tokens of all rows of train, and of validation.
        num_base: weights of frozen linear layers beside adapters.
    """

    name: str
    source: str | None
    training: str
    config: dict[str, Any]
    num_parameters: int
    num_trainable: int
    flops: tuple[float, float]
    forward_flops: tuple[float, float]
    distinct: Tokens = Tokens()
    train: Tokens = Tokens()
    evaluated: Tokens = Tokens()
    num_distinct: int = 0
    num_base: int = 0

    @property
    def width(self) -> int:
        """Size of a token's vector."""
        return int(self.config.get("hidden_size") or self.config["d_model"])

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return int(self.config.get("num_hidden_layers") or self.config["num_layers"])


@dataclass(frozen=True)
class Work:
    """The encoders of a run, the head beside them, and how many rows it reads.

    Attributes:
        model: on torch's meta device: shapes, no weights.
        columns: encoder input -> the columns that it reads.
        head_parameters: trainable parameters outside encoders, of one head.
        num_heads: heads that train one after the other (`--num_seeds`).
        other_tokens: of the rows of train, what no encoder of these reads.
        num_rows: rows of each split; of a stream, how many rows at its start the tokens were counted on.
        make_batch: rows -> arguments of the model's forward, on the meta device; None of models that read sequences.
    """

    model: Any
    columns: dict[str, list[str]]
    encoders: list[Encoder]
    head_parameters: int
    num_heads: int = 1
    num_rows: dict[str, int] = field(default_factory=dict)
    is_stream: bool = False
    other_tokens: int = 0
    make_batch: Callable[[int], dict[str, Any]] | None = None

    @property
    def num_train_tokens(self) -> int:
        """Of all rows of train."""
        return self.other_tokens + sum(encoder.train.total for encoder in self.encoders)

    @property
    def num_trainable(self) -> int:
        """Parameters that train, of encoders and one head."""
        return sum(encoder.num_trainable for encoder in self.encoders) + self.head_parameters


def sketch_affinity(args: AffinityArguments, sequence_columns: Sequence[str], lora: LoraSettings) -> Work:
    """Encoders and head of `recipes/max_speed.py`, from configurations alone.

    Raises:
        ArgumentError: as `read_towers`. Of a Hub id, its config.json is fetched (a kilobyte), never its weights.
    """
    specs, towers = read_towers(args, sequence_columns, lora)
    with torch.device("meta"):
        model = AffinityModel(build_config(specs, towers, **model_settings(args)))
        encoders = [sketch_encoder(spec) for spec in specs]
    head = sum(p.numel() for p in model.head.parameters())
    return Work(model, model.config.input_columns, encoders, head, args.num_seeds)


def sketch_masked_lm(args: MaskedLMArguments, sequence_columns: Sequence[str]) -> Work:
    """The model of `recipes/mlm.py`, from its shape or configuration alone; errors as `sketch_affinity`."""
    with torch.device("meta"):
        model = build_model(args) if args.model_name_or_path is None else _untrained(args)
    name = args.model_name_or_path or args.model_size or "a new ESM-2"
    columns = list(sequence_columns)
    return Work(model, {input_name(columns): columns}, [_count(name, args.model_name_or_path, "full", model)], 0)


def _untrained(args: MaskedLMArguments) -> PreTrainedModel:
    config = read_config(args)
    with reading_model(args):
        model = AutoModelForMaskedLM.from_config(config, dtype=torch.float32)
    freeze_contact_head(model)
    return model


def sketch_encoder(spec: EncoderSpec) -> Encoder:
    """An encoder without its weights; to be called on torch's meta device."""
    name = spec.name_or_path if len(spec.name_or_path) < 40 else "..." + spec.name_or_path[-37:]
    encoder = build_encoder(spec)
    return replace(_count(name, spec.name_or_path, spec.training, encoder), config=spec.config)


def _count(name: str, source: str | None, training: str, model: PreTrainedModel) -> Encoder:
    parameters = [(p.numel(), p.requires_grad) for p in model.parameters()]
    as_it_trains = flops_coefficients(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    forward = flops_coefficients(model)
    for parameter, (_, trains) in zip(model.parameters(), parameters):
        parameter.requires_grad_(trains)
    return Encoder(
        name,
        source,
        training,
        model.config.to_dict(),
        num_parameters=sum(count for count, _ in parameters),
        num_trainable=sum(count for count, trains in parameters if trains),
        flops=forward if training == "frozen" else as_it_trains,
        forward_flops=forward,
        num_base=sum(layer.weight.numel() for layer in find_base_layers(model)),
    )


def add_data(work: Work, splits: Mapping[str, Any], limits: Mapping[str, int | None]) -> Work:
    """`work` with the tokens of the data, cropped at each input's limit in residues.

    Of a stream the first rows stand for all.

    Cost: one pass over the sequence columns.
    """
    if not hasattr(splits["train"], "__len__"):
        rows = list(splits["train"].take(STREAM_ROWS))
        lengths = [sum(len(row[c]) for cs in work.columns.values() for c in cs) + SPECIAL_TOKENS for row in rows]
        limit = min((value for value in limits.values() if value), default=None)
        cropped = [min(length, limit + SPECIAL_TOKENS) if limit else length for length in lengths]
        encoders = [replace(encoder, train=Tokens.of_lengths(cropped)) for encoder in work.encoders]
        return replace(work, is_stream=True, encoders=encoders, num_rows={"train": len(rows)})
    per_encoder = [_tokens_of(work, index, splits, limits) for index in range(len(work.encoders))]
    encoders = [replace(encoder, **tokens) for encoder, tokens in zip(work.encoders, per_encoder)]
    return replace(work, encoders=encoders, num_rows={name: len(split) for name, split in splits.items()})


def _tokens_of(work: Work, index: int, splits: Mapping[str, Any], limits: Mapping[str, int | None]) -> dict[str, Any]:
    """Tokens that encoder `index` sees: per row of each split, and of all distinct inputs once."""
    specs = getattr(work.model.config, "tower_specs", None)
    own = [columns for t in specs if t.encoder == index for columns in t.inputs] if specs else [*work.columns.values()]
    sums: dict[str, Tokens] = {}
    distinct: dict[tuple[str, ...], int] = {}
    for columns in own:
        limit = limits.get(input_name(columns))
        for name, split in splits.items():
            rows = read_columns(split, columns)
            lengths = [sum(map(len, row)) for row in rows]
            lengths = [(min(length, limit) if limit else length) + SPECIAL_TOKENS for length in lengths]
            sums[name] = sums.get(name, Tokens()) + Tokens.of_lengths(lengths)
            distinct.update(zip(rows, lengths))
    return {
        "train": sums["train"],
        "evaluated": sums.get("validation", Tokens()),
        "distinct": Tokens.of_lengths([*distinct.values()]),
        "num_distinct": len(distinct),
    }

"""A run before it starts: what it would read, hold and compute. Each task draws its own, without weights or training.

`Task.sketch` gives one; whoever tells time, memory and disk in advance (the doctor) knows nothing else of a task.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import PreTrainedModel

from ..data.arguments import DataArguments
from ..data.columns import read_columns
from ..data.reading import is_on_hub
from ..errors import HfExtError
from ..memory.stored import WEIGHT_BYTES
from ..models.configuration import EncoderSpec
from ..models.encoders import build_encoder
from ..models.lora import wrap_with_lora
from ..plan import Plan
from ..reporting.flops import flops_coefficients
from ..speedups.lora import lora_settings
from ..speedups.trainer_fields import CPU_TOKENS_PER_BATCH, GPU_TOKENS_PER_BATCH
from .running import check_inputs

Level = Literal["stops", "warns"]
Span = tuple[float, float]  # from the least to the most
MakeBatch = Callable[[int], dict[str, Any]]
STREAM_ROWS = 1000  # rows of a stream whose lengths stand for all
UNKNOWN_LENGTH = 1024  # tokens of a row where no data is at hand
SPECIAL_TOKENS = 2  # about a sequence: <cls> and <eos>
MAX_LINES = 5  # of an error that becomes a finding
MAX_NAME = 40  # characters of a path
AS_SAID = "what the message says"
STOCK_NOTE = "--stock_trainer: transformers.Trainer itself, without any of these speed-ups."


@dataclass(frozen=True)
class Finding:
    """Something that is off. `level` "stops": the command would not run to its end; "warns": it would, but."""

    name: str
    level: Level
    text: str
    remedy: str


class Step(NamedTuple):
    """Something to time: what it computes in FLOPs, and what it is, in words."""

    run: Callable[[], Any]
    flops: float
    what: str


@dataclass(frozen=True)
class Part:
    """A model, or an encoder in one, and what passes through it.

    Attributes:
        name: for people.
        training: "frozen", "lora" or "full".
        width: of its products; narrow ones reach a smaller share of a card's peak.
        train_flops, eval_flops: of all training rows once, as it trains; of all validation rows, forward. 0 where
            nothing passes through it while the run trains.
        once_flops: of the `num_distinct` distinct inputs of all splits, forward: computed once if results are kept.
        stored_bytes: what is kept of them on disk. download_bytes: of its weights, where they are not at hand.
        dtype: what it computes in, whatever the plan says; None: as the plan says.
        make_step: (device, size) -> a step of size 1, 2, 4, ... with random weights; None above the largest there is.
    """

    name: str
    training: str
    width: int
    num_parameters: int
    make_step: Callable[[str, int], Step | None]
    train_flops: float = 0.0
    eval_flops: float = 0.0
    once_flops: float = 0.0
    num_distinct: int = 0
    stored_bytes: int = 0
    download_bytes: int = 0
    dtype: str | None = None

    def is_kept(self, plan: Plan) -> bool:
        """Whether each distinct input passes through it once, and never while the run trains."""
        return self.training == "frozen" and (plan.applied("embedding_cache") or not self.train_flops)


@dataclass(frozen=True)
class Stage:
    """One training. Most tasks have one; a generator is trained in several, one after the other.

    Attributes:
        args: `FastTrainingArguments` of it.
        model: on torch's meta device: shapes, no weights.
        parts: what computes in it; and `head_flops` beside them, of all training rows once.
        num_rows: of each split; nothing where rows are not known, and of a stream how many were looked at.
        num_tokens, longest: of all training rows, and of the longest one.
        rows, inputs: training rows and an object with their `columns`, for the plan.
        as_trained: plan -> the model as the device holds it while it trains, still without weights, and what makes its
            batches of so many of the longest rows.
        serial_seconds: of a pass on a GPU, beside products: kernels that wait for each other.
        title: tells stages apart. is_asked: whether the command runs it.
    """

    args: Any
    model: Any
    parts: list[Part]
    as_trained: Callable[[Plan], tuple[nn.Module, MakeBatch]]
    num_rows: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    longest: int = 0
    rows: Any = None
    inputs: Any = None
    is_stream: bool = False
    head_flops: float = 0.0
    serial_seconds: Span = (0.0, 0.0)
    title: str = ""
    is_asked: bool = True


@dataclass(frozen=True)
class RowLengths:
    """How many tokens the sequences of a run have, cropped as it would crop them.

    Attributes:
        num_rows: of each split; of a stream, how many of its first rows stand for all.
        tokens: split -> input -> (rows,), int64.
        distinct: input -> its distinct sequences in all splits -> tokens; nothing of a stream.
    """

    num_rows: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    distinct: dict[str, dict[tuple[str, ...], int]] = field(default_factory=dict)
    is_stream: bool = False

    def of(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Of an encoder that reads these inputs, as `sketch_encoder` takes them."""
        distinct = {parts: length for name in names for parts, length in self.distinct.get(name, {}).items()}
        by_split = {split: [int(n) for name in names for n in tokens[name]] for split, tokens in self.tokens.items()}
        return {**by_split, "distinct": [*distinct.values()]}

    def total(self, names: Iterable[str]) -> int:
        """Tokens of all training rows."""
        return sum(int(self.tokens["train"][name].sum()) for name in names) if self.tokens else 0

    def longest(self, names: Iterable[str]) -> int:
        """Tokens of these inputs of a training row, at most; `UNKNOWN_LENGTH` where rows are not known."""
        return sum(int(self.tokens["train"][name].max(initial=1)) if self.tokens else UNKNOWN_LENGTH for name in names)


def read_lengths(
    splits: Mapping[str, Any], inputs: Mapping[str, Sequence[str]], limits: Mapping[str, int | None]
) -> RowLengths:
    """Lengths of the rows of `splits`, of a stream of its first `STREAM_ROWS`. Cost: one pass over the columns.

    Args:
        inputs: input -> its columns.
        limits: input -> residues at which it is cropped.
    """
    is_stream = "train" in splits and not hasattr(splits["train"], "__len__")
    if is_stream:
        splits = {"train": Dataset.from_list([*splits["train"].take(STREAM_ROWS)])}
    found = RowLengths({name: len(rows) for name, rows in splits.items()}, {name: {} for name in splits}, {}, is_stream)
    for name, columns in inputs.items():
        limit = limits.get(name)
        for split, dataset in splits.items():
            rows = read_columns(dataset, columns)
            lengths = [sum(map(len, row)) for row in rows]
            cropped = [(min(length, limit) if limit else length) + SPECIAL_TOKENS for length in lengths]
            found.tokens[split][name] = np.array(cropped, np.int64)
            if not is_stream:
                found.distinct.setdefault(name, {}).update(zip(rows, cropped))
    return found


@dataclass
class Sketch:
    """What a task knows of its run: its stages, what reading its rows said, and what is wrong.

    Attributes:
        remedies: name of an attempt -> what to do where it fails, if its message does not say it.
        subject: what the run trains on, in words; is_demo: none of the user's rows, which are left out.
        encoder_flag: what names a pretrained encoder; empty where the task takes none.
        report, labels: of the rows, as the run reports them; measure: what is best, in a sentence.
        stages: empty where model or rows cannot be read, which is a problem then.
        problems, notes: what would stop the run; what could not be found out, and why.
    """

    remedies: Mapping[str, str]
    subject: str = ""
    is_demo: bool = False
    encoder_flag: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    measure: str = ""
    stages: list[Stage] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """What `action` returns; None where it raises an error of ours, which stops the run that is looked at."""
        try:
            return action()
        except HfExtError as error:
            self.stop(name, "\n".join(str(error).splitlines()[:MAX_LINES]), self.remedies.get(name, AS_SAID))
            return None

    def is_read(self, dataset_name: str | None) -> bool:
        """Whether rows are looked at: not those of the Hub, which would have to be downloaded."""
        if dataset_name is None or not is_on_hub(dataset_name):
            return True
        self.notes.append(f"{dataset_name} is a Hub dataset: it is not downloaded here, so rows are not known.")
        return False

    def find_limits(
        self,
        names: Iterable[str | None],
        inputs: Mapping[str, Sequence[str]],
        splits: Mapping[str, Any],
        data_args: DataArguments,
        build_collator: Callable[[], Any],
        max_length: int | None = None,
    ) -> dict[str, int | None]:
        """Checks vocabulary and length limits where the tokenizers are at hand; the limits of inputs, in residues.

        Args:
            names: of the encoders; None: new ones.
            max_length: a limit in tokens that was asked for.
        """
        absent = [name for name in names if name is not None and not Path(name).is_dir()]
        if absent:
            self.notes.append(f"{', '.join(absent)}: tokenizer not at hand, so input lengths are checked by the run.")
            # Of tokens one or two are special: that much too long is near enough for what a run would take.
            limit = min(filter(None, (data_args.max_residues, max_length)), default=None)
            return dict.fromkeys(inputs, limit if data_args.too_long != "error" else None)

        def check() -> dict[str, int | None]:
            collator = build_collator()
            self.report["inputs"] = check_inputs(collator, splits, data_args.dataset_name)
            own = data_args.max_residues if data_args.too_long != "error" else None
            limits = {name: tokenizer.max_residues for name, tokenizer in collator.tokenizers.items()}
            return {name: min(filter(None, (limit, own)), default=None) for name, limit in limits.items()}

        return (self.attempt("inputs", check) if splits else None) or {}

    def check_stream(self, lengths: RowLengths, args: Any) -> None:
        """A stream needs a number of steps."""
        if lengths.is_stream and args.max_steps <= 0:
            self.stop("stream", "a stream has no length, so when training ends is not known", "--max_steps N")

    def stop(self, name: str, text: str, remedy: str) -> None:
        """Adds a problem, once."""
        finding = Finding(name, "stops", text, remedy)
        if finding not in self.problems:
            self.problems.append(finding)


def sketch_encoder(
    model: PreTrainedModel, training: str, source: str | None, lengths: Mapping[str, Sequence[int]], **given: Any
) -> Part:
    """An encoder, which computes as much for each token and for each pair of tokens in a sequence.

    Args:
        model: on the meta device. source: Hub id or folder of its weights, None where they are new.
        lengths: "train", "validation" and "distinct" -> tokens of each sequence; what is not known is left out.
        given: further attributes of `Part`.
    """
    as_it_trains, forward = flops_coefficients(model), _forward_flops(model)
    train, evaluated, distinct = (np.asarray(lengths.get(n, ()), np.int64) for n in ("train", "validation", "distinct"))
    seen = train if len(train) else distinct
    typical = max(8, round(float((seen**2).sum()) / max(1, int(seen.sum()))))  # of a token, not of a sequence
    name, config = source or type(model).__name__, model.config.to_dict()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    settings: dict[str, Any] = {
        "name": name if len(name) < MAX_NAME else f"...{name[3 - MAX_NAME :]}",
        "width": int(config.get("hidden_size") or config["d_model"]),
        "num_parameters": num_parameters,
        "download_bytes": 0 if _is_at_hand(source) else num_parameters * WEIGHT_BYTES,
        "make_step": partial(_layer_step, config, typical),
        "train_flops": _sum_flops(forward if training == "frozen" else as_it_trains, train),
        "eval_flops": _sum_flops(forward, evaluated),
        "once_flops": _sum_flops(forward, distinct),
        "num_distinct": len(distinct),
        **given,
    }
    return Part(training=training, **settings)


def _is_at_hand(source: str | None) -> bool:
    """Whether weights need no download: new ones, a folder, or in the Hub's cache."""
    if source is None or Path(source).is_dir():
        return True
    files = (try_to_load_from_cache(source, name) for name in ("model.safetensors", "pytorch_model.bin"))
    return any(isinstance(file, str) for file in files)


def _forward_flops(model: PreTrainedModel) -> tuple[float, float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    found = flops_coefficients(model)
    for parameter in trained:
        parameter.requires_grad_(True)
    return found


def _sum_flops(coefficients: tuple[float, float], lengths: np.ndarray) -> float:
    return coefficients[0] * int(lengths.sum()) + coefficients[1] * int((lengths**2).sum())


def _layer_step(config: dict[str, Any], length: int, device: str, size: int) -> Step | None:
    """One layer of the encoder itself, forward, with random weights, on rows of this many tokens."""
    if size > 1:
        return None
    layers = "num_layers" if "num_layers" in config else "num_hidden_layers"
    encoder: Any = build_encoder(EncoderSpec("", {**config, layers: 1})).eval().to(device)
    rows = max(1, (CPU_TOKENS_PER_BATCH if device == "cpu" else GPU_TOKENS_PER_BATCH) // length)
    ids = (torch.arange(rows * length) % 20 + 4).view(rows, length).to(device)  # ids of residues
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    flops = _sum_flops(flops_coefficients(encoder.requires_grad_(False)), np.full(rows, length, np.int64))
    return Step(torch.no_grad()(lambda: encoder(**batch)), flops, "one layer, forward")


def with_adapters(model: Any, args: Any, plan: Plan) -> Any:
    """A copy of a model on the meta device, with the adapters that the plan gives it."""
    made = copy.deepcopy(model)
    with torch.device("meta"):
        return wrap_with_lora(made, lora_settings(args)) if plan.applied("lora") else made

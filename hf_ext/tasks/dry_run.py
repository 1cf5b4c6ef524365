"""A run before it starts: what it would read, hold and compute. Each task draws its own, without weights or training.

`Task.dry_run` gives one; whoever tells time, memory and disk in advance (the doctor) knows nothing else of a task.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from datasets import Dataset
from torch import nn

from ..data import DataArguments, Limit, check_inputs, is_on_hub, limit_of, read_columns
from ..errors import HfExtError
from ..files import Facts, Json
from ..plan import Plan
from ..training_args import FastTrainingArguments

Level = Literal["stops", "warns"]
Span = tuple[float, float]  # from the least to the most
MakeBatch = Callable[[int], dict[str, Any]]
STREAM_ROWS = 1000  # rows of a stream whose lengths stand for all
UNKNOWN_LENGTH = 1024  # tokens of a row where no data is at hand
SPECIAL_TOKENS = 2  # about a sequence: <cls> and <eos>
MAX_LINES = 5  # of an error that becomes a finding
AS_SAID = "what the message says"
# The messages themselves say what is allowed; these name the flags.
REMEDIES = {
    "model": "a Hub id or a folder; without a network: HF_HUB_OFFLINE=1 after `hf download` of the model",
    "measure": "one of the metrics named; left out, the loss decides",
    "inputs": "--too_long truncate; another model where residues are unknown to it",
}


@dataclass(frozen=True)
class Finding:
    """Something that is off. `level` "stops": the command would not run to its end; "warns": it would, but."""

    name: str
    level: Level
    text: str
    remedy: str


class Step(NamedTuple):
    """Something to time: a model with random weights, a batch, and the share of a part's FLOPs that they stand for."""

    model: nn.Module
    batch: dict[str, Any]
    share: float = 1.0

    @property
    def trains(self) -> bool:
        """Whether it is timed forward and backward: an encoder alone has no loss."""
        return "labels" in self.batch


@dataclass(frozen=True)
class Part:
    """A model, or an encoder in one, and what passes through it.

    Attributes:
        name: for people.
        training: "frozen", "lora" or "full".
        width: of its products; narrow ones reach a smaller share of a card's peak.
        flops: of an input of mean length, forward; `inputs_per_row` of these are in a row.
        num_distinct: distinct inputs of all splits, which are computed once where results are kept.
        num_scored: inputs that pass through it once training is over: rows that are scored, and for baselines.
        stored_bytes: what is kept of them on disk. download_bytes: of its weights, where they are not at hand.
        make_step: (device, inputs) -> `Step` of so many inputs of mean length; None above the most of a batch.
        dtype: what it computes in, whatever the plan says; None: as the plan says.
        is_read_while_training: whether it runs in training steps where its results are not kept.
    """

    name: str
    training: str
    width: int
    num_parameters: int
    flops: float
    make_step: Callable[[str, int], Step | None]
    inputs_per_row: int = 1
    num_distinct: int = 0
    num_scored: int = 0
    stored_bytes: int = 0
    download_bytes: int = 0
    dtype: str | None = None
    is_read_while_training: bool = True

    def is_kept(self, plan: Plan) -> bool:
        """Returns whether each distinct input passes through it once, and never while the run trains."""
        return self.training == "frozen" and (plan.applied("embedding_cache") or not self.is_read_while_training)


@dataclass(frozen=True)
class RowLengths:
    """How many tokens the sequences of a run have, cropped as it would crop them.

    Attributes:
        num_rows: of each split; of a stream, how many of its first rows stand for all.
        mean, longest: input -> tokens of a training row, or of the windows in which it is read.
        windows, most_windows: input -> in how many a training row is read, in the mean and at most; nothing: in one.
        num_distinct: input -> distinct sequences in all splits; nothing of a stream.
    """

    num_rows: Mapping[str, int]
    mean: Mapping[str, float]
    longest: Mapping[str, int]
    num_distinct: Mapping[str, int] = field(default_factory=dict)
    is_stream: bool = False
    windows: Mapping[str, float] = field(default_factory=dict)
    most_windows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One training. Most tasks have one; a generator is trained in several, one after the other.

    Attributes:
        args: `FastTrainingArguments` of it.
        model: on torch's meta device: shapes, no weights.
        parts: what computes in it; and `num_head_parameters` beside them, once for each row.
        lengths: of its rows.
        rows, inputs: training rows and an object with their `columns`, for the plan.
        as_trained: plan -> the model as the device holds it while it trains, still without weights, and what makes its
            batches of so many of the longest rows.
        title: tells stages apart. is_asked: whether the command runs it.
        num_runs: how often it is trained, from one pass of frozen encoders.
    """

    args: Any
    model: Any
    parts: list[Part]
    as_trained: Callable[[Plan], tuple[nn.Module, MakeBatch]]
    lengths: RowLengths
    rows: Any = None
    inputs: Any = None
    num_head_parameters: int = 0
    title: str = ""
    is_asked: bool = True
    num_runs: int = 1

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Of each split; nothing where rows are not known, and of a stream how many were looked at."""
        return self.lengths.num_rows

    @property
    def num_tokens(self) -> int:
        """Of all training rows."""
        windows = self.lengths.windows
        tokens = sum(mean * windows.get(name, 1) for name, mean in self.lengths.mean.items())
        return round(self.num_rows.get("train", 0) * tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest training row, at most."""
        windows = self.lengths.most_windows
        return sum(longest * windows.get(name, 1) for name, longest in self.lengths.longest.items())


def read_lengths(splits: Facts, inputs: Mapping[str, Sequence[str]], limits: Mapping[str, Limit]) -> RowLengths:
    """Reads lengths of the rows of `splits`, of a stream of its first `STREAM_ROWS`. Cost: one pass over the columns.

    Args:
        splits: without rows, inputs are taken for `UNKNOWN_LENGTH` long.
        inputs: input -> its columns.
        limits: input -> residues above which it is cropped, or read in windows.
    """
    is_stream = "train" in splits and not hasattr(splits["train"], "__len__")
    if is_stream:
        splits = {"train": Dataset.from_list([*splits["train"].take(STREAM_ROWS)])}
    mean: dict[str, float] = dict.fromkeys(inputs, UNKNOWN_LENGTH)
    longest = dict.fromkeys(inputs, UNKNOWN_LENGTH)
    num_distinct = dict.fromkeys(inputs, 0)
    windows: dict[str, float] = {}
    most_windows: dict[str, int] = {}
    for name, columns in inputs.items() if "train" in splits else ():
        rows = {split: read_columns(dataset, columns) for split, dataset in splits.items()}
        lengths = np.array([sum(map(len, row)) for row in rows["train"]])
        read, parts = limits.get(name, Limit()).reads(lengths)
        windows[name] = float(parts.mean())
        most_windows[name] = int(parts.max(initial=1))
        mean[name] = float(read.mean()) / windows[name] + SPECIAL_TOKENS
        longest[name] = int((read // parts).max(initial=1)) + SPECIAL_TOKENS
        num_distinct[name] = 0 if is_stream else len(set(chain.from_iterable(rows.values())))
    num_rows = {name: len(rows) for name, rows in splits.items()}
    return RowLengths(num_rows, mean, longest, num_distinct, is_stream, windows, most_windows)


@dataclass
class DryRun:
    """What a task knows of its run: its stages, what reading its rows said, and what is wrong.

    Attributes:
        subject: what the run trains on, in words; is_demo: none of the user's rows, which are left out.
        encoder_flag: what names a pretrained encoder; empty where the task takes none.
        report: of the rows, as the run reports them; describe: what its log says of them; measure: what is best, in a
            sentence.
        stages: empty where model or rows cannot be read, which is a problem then.
        problems, notes: what would stop the run; what could not be found out, and why.
    """

    subject: str = ""
    is_demo: bool = False
    encoder_flag: str = ""
    report: Json = field(default_factory=dict)
    describe: Callable[[], str] | None = None
    measure: str = ""
    stages: list[Stage] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """Returns what `action` returns.

        None where it raises an error of ours, which stops the run that is looked at.
        """
        try:
            return action()
        except HfExtError as error:
            self.stop(name, "\n".join(str(error).splitlines()[:MAX_LINES]), REMEDIES.get(name, AS_SAID))
            return None

    def is_read(self, dataset_name: str | None) -> bool:
        """Returns whether rows are looked at: not those of the Hub, which would have to be downloaded."""
        if dataset_name is None or not is_on_hub(dataset_name):
            return True
        self.notes.append(f"{dataset_name} is a Hub dataset: it is not downloaded here, so rows are not known.")
        return False

    def find_limits(
        self,
        names: Iterable[str | None],
        inputs: Mapping[str, Sequence[str]],
        splits: Facts,
        data_args: DataArguments,
        build_collator: Callable[[], Any],
        max_length: int | None = None,
    ) -> dict[str, Limit]:
        """Checks vocabulary and length limits where the tokenizers are at hand; the limits of inputs.

        Args:
            names: of the encoders; None: new ones.
            max_length: a limit in tokens that was asked for.
        """
        absent = [name for name in names if name is not None and not Path(name).is_dir()]
        if absent:
            self.notes.append(f"{', '.join(absent)}: tokenizer not at hand, so input lengths are checked by the run.")
            # Of tokens one or two are special: that much too long is near enough for what a run would take.
            limit = min(filter(None, (data_args.max_residues, max_length)), default=None)
            if data_args.too_long == "error":
                return {}
            in_windows = data_args.too_long == "window"
            return {name: Limit.make(limit, in_windows and len(columns) == 1) for name, columns in inputs.items()}

        def check() -> dict[str, Limit]:
            collator = build_collator()
            self.report["inputs"] = check_inputs(collator, splits, data_args.dataset_name)
            return {name: limit_of(collator, name) for name in collator.tokenizers}

        return (self.attempt("inputs", check) if splits else None) or {}

    def check_stream(self, lengths: RowLengths, args: FastTrainingArguments) -> None:
        """Refuses a stream without a number of steps."""
        if lengths.is_stream and args.max_steps <= 0:
            self.stop("stream", "a stream has no length, so when training ends is not known", "--max_steps N")

    def resolve_stock(self, given: Any, args: FastTrainingArguments) -> Any:
        """Returns `args` as a run with `--stock_trainer` has them, where that was asked for."""
        if not given.stock_trainer:
            return args
        self.notes.append("--stock_trainer: transformers.Trainer itself, without any of these speed-ups.")
        args = copy.copy(args)
        args.speedups = []
        return args

    def stop(self, name: str, text: str, remedy: str) -> None:
        """Adds a problem, once."""
        finding = Finding(name, "stops", text, remedy)
        if finding not in self.problems:
            self.problems.append(finding)

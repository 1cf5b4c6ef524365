"""What a kind of label is: a class that holds all that differs between kinds; what most of them share is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from ..errors import ArgumentError, DataError
from ..files import Json
from .cells import UNKNOWN, Checked
from .columns import LabelTable, Read, RowError
from .outputs import Array, BoolArray, FloatArray, IntArray, KindOutputs, Outputs

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import Series
    from torch import Tensor

MEASURED = float(np.nextafter(np.float32(UNKNOWN), np.float32(0)))  # -99.99999: a number that is -100 counts too


class ReadArguments(Protocol):
    """What `DataArguments` says of the rows beside the names of label columns."""

    sequence_columns: list[str]
    mask_column: str | None
    mask_file: str | None
    task: Any
    censor_column: str | None
    marker_classes: list[str]
    label_hierarchy: str | None
    bad_rows: Literal["error", "drop"]

    @property
    def number_columns(self) -> list[str]:
        """Those beside the sequences."""


class Steps(NamedTuple):
    """How a kind trains unless the user says otherwise: rows of a batch, steps in all, and epochs at least.

    `frozen`: steps in all where no encoder trains, so that one takes little time.
    """

    rows: int
    steps: int
    frozen: int
    min_epochs: int


@dataclass(frozen=True)
class LabelKind(KindOutputs):
    """What a model predicts, with the names that training found; saved as `AffinityConfig.label_kind`.

    Each kind is a subclass, entered in `hf_ext.labels.KINDS`. Its loss is in `hf_ext.models.losses.LOSSES`, its metrics
    are in `hf_ext.evaluation.kinds.ROWS`.

    Attributes:
        columns: label columns of the table.
        names: what each output stands for: classes in their order, labels of a multilabel task, or value columns.
    """

    columns: tuple[str, ...] = ("label",)
    names: tuple[str, ...] = ("label",)

    task: ClassVar[str]  # as `--task` has it
    takes_teacher = False  # predictions of another model can be learned beside it
    takes_columns = False  # several label columns
    takes_hierarchy = False  # labels may imply others
    head_sizes: ClassVar[tuple[int, ...]] = ()  # of a network on frozen encoders, where these are not the usual
    can_stream = False  # no names must be found in all rows before the first is read
    arrow_type: ClassVar[pa.DataType]  # of the column `label` of rows
    dtype: ClassVar[type] = np.float32  # of labels in batches
    skips_unknown = True  # labels of -100 have no loss and no score
    is_one_number = False  # each row has a number, -100 too, which may be a bound
    per_residue = False  # each residue of the sequence has a label
    losses: ClassVar[tuple[str, ...]] = ("mse",)  # what `--loss` may be; of classes the first is cross entropy
    baselines: ClassVar[tuple[str, ...]] = ("nearest",)  # beside a constant and linear models
    constant_name = "class frequencies"  # of the baseline that predicts the same for all rows
    linear_name = "logistic regression"  # of the linear model
    prior_rows = 1  # that stand for all of training among the nearest rows, so that no probability is 0
    counted = "rows"  # what has a label
    steps: ClassVar[Steps | None] = None
    repeats = False  # rows with the same sequences are compared
    chart = ""  # of test rows: scatter, confusion, or none
    or_pooling = " or --pooling"  # among what may be tried next
    why_no_intervals = "they are for a model of one number per row"
    why_one_head = ""  # why several heads cannot be mixed
    why_last_layer = ""  # why layers are not compared
    hub_task: ClassVar[str]  # what the Hub calls it; of numbers of several columns or of residues it has no name
    hub_name: ClassVar[str]
    returns: ClassVar[str]  # what `AffinityPredictor.predict` does

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Returns the shape of the label of a row or residue."""
        return (self.num_outputs,)

    @property
    def arrow_columns(self) -> dict[str, pa.DataType]:
        """Returns the types of the columns that `read` makes."""
        return {"label": self.arrow_type}

    @property
    def of_rows(self) -> LabelKind:
        """Returns the same label, one for each row."""
        return self

    @classmethod
    def fits(cls, columns: Sequence[str], names: Sequence[str]) -> bool:
        """Says whether it is the kind of a task's labels in these columns, with these names of outputs."""
        return True

    # As stored.

    def state(self) -> Json:
        """Returns what `kind_from_state` reads, JSON-able."""
        return {"task": self.task, "columns": [*self.columns], "names": [*self.names]}

    @property
    def stored(self) -> Json | None:
        """Returns the state in a model's configuration; None of what a model predicts that says nothing."""
        return self.state()

    def matches(self, other: LabelKind) -> bool:
        """Says whether predictions of both kinds can be compared."""
        return (self.task, self.names) == (other.task, other.names)

    # Cells.

    def check_cell(self, cell: object) -> Checked:
        """Returns a cell as its value, or the rule that refuses it."""
        raise NotImplementedError

    def read(self, table: LabelTable) -> Read:
        """Returns the column `label` of rows, and an error for each row that is refused. Each cell is checked once."""
        column = table.check(self.columns[0], self.check_cell)
        return {"label": column.to_rows(self.arrow_type)}, column.errors

    def find_wrong(self, values: Any, name: str, rows: IntArray) -> list[RowError]:
        """Returns errors of the rows whose values, of one column, cannot be meant; of residues each row has several."""
        return []

    def read_items(self, cell: object) -> list[Any]:
        """Returns what a cell is read as, in the order in which it stands there."""
        raise NotImplementedError

    def find_names(
        self, cells: pa.ChunkedArray, sequences: pa.ChunkedArray, args: ReadArguments, notes: list[str]
    ) -> LabelKind:
        """Returns the kind with what its outputs stand for, of one column.

        Args:
            cells: of all rows; sequences: of the same rows.
            args: by which they are read.
            notes: gets sentences about what is probably a mistake.

        Raises:
            DataError: the cells are not what this kind can be.
        """
        return self

    def check(self, args: ReadArguments) -> None:
        """Raises ArgumentError where other arguments of the rows do not go with what the labels are."""
        told = f"--task {self.task}"
        num = len(self.columns)
        if num > 1 and not self.takes_columns:
            raise ArgumentError(f"{told}: name one label column, not {num}; regression and multilabel take several.")
        self._check_columns(args, told)
        if (name := args.censor_column) and not self.is_one_number:
            raise ArgumentError(f"--censor_column {name} is for one column of numbers; leave it out.")

    def _check_columns(self, args: ReadArguments, told: str) -> None:
        for flag in ("mask_column", "mask_file"):
            if name := getattr(args, flag):
                raise ArgumentError(f"--{flag} {name} says which residues have a label; {told} has one per row.")

    def check_options(self, loss: str, binder_threshold: float | None, pooling: Sequence[str]) -> None:
        """Raises ArgumentError where an option of the model is for another kind."""
        given = [] if loss in self.losses else [f"--loss {loss}"]
        given += [] if binder_threshold is None or self.is_one_number else [f"--binder_threshold {binder_threshold:g}"]
        if given:
            raise ArgumentError(
                f"{' and '.join(given)} is for one number per row, and the label is {self.describe()}. Leave it out, "
                "or give --task regression for amounts."
            )

    def check_inputs(self, inputs: Sequence[str]) -> None:
        """Raises ArgumentError where these inputs of encoders do not go with the labels."""

    def check_sequences(self, columns: Sequence[str], nums: Sequence[int]) -> None:
        """Raises DataError where training rows have no two distinct sequences, by their number in each column."""
        if max(nums) == 1:
            raise DataError(f"{' and '.join(columns)}: the same in all training rows, so there is nothing to learn.")

    # Facts of a split, and sentences.

    def describe(self) -> str:
        """Returns what the labels are, for a sentence."""
        raise NotImplementedError

    def describe_target(self, label: str, is_order: bool) -> str:
        """Returns what is predicted, for a summary; `is_order`: rows are ranked only."""
        return f"{label} ({self.describe()})"

    def describe_returned(self, unit: str) -> str:
        """Returns what `predict` returns, for a sentence; `unit`: of one number."""
        return self.returns

    def describe_limits(self) -> list[str]:
        """Returns sentences on what the model cannot say."""
        return []

    def first_metrics(self, decided_by: str, scored: Sequence[str]) -> list[str]:
        """Returns the metrics that a report shows first: the verdict's, and the first of those that were `scored`."""
        return [decided_by, *scored[:1]]

    def facts_of(self, rows: Dataset) -> Json:
        """Returns what the labels of a split hold, JSON-able; `rows`: a `datasets.Dataset`. See `facts`."""
        column = rows.with_format("arrow")[:]["label"].combine_chunks()
        values = column.flatten() if pa.types.is_list(column.type) else column
        return self.facts(values.to_numpy(zero_copy_only=False).reshape(-1, *self.label_shape))

    def facts(self, labels: Array) -> Json:
        """Returns what these labels hold, JSON-able."""
        raise NotImplementedError

    def describe_facts(self, facts: Json) -> str:
        """Returns the same in words, for a log."""
        raise NotImplementedError

    def why_useless(self, facts: Json) -> str:
        """Returns why nothing can be learned from training labels; "" where something can."""
        raise NotImplementedError

    def compare_splits(self, facts: Mapping[str, Json]) -> list[str]:
        """Returns warnings about what other splits have and training lacks."""
        return []

    def name_label(self, label: Any) -> Any:
        """Returns the label of a row as a sentence has it."""
        return label

    def noise(self, labels: Series, means: Series, num_free: int) -> dict[str, float]:
        """Returns what labels of rows with the same sequences say of the measurement; of numbers alone.

        Args:
            labels: of all rows; means: of their groups.
            num_free: rows that repeat others, less their groups.
        """
        return {}

    # Batches and scales.

    def stack(self, values: Sequence[Any], longest: int | None = None) -> Tensor:
        """Returns one tensor of the labels of n rows, of `dtype`.

        Args:
            values: of each row what its column `label` has: a number, the number of a class, or a list; NaN: not known.
            longest: residues of a row that the encoder takes, where each has a label; None: all.

        Returns:
            (n, *label_shape); of residues (n, longest row). -100 (`UNKNOWN`) is behind a row's end, and what is not
            known, but of one number per row, where NaN stays.
        """
        import torch  # here, since the words of `--task` need none of it

        return self._mark_unknown(torch.from_numpy(np.array(self.unpack(values), self.dtype)))

    def _mark_unknown(self, labels: Tensor) -> Tensor:
        if not self.skips_unknown or not labels.is_floating_point():
            return labels
        return labels.masked_fill(labels.eq(UNKNOWN), MEASURED).nan_to_num(nan=UNKNOWN)

    def flatten(self, labels: Outputs) -> FloatArray:
        """Returns all labels of rows, (labels, *label_shape): those of residues one after another."""
        return np.asarray(labels, np.float64)

    def scale(self, labels: Sequence[Any]) -> tuple[Any, Any]:
        """Returns mean and standard deviation of the known labels of rows: 0 and 1 of classes, which change nothing."""
        return 0.0, 1.0

    def code(self, labels: FloatArray) -> tuple[FloatArray, IntArray]:
        """Returns distinct targets (m, num_outputs), as certain predictions, and which of them each of n rows has."""
        return labels.reshape(len(labels), -1), np.arange(len(labels))

    def as_columns(self, labels: Array, most: int, least: float) -> tuple[FloatArray, BoolArray]:
        """Returns labels as columns of numbers of one size, (n, k), and which are known; others hold the column's mean.

        Args:
            labels: (n, ...), as batches hold them.
            most: columns of classes, the most frequent ones.
            least: no column is divided by less.
        """
        is_known = labels != UNKNOWN
        numbers = np.ma.array(labels.astype(np.float64), mask=~is_known)
        deviation = 1.0 if self.has_probabilities else np.maximum(numbers.std(0).filled(0), least)
        return ((numbers - numbers.mean(0)) / deviation).filled(0), is_known

    def line_up(
        self, predictions: Outputs, labels: Outputs, as_array: Callable[[Any], Array]
    ) -> tuple[Array, FloatArray, IntArray]:
        """Returns predictions (values, ...), labels (values, ...) and the row of each value; of residues known ones."""
        return as_array(predictions), as_array(labels).astype(np.float64), np.arange(len(labels))

    def constant_facts(self, labels: FloatArray) -> dict[str, float]:
        """Returns what a table says of the constant that is fitted on these labels."""
        return {}

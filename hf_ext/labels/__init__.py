"""Kinds of labels: what a cell may hold, what the head puts out, what is predicted, and said. One class for each."""

from typing import TYPE_CHECKING, Literal

from ..faces import offer

if TYPE_CHECKING:
    from .cells import (
        NUMBER,
        UNKNOWN,
        Checked,
        as_bit,
        check_number,
        drop_zeros,
        is_missing,
        list_some,
        shorten,
        show_names,
        write_name,
    )
    from .classes import Classes
    from .columns import LabelTable, RowError, as_array, as_text, check_cells, distinct
    from .facts import NUM_SEEN
    from .filters import RowFilter
    from .kind import LabelKind
    from .number import Number
    from .numbers import Numbers
    from .outputs import (
        LABEL,
        PREDICTION,
        PROBABILITY,
        Array,
        BoolArray,
        Columns,
        Float32Array,
        FloatArray,
        IntArray,
        Outputs,
        average,
    )
    from .residue_numbers import ResidueNumbers
    from .residues import ResidueClasses
    from .rules import KINDS, ONE_NUMBER, STREAM_TASK, STREAMED, choose_task, kind_from_state, make_kind
    from .sets import LabelColumns, LabelSets
else:
    __getattr__, __dir__, __all__ = offer(__name__, "TaskChoice")

# What `--task` may be, as `KINDS` has it: written out, since --help would wait for pyarrow if the classes said it.
TaskChoice = Literal[
    "auto", "regression", "classification", "multilabel", "residue_classification", "residue_regression"
]

"""Predict with a trained model: a folder or Hub id, and a table or FASTA of sequences; writes a CSV.

    hf-ext predict --model outputs/affinity --dataset_name new.csv --output predictions.csv

The model reads the columns that it was trained on. The CSV has all columns of the table, in their order and as they
were read, then `source_row` (the row's line in it), `prediction`, and of classes their probabilities (docs/labels.md);
--keep_columns false leaves out those that the model does not read. Embeddings of frozen encoders are read from the
cache where it has them. A text that a spreadsheet would run as a formula (`=...`, `@...`, `-x`) gets a `'` in front; to
join with your table use `source_row`, or take that `'` off (`hf_ext.files.read_cell`).

Of a model of numbers, `--interval 0.9` writes `prediction_low` and `prediction_high` as well: between them 90 % of
measured values are expected, by how far predictions were off on the validation rows of the training run. A model of
mixed heads also writes `prediction_std`, how far a measured value is expected from its prediction.

`--rank 96` writes 96 rows alone, in the order in which to measure them, with `rank` and `acquisition`:

    hf-ext predict --model outputs/affinity --dataset_name candidates.csv --rank 96 --by ucb --output next.csv
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..arguments import PredictingArguments, parse_command
from ..data import ReadingArguments
from ..errors import ArgumentError
from ..property import PredictArguments
from ..startup import quick_imports


def main(argv: Sequence[str] | None = None) -> Path:
    """Predicts each row of a table; returns the path of the CSV.

    Raises:
        ArgumentError: a model or arguments that do not fit; a file that cannot be written.
        DataError: rows that the model cannot read; predictions that are not finite.
    """
    types = (PredictArguments, ReadingArguments, PredictingArguments)
    parser, (own, reading, computing) = parse_command(types, {}, __doc__, argv)
    with quick_imports():  # here, so that --help waits for no model code
        from ..property import training_arguments
        from .prediction import predict_table

    if reading.streaming and reading.bad_rows == "drop":
        raise ArgumentError(
            "--streaming with --bad_rows drop: a stream's predictions have no row numbers, so it could not "
            "be told which rows were left out. Read the table at once, or leave --bad_rows out."
        )
    if "too_long" not in parser.explicit:
        reading.too_long = None  # rows are refused as the model's own run refused them
    return predict_table(own, reading, training_arguments(computing, parser.explicit), parser.explicit)

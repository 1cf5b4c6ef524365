"""Predict with a trained model: a folder or Hub id, and a table or FASTA of sequences; writes a CSV.

    hf-ext predict --model outputs/affinity --dataset_name new.csv --output predictions.csv

The model reads the columns that it was trained on. The CSV has all columns of the table, in their order and as they
were read, then `source_row` (the row's line in it), `prediction`, and of classes their probabilities (docs/labels.md);
--keep_columns false leaves out those that the model does not read. Embeddings of frozen encoders are read from the
cache where it has them. A text that a spreadsheet would run as a formula (`=...`, `@...`, `-x`) gets a `'` in front; to
join with your table use `source_row`, or take that `'` off (`hf_ext.files.read_cell`).

Of a model of numbers, `--interval 0.9` writes `prediction_low` and `prediction_high` as well: between them 90 % of
measured values are expected, by how far predictions were off on the validation rows of the training run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..arguments import PredictingArguments, parse_command
from ..data import ReadingArguments
from ..property import PredictArguments
from ..startup import quick_imports


def main(argv: Sequence[str] | None = None) -> Path:
    """Runs the command; returns the path of the CSV."""
    types = (PredictArguments, ReadingArguments, PredictingArguments)
    parser, (own, reading, computing) = parse_command(types, {}, __doc__, argv)
    with quick_imports():
        from .predicting import predict_table

    return predict_table(own, reading, computing, parser.explicit)

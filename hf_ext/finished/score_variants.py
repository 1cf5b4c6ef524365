"""Score substitutions of a protein, and variants in a table, by a masked language model alone: no label is read.

    hf-ext score-variants --encoder facebook/esm2_t12_35M_UR50D --wild_type protein.fasta --output variants

The score of a substitution is log p(new residue) - log p(the wild type's own), in nats, with its position masked (--by
masked: a pass for each residue), or by the protein as it is (--by wild_type: one pass). OUTPUT gets substitutions.csv,
the 20 residues at each position, and heatmap.png. Of a table of variants, whole sequences or substitutions
(A23G:D40N), it also gets scores.csv: all columns of the table, `source_row`, and `zero_shot_score`, the sum over a
row's substitutions. A row of another length than the wild type has none. --label_column NAME says how well scores
order measured numbers, by Spearman's correlation with its interval.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..arguments import check_choices, option, parse_command
from ..data import DataArguments, ReadingArguments
from ..errors import ArgumentError, DataError
from ..startup import quick_imports

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..labels import Checked

SCORE = "zero_shot_score"
WRITTEN_OUT = "mutated_sequence"  # column that --mutation_column adds
PER_LINE = 100  # residues of a heat map, and of long ones a hundredth: a picture ends at 65,535 pixels
SUBSTITUTION = re.compile(r"([A-Z])(\d+)([A-Z])")


@dataclass
class ScoreVariantsArguments:
    """Which model, which protein, and what is written."""

    _argument_group_name = "scoring"  # in --help
    _only_reads = "score-variants"

    encoder: str = option(MISSING, "Hub id or folder of a masked language model with its head, also of hf-ext mlm.")
    wild_type: str = option(MISSING, "The protein: its sequence, or a FASTA file with it alone.")
    output: str = option("variants", "New folder for substitutions.csv, heatmap.png and, of a table, scores.csv.")
    revision: str | None = option(None, "Commit, tag or branch of the encoder on the Hub.")
    by: Literal["masked", "wild_type"] = option(
        "masked", "masked: each position is masked once. wild_type: one pass over the protein as it is."
    )
    sequence_column: str = option("sequence", "Column of the table with whole sequences.")
    mutation_column: str | None = option(
        None,
        "Instead: column with substitutions, counted from 1 along --wild_type, such as A23G:D40N; WT for none. Written "
        f"out in a column {WRITTEN_OUT}.",
    )
    label_column: str | None = option(None, "Column of measured numbers, to say how well scores order them.")
    bf16: bool = option(False, "Compute in bfloat16.")
    fp16: bool = option(False, "Compute in float16.")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.bf16 and self.fp16:
            raise ArgumentError("--bf16 and --fp16: give one of both.")


def main(argv: Sequence[str] | None = None) -> Path:
    """Scores all substitutions, and the variants of a table; returns the folder that was written.

    Raises:
        ArgumentError: an encoder without a masked head, or arguments that do not fit; a folder that is not empty.
        DataError: rows that cannot be read, or none as long as the wild type.
    """
    types = (ScoreVariantsArguments, ReadingArguments)
    _, (own, reading) = parse_command(types, {"too_long": "window"}, __doc__, argv)
    with quick_imports():  # here, so that --help waits for no model code
        import torch

        from ..baselines import load_masked_lm, score_substitutions
        from ..checkpoints import make_folder
        from ..data import STANDARD
        from ..files import write_csv
        from ..models import load_tokenizer
        from ..processes import refuse_several
        from ..property import find_device
        from ..reporting import write_png
        from ..text import start_run_log

    refuse_several("score-variants")
    log = start_run_log(None)
    if reading.streaming or reading.too_long != "window":
        raise ArgumentError("Tables are read at once, long proteins in windows: leave --streaming and --too_long out.")
    if not reading.dataset_name and (own.mutation_column or own.label_column):
        raise ArgumentError("Columns are of a table: give --dataset_name, too, or leave them out.")
    folder = Path(own.output).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(f"--output {own.output}: not empty. Nothing is overwritten: give a new folder.")
    wild_type = read_wild_type(own.wild_type)
    make_folder(folder, "--output")
    rows = load_rows(own, reading, wild_type, folder) if reading.dataset_name else None
    half = torch.bfloat16 if own.bf16 else torch.float16
    dtype = half if own.bf16 or own.fp16 else torch.float32
    model = load_masked_lm(own.encoder, own.revision, find_device(), dtype)
    tokenizer = load_tokenizer(own.encoder, own.revision)
    table = score_substitutions(model, tokenizer, wild_type, own.by, reading.max_residues)
    columns = {
        "position": np.repeat(range(1, len(table) + 1), len(STANDARD)),
        "wild_type": np.repeat([*wild_type], len(STANDARD)),
        "residue": [*STANDARD] * len(table),
        "score": table.ravel(),
    }
    write_csv(folder / "substitutions.csv", columns)
    write_png(draw_heat_map(table, wild_type), folder / "heatmap.png")
    if rows is not None:
        write_scores(own, rows, table, wild_type, folder / "scores.csv")
    log.info("All substitutions of %d residues are scored in %s.", len(table), folder)
    return folder


def read_wild_type(given: str) -> str:
    """Reads a protein: its sequence, or that of a FASTA file that holds no other.

    Raises:
        ArgumentError: letters other than the 20 residues.
        DataError: no such file, or one with several sequences; what is no protein.
    """
    from ..baselines import check_wild_type
    from ..data import check_sequence, read_parts

    sequences = [given]
    if os.path.exists(given) or not given.strip("* ").isalpha():
        sequences = [cell for part in read_parts(given, ["sequence"]) for cell in part.data["sequence"][:]]
    checked = check_sequence(sequences[0], DataArguments())
    if len(sequences) > 1 or checked.rule:
        told = checked.rule or f"{len(sequences)} sequences"
        raise DataError(f"--wild_type {given[:60]}: {told}. Give one protein, or a FASTA file with it alone.")
    check_wild_type(checked.value)
    return str(checked.value)


def load_rows(
    own: ScoreVariantsArguments, reading: ReadingArguments, wild_type: str, folder: Path
) -> tuple[Any, list[str]]:
    """Loads variants as `load_sequences` does, with all columns, and labels if asked for; and their whole sequences.

    Raises:
        DataError: as `load_sequences`; none is as long as the wild type, or a column has a name that is written.
    """
    from ..data import REJECTED_FILE, load_sequences

    column = own.sequence_column
    given = None
    if own.mutation_column:
        column = WRITTEN_OUT
        given = write_out(own.mutation_column, reading, wild_type)
    args = DataArguments(**vars(reading), sequence_columns=[column])
    if own.label_column:
        args.label_column = [own.label_column]
        args.task = "regression"
    rejected = folder / REJECTED_FILE
    loaded: Any = load_sequences(
        args, rejected=rejected, keeps_columns=True, needs_labels=bool(own.label_column), table=given
    )
    sequences = loaded.table[column][:]
    lengths = sorted({*map(len, sequences)})
    if len(wild_type) not in lengths:
        raise DataError(
            f"{reading.dataset_name}: no row is as long as the wild type, {len(wild_type)} residues; they have "
            f"{lengths[0]} to {lengths[-1]}. Give --wild_type as rows have it, with tags and linkers."
        )
    if SCORE in loaded.as_read.column_names:
        raise DataError(f"{reading.dataset_name} has a column {SCORE}, which is written here. Rename yours.")
    return loaded, sequences


def write_out(column: str, reading: ReadingArguments, wild_type: str) -> Any:
    """Reads a table of substitutions, with a column more: the whole sequences that these make of the wild type.

    Raises:
        DataError: cells that are no substitutions of this protein, with their rows.
    """
    from datasets import concatenate_datasets

    from ..data import SOURCE_ROW, check_columns, format_errors, read_parts
    from ..labels import check_cells

    name = str(reading.dataset_name)
    parts = read_parts(name, config_name=reading.dataset_config_name, revision=reading.dataset_revision)
    data: Any = concatenate_datasets([part.data for part in parts])
    check_columns(data.column_names, [column], name)
    check = partial(check_substitutions, wild_type=wild_type)
    cells = check_cells(data[column][:], check, column, np.array(data[SOURCE_ROW][:]))
    if cells.errors and reading.bad_rows == "error":
        raise DataError(format_errors([(name, error) for error in cells.errors]))
    return data.add_column(WRITTEN_OUT, [cells.checked[i].value for i in cells.found.number])


def check_substitutions(cell: object, wild_type: str) -> Checked:
    """Checks a cell such as A23G:D40N, also with commas or blanks between, and writes the sequence out."""
    from ..labels import Checked

    text = str(cell).strip().upper()
    sequence = [*wild_type]
    for one in re.split(r"[\s:;,/+]+", text) if text != "WT" else ():
        found = SUBSTITUTION.fullmatch(one)
        if found is None:
            return Checked("", f"{one!r} is no substitution", "Write A23G, several as A23G:D40N, none as WT.")
        place = int(found[2])
        if [*wild_type[place - 1 : place]] != [found[1]]:
            return Checked("", f"{one!r} is not of the wild type", "Count positions from 1 along --wild_type.")
        sequence[place - 1] = found[3]
    return Checked("".join(sequence))


def write_scores(
    own: ScoreVariantsArguments, rows: tuple[Any, list[str]], table: np.ndarray, wild_type: str, path: Path
) -> None:
    """Writes the scores of `load_rows`, and says how many rows have none and how well scores order labels."""
    from ..baselines import score_rows
    from ..data import SOURCE_ROW, label_array
    from ..evaluation import score_predictions
    from ..files import write_csv
    from ..text import LOGGER, score

    loaded, sequences = rows
    scores = score_rows(table, wild_type, sequences)
    columns = {name: loaded.as_read[name][:] for name in loaded.as_read.column_names}
    write_csv(path, {**columns, SOURCE_ROW: loaded.table[SOURCE_ROW][:], SCORE: scores})
    known = np.isfinite(scores)
    if not known.all():
        told = "have no score: they have another length than the wild type, or a letter that is no residue"
        LOGGER.warning("%d of %d rows %s.", len(known) - known.sum(), len(known), told)
    if own.label_column:
        found = score_predictions(scores[known], label_array(loaded.table)[known], threshold=None)
        LOGGER.info("Spearman with %s: %s, %d rows.", own.label_column, score(found["spearman"]), known.sum())


def draw_heat_map(table: np.ndarray, wild_type: str) -> Figure:
    """Draws scores of substitutions, (L, 20): residues up, positions across, several lines of long proteins.

    Blue is likelier than the wild type's own residue, which a dot marks; red is less likely.
    """
    from matplotlib.figure import Figure

    from ..data import STANDARD

    per_line = max(PER_LINE, len(wild_type) // 100)
    starts = range(0, len(wild_type), per_line)
    figure = Figure(figsize=(14, 2.6 * len(starts)), layout="constrained")
    lines = figure.subplots(len(starts), squeeze=False)[:, 0]
    most = np.quantile(np.abs(table), 0.99)
    for start, axes in zip(starts, lines):
        part = table[start : start + per_line]
        positions = start + 1 + np.arange(len(part))
        edges = (positions[0] - 0.5, positions[-1] + 0.5, len(STANDARD) - 0.5, -0.5)
        image = axes.imshow(part.T, cmap="RdBu", vmin=-most, vmax=most, aspect="auto", extent=edges)
        axes.plot(positions, [STANDARD.index(wild_type[i - 1]) for i in positions], "k.", markersize=3)
        axes.set_xlim(start + 0.5, start + per_line + 0.5)
        axes.set_yticks(range(len(STANDARD)), [*STANDARD], fontsize=7)
    figure.colorbar(image, ax=lines, label="log p(residue) - log p(wild type)")
    return figure

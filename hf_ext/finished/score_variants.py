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

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..arguments import check_choices, option, parse_command
from ..data import DataArguments, ReadingArguments
from ..errors import ArgumentError, DataError
from ..startup import quick_imports

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORE = "zero_shot_score"
PER_LINE = 100  # residues of a heat map, and of long ones a hundredth: a picture ends at 65,535 pixels


@dataclass
class ScoreVariantsArguments:
    """Which model, which protein, and what is written."""

    _argument_group_name = "scoring"  # in --help
    _only_reads = "score-variants"

    encoder: str = option(MISSING, "Hub id or folder of a masked language model with its head, also of hf-ext mlm.")
    output: str = option("variants", "New folder for substitutions.csv, heatmap.png and, of a table, scores.csv.")
    revision: str | None = option(None, "Commit, tag or branch of the encoder on the Hub.")
    by: Literal["masked", "wild_type"] = option(
        "masked", "masked: each position is masked once. wild_type: one pass over the protein as it is."
    )
    sequence_column: str = option("sequence", "Column of the table with whole sequences.")
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

        from ..baselines import check_wild_type, load_masked_lm, score_substitutions
        from ..checkpoints import make_folder
        from ..data import STANDARD, read_wild_type
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
    if not reading.dataset_name and (reading.wild_type == "auto" or reading.mutation_column or own.label_column):
        raise ArgumentError("Columns, and a wild type that is looked for, are of a table: give --dataset_name, too.")
    folder = Path(own.output).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(f"--output {own.output}: not empty. Nothing is overwritten: give a new folder.")
    make_folder(folder, "--output")
    rows = load_rows(own, reading, folder) if reading.dataset_name else None
    wild_type = rows[2] if rows else read_wild_type(reading.wild_type)
    check_wild_type(wild_type)
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
        write_scores(own, rows, table, folder / "scores.csv")
    log.info("All substitutions of %d residues are scored in %s.", len(table), folder)
    return folder


def load_rows(
    own: ScoreVariantsArguments,
    reading: ReadingArguments,
    folder: Path,
) -> tuple[Any, list[str], str]:
    """Loads variants with all columns, and labels if asked for; returns them, their sequences, and the wild type.

    Raises:
        DataError: as `load_sequences`; no row is as long as the wild type, or a column has a name that is written.
    """
    from ..data import REJECTED_FILE, find_variants, load_sequences

    labels = [own.label_column or "label"]  # not read, where none is asked for
    args = DataArguments(
        **vars(reading), sequence_columns=[own.sequence_column], label_column=labels, task="regression"
    )
    rejected = folder / REJECTED_FILE
    loaded = load_sequences(args, rejected=rejected, keeps_columns=True, needs_labels=bool(own.label_column))
    if loaded.as_read and SCORE in loaded.as_read.column_names:
        raise DataError(f"{reading.dataset_name} has a column {SCORE}, which is written here. Rename yours.")
    wild_type = find_variants(loaded.table, args).get("wild_type")
    if wild_type is None:
        raise DataError(
            f"{reading.dataset_name}: no protein is found that most rows are variants of. Give --wild_type."
        )
    return loaded, loaded.table[own.sequence_column][:], wild_type


def write_scores(
    own: ScoreVariantsArguments,
    rows: tuple[Any, list[str], str],
    table: np.ndarray,
    path: Path,
) -> None:
    """Writes the scores of `load_rows`, and says how many rows have none and how well scores order labels."""
    from ..baselines import score_rows
    from ..data import SOURCE_ROW, label_array
    from ..evaluation import score_predictions
    from ..files import write_csv
    from ..text import LOGGER, score

    loaded, sequences, wild_type = rows
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

    per_line = max(min(PER_LINE, len(wild_type)), len(wild_type) // 100)
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

"""The table of `hf-ext sample`: distinct antibodies, faults named, scored and ranked."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..affinity.prediction_file import find_output
from ..data.antibodies import AntibodyPair
from ..data.near_copies import nearest_identities
from ..data.reading import SOURCE_ROW
from ..errors import ArgumentError
from ..evaluation._arrays import FloatArray
from ..files import replacing, try_replacing, write_cell
from .judging.discriminator import Discriminator, find_doubts
from .judging.numbering import Numberer
from .judging.rows import AntibodyRows
from .judging.validity import find_cdr3, find_problems
from .sampling import SampledPair

ANTIGEN = "antigen"
NUMBERING, PATTERN = "numbering", "pattern"
COLLAPSED_BELOW = 0.5  # distinct by drawn
DIGITS = 4  # of a log-probability; further ones change with the batch
COLUMNS = ("rank", "generated_heavy", "generated_light", "copies", "log_probability", "valid", "problem", "checked_by")
NEAREST = ("nearest_training_heavy", "nearest_training_light", "nearest_training_row", "is_training_copy")
# What is written beside the input's own columns.
ADDED = (SOURCE_ROW, *COLUMNS, "cdr_h3", "asked_affinity", "predicted_affinity", *NEAREST)
_NOT_WRITTEN = ["request", "malformed"]  # columns of the table: place of the antigen; what was wrong with its tokens
_WRITER = "hf-ext sample"


@dataclass(frozen=True)
class Examiners:
    """What antibodies are examined by; None for what was not asked.

    Attributes:
        numberer: numbers domains; without it valid is by patterns of conserved residues.
        training: antibodies that the model was trained on, and `training_rows` their rows in the file.
        discriminator: predicts affinities; they order the table where nothing speaks against them (`find_doubts`).
        needs_light: whether a heavy chain alone is a fault.
    """

    numberer: Numberer | None = None
    training: AntibodyRows | None = None
    training_rows: Sequence[int] | None = None
    discriminator: Discriminator | None = None
    needs_light: bool = True

    @property
    def orders_by_affinity(self) -> bool:
        """Whether predicted affinities may order anything."""
        return self.discriminator is not None and not find_doubts(self.discriminator.record)


def tabulate(
    found: Sequence[Sequence[SampledPair]],
    antigens: Sequence[str],
    examiners: Examiners | None = None,
    asked: float | None = None,
) -> pd.DataFrame:
    """A line per distinct antibody of each antigen, malformed ones too; valid ones first, then the best.

    The best is the likeliest, or that of the highest predicted affinity where these may order.

    Args:
        found: from `sample_pairs`, for `antigens`.
        asked: affinity that was asked for.

    Returns:
        `COLUMNS`, "cdr_h3" and what else was asked for, of `ADDED`, NaN for what is not known; with `request`, the
        antigen's place, and `malformed`. `rank` counts from 1 within each antigen.

    Cost: with numbering see `Numberer`, with training 0.1 s for 12,000 antibodies.
    """
    examiners = examiners or Examiners()
    drawn: dict[tuple[int, AntibodyPair], list[float]] = {}
    for request, samples in enumerate(found):
        for one in samples:
            drawn.setdefault((request, one.pair), []).append(one.log_probability)
    pairs = [pair for _, pair in drawn]
    malformed = ["; ".join(pair.malformed) or None for pair in pairs]
    rows = AntibodyRows.of(pairs, [antigens[request] for request, _ in drawn], malformed)
    table = pd.DataFrame({"request": [request for request, _ in drawn], "malformed": malformed})
    table["generated_heavy"], table["generated_light"] = rows.chain("heavy"), rows.chain("light")
    table["copies"] = [len(known) for known in drawn.values()]
    table["log_probability"] = [round(max(known), DIGITS) for known in drawn.values()]
    problems = find_problems(rows, examiners.numberer, examiners.needs_light)
    table["problem"] = [problem or "" for problem in problems]
    table.insert(6, "valid", np.where(table["problem"] == "", "yes", "no"))
    table["checked_by"] = PATTERN if examiners.numberer is None else NUMBERING
    table["cdr_h3"] = [find_cdr3(chain) or "" for chain in rows.heavy]
    if asked is not None:
        table["asked_affinity"] = asked
    if examiners.discriminator is not None:
        table["predicted_affinity"] = examiners.discriminator.predict(rows)
    if examiners.training is not None:
        table = table.assign(**find_nearest(rows, examiners.training, examiners.training_rows))
    best = [*(["predicted_affinity"] if examiners.orders_by_affinity else []), "log_probability"]
    order = {"request": True, "valid": False, **dict.fromkeys(best, False)}  # whether ascending
    table = table.sort_values([*order], ascending=[*order.values()], ignore_index=True)
    table.insert(2, "rank", table.groupby("request").cumcount() + 1)
    return table


def find_nearest(
    rows: AntibodyRows, training: AntibodyRows, numbers: Sequence[int] | None = None
) -> dict[str, Sequence[Any]]:
    """Columns `NEAREST`: identity to the nearest training chains, the row of the heavy one, whether both are one's.

    NaN where a candidate, or all of training, lacks the chain. `numbers`: rows of `training` in its file, else from 1.
    """
    known = set(training.pairs)
    heavy, place = _nearest(rows.chain("heavy"), training.chain("heavy"))
    light, _ = _nearest(rows.chain("light"), training.chain("light"))
    of_file = [*(range(1, len(training) + 1) if numbers is None else numbers)]
    row = pd.array([None if one < 0 else of_file[one] for one in place], "Int64")
    return dict(zip(NEAREST, (heavy, light, row, ["yes" if pair in known else "no" for pair in rows.pairs])))


def _nearest(mine: Sequence[str], theirs: Sequence[str]) -> tuple[FloatArray, np.ndarray]:
    """Identity to the nearest and its place; NaN and -1 for "", and where there are no others."""
    identity, place = np.full(len(mine), np.nan), np.full(len(mine), -1)
    references = [i for i, one in enumerate(theirs) if one]
    asked = [i for i, one in enumerate(mine) if one]
    if references and asked:
        identity[asked], nearest = nearest_identities([mine[i] for i in asked], [theirs[i] for i in references])
        place[asked] = np.array(references)[nearest]
    return identity, place


def describe(table: pd.DataFrame, antigens: Sequence[str]) -> list[str]:
    """What was drawn, in sentences; likely mistakes begin with WARNING."""
    copies, owner = table["copies"], table["request"].map(lambda request: antigens[request])
    drawn, distinct, num_antigens = copies.sum(), len(table), owner.nunique()
    checked_by = table["checked_by"].iloc[0]
    lines = [
        f"{drawn:,} antibodies for {num_antigens:,} antigens: {distinct:,} distinct, "
        f"{copies[table['valid'] == 'yes'].sum():,} valid by {checked_by}, "
        f"{copies[table['malformed'].notna()].sum():,} malformed; all are in the table."
    ]
    if distinct < COLLAPSED_BELOW * drawn and drawn > num_antigens:
        lines.append(f"WARNING: {100 * distinct / drawn:.3g} % are distinct: the model, or its temperature, collapsed.")
    of_antibody = owner.groupby([table["generated_heavy"], table["generated_light"]])
    if shared := (of_antibody.nunique() > 1).sum():
        lines.append(f"WARNING: {shared:,} antibodies were written for several antigens: it may not read the antigen.")
    if checked_by == PATTERN:
        lines.append("Valid is by patterns of conserved residues. Numbering is stricter: --numbering immunum.")
    if "is_training_copy" not in table:
        lines.append("Copies of training antibodies were not looked for: name the file with --training_data.")
    elif copied := (table["is_training_copy"] == "yes").sum():
        lines.append(f"WARNING: {copied:,} lines of the table are training antibodies to the residue.")
    return lines


def find_outputs(name: str, dataset_name: str | None) -> tuple[Path, Path]:
    """The CSV and, under the same name, the FASTA to write, found fit for that; their folder is made.

    Raises:
        ArgumentError: as `find_output`; or the FASTA's name is the CSV's, or is taken by a file of somebody else.
        DataError, FolderError: as `find_output`.
    """
    start = [SOURCE_ROW, *COLUMNS]
    table = find_output(
        name, dataset_name, lambda header: any(header[i : i + len(start)] == start for i in range(len(header))), _WRITER
    )
    fasta = table.with_suffix(".fasta")
    remedy = "Name another CSV to write with --output; the FASTA beside it has its name."
    if fasta == table:
        raise ArgumentError(f"--output {name!r} ends in .fasta, which is what the FASTA beside it is called. {remedy}")
    try:
        first = fasta.read_text(encoding="utf-8", errors="replace").partition("\n")[0] if fasta.exists() else ""
        try_replacing(fasta)
    except OSError as error:
        raise ArgumentError(f"{fasta} cannot be written: {error.strerror}. {remedy}") from error
    if first and " log_probability=" not in first:
        raise ArgumentError(f"{fasta} is there and was not written by {_WRITER}. {remedy}")
    return table, fasta


def name_antigens(ids: Sequence[str | None] | None, source_rows: Sequence[int]) -> list[str]:
    """A name of one word for each antigen: its id, with its row where ids are missing or repeat."""
    words = ["_".join(str(one or "").split()) for one in ids or [None] * len(source_rows)]
    return [
        word if word and words.count(word) == 1 else f"{word}_row{row}".lstrip("_")
        for word, row in zip(words, source_rows)
    ]


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """One line per row, whole or not at all; "" for None and NaN.

    Text that a spreadsheet would take for a formula has a `'` in front (`write_cell`).
    """
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([write_cell(name) for name in columns])
        writer.writerows(["" if pd.isna(cell) else write_cell(cell) for cell in row] for row in zip(*columns.values()))


def write_table(path: Path, kept: Mapping[str, Sequence[Any]], table: pd.DataFrame) -> None:
    """The columns of each antibody's antigen, then its own.

    Args:
        kept: columns of the input, one cell per antigen, `source_row` the last.
    """
    own = table.drop(columns=_NOT_WRITTEN).astype(object)
    write_csv(path, {**{name: [cells[i] for i in table["request"]] for name, cells in kept.items()}, **own})


def write_fasta(path: Path, names: Sequence[str], table: pd.DataFrame) -> int:
    """Two records per antibody, `NAME_RANK_heavy` and `NAME_RANK_light`, with what is wrong in their titles.

    Chains without a residue have no record; antibodies that have neither are in the CSV alone.

    Args:
        names: of the antigens.

    Returns:
        How many antibodies have no record.
    """
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        for one in table.itertuples():
            title = f"log_probability={one.log_probability:.4f} copies={one.copies} valid={one.valid}"
            title += f' problem="{one.problem}"' if one.problem else ""
            for chain, sequence in (("heavy", one.generated_heavy), ("light", one.generated_light)):
                if sequence:
                    file.write(f">{names[one.request]}_{one.rank}_{chain} {title}\n{sequence}\n")
    return int(((table["generated_heavy"] == "") & (table["generated_light"] == "")).sum())

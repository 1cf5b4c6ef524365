"""The table of `hf-ext sample` and its FASTA: distinct antibodies, faults named, scored and ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..data.antibodies import AntibodyPair
from ..files import replacing, write_cell
from .copies import find_nearest
from .discriminator import Discriminator
from .rows import AntibodyRows
from .sampling import SampledPair
from .validity import find_cdr3, find_problems

COLLAPSED_BELOW = 0.5  # distinct by drawn
DIGITS = 4  # of a log-probability; further ones change with the batch
COLUMNS = ("rank", "generated_heavy", "generated_light", "copies", "log_probability", "valid", "problem", "cdr_h3")
MORE_COLUMNS = ("asked_affinity", "predicted_affinity", "nearest_training_heavy", "is_training_copy")


def tabulate(
    found: Sequence[Sequence[SampledPair]],
    antigens: Sequence[str],
    *,
    needs_light: bool = True,
    asked: float | None = None,
    training: AntibodyRows | None = None,
    discriminator: Discriminator | None = None,
) -> pd.DataFrame:
    """A line per distinct antibody of each antigen, malformed ones too; valid ones first, then the best.

    The best is the likeliest, or that of the highest predicted affinity by a discriminator without a doubt.

    Args:
        found: from `sample_pairs`, for `antigens`.
        needs_light: whether a heavy chain alone is a fault.
        asked: affinity that was asked for.
        training: antibodies that the model was trained on.
        discriminator: predicts affinities.

    Returns:
        `request`, the antigen's place; `COLUMNS`, and those of `MORE_COLUMNS` that were asked for, NaN for what is not
        known. `rank` counts from 1 within each antigen.

    Cost: with training 0.1 s for 12,000 antibodies.
    """
    drawn: dict[tuple[int, AntibodyPair], list[float]] = {}
    for request, samples in enumerate(found):
        for one in samples:
            drawn.setdefault((request, one.pair), []).append(one.log_probability)
    rows = AntibodyRows.of_pairs([pair for _, pair in drawn], [antigens[request] for request, _ in drawn])
    problems = [problem or "" for problem in find_problems(rows, needs_light)]
    table = pd.DataFrame(
        {
            "request": [request for request, _ in drawn],
            "rank": 0,
            "generated_heavy": rows.chain("heavy"),
            "generated_light": rows.chain("light"),
            "copies": [len(known) for known in drawn.values()],
            "log_probability": [round(max(known), DIGITS) for known in drawn.values()],
            "valid": ["no" if problem else "yes" for problem in problems],
            "problem": problems,
            "cdr_h3": [find_cdr3(chain) or "" for chain in rows.heavy],
        }
    )
    if asked is not None:
        table["asked_affinity"] = asked
    if discriminator is not None:
        table["predicted_affinity"] = discriminator.predict(rows)
    if training is not None:
        nearest = find_nearest(rows, training)
        table["nearest_training_heavy"] = nearest["nearest_heavy"]
        table["is_training_copy"] = np.where(nearest["is_copy"], "yes", "no")
    order = {"request": True, "valid": False, "log_probability": False}  # whether ascending
    if discriminator is not None and discriminator.doubt is None:
        order = {"request": True, "valid": False, "predicted_affinity": False, "log_probability": False}
    table = table.sort_values([*order], ascending=[*order.values()], ignore_index=True)
    table["rank"] = table.groupby("request").cumcount() + 1
    return table


def describe_table(table: pd.DataFrame, antigens: Sequence[str]) -> tuple[str, list[str]]:
    """What was drawn, in a sentence; and what should make the reader suspicious."""
    copies, owner = table["copies"], table["request"].map(lambda request: antigens[request])
    drawn, distinct, num_antigens = copies.sum(), len(table), owner.nunique()
    text = (
        f"{drawn:,} antibodies for {num_antigens:,} antigens: {distinct:,} distinct, "
        f"{copies[table['valid'] == 'yes'].sum():,} with the pattern of conserved residues; all are in the table."
    )
    warnings = []
    if distinct < COLLAPSED_BELOW * drawn and drawn > num_antigens:
        warnings.append(f"{100 * distinct / drawn:.3g} % are distinct: the model, or its temperature, collapsed.")
    of_antibody = owner.groupby([table["generated_heavy"], table["generated_light"]])
    if shared := (of_antibody.nunique() > 1).sum():
        warnings.append(f"{shared:,} antibodies were written for several antigens: it may not read the antigen.")
    if "is_training_copy" in table and (copied := (table["is_training_copy"] == "yes").sum()):
        warnings.append(f"{copied:,} lines of the table are training antibodies to the residue.")
    return text, warnings


def write_csv(path: Path, columns: Mapping[str, Any] | pd.DataFrame) -> None:
    """One line per row, whole or not at all; "" for None and NaN.

    Text that a spreadsheet would take for a formula has a `'` in front (`write_cell`).
    """
    table = pd.DataFrame(columns).astype(object).map(write_cell).rename(columns=write_cell)
    with replacing(path) as draft:
        table.to_csv(draft, index=False)


def write_fasta(path: Path, names: Sequence[str], table: pd.DataFrame) -> None:
    """Two records per antibody, `NAME_RANK_heavy` and `NAME_RANK_light`, with what is wrong in their titles.

    Chains without a residue have no record.

    Args:
        names: of the antigens.
    """
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        for one in table.itertuples():
            title = f"log_probability={one.log_probability:.4f} copies={one.copies} valid={one.valid}"
            title += f' problem="{one.problem}"' if one.problem else ""
            for chain, residues in (("heavy", one.generated_heavy), ("light", one.generated_light)):
                if residues:
                    file.write(f">{names[one.request]}_{one.rank}_{chain} {title}\n{residues}\n")

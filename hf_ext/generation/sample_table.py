"""What `hf-ext sample` writes: a table of distinct antibodies, ranked, the FASTA beside it, and what is odd of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..data import AntibodyPair
from ..files import replacing
from .judging.copies import find_nearest
from .judging.discriminator import Discriminator
from .rows import AntibodyRows, find_cdr3, find_problems
from .sampling import SampledPair

DIGITS = 4  # of a log-probability; further ones change with the batch
COLLAPSED_BELOW = 0.5  # distinct by drawn
# Of each line; others follow if they were asked for.
COLUMNS = (
    *("id", "antigen", "source_row"),
    *("rank", "heavy", "light", "copies", "log_probability", "valid", "problem", "cdr_h3"),
)


def tabulate(
    found: Sequence[Sequence[SampledPair]],
    inputs: pd.DataFrame,
    needs_light: bool,
    asked: float | None,
    training: AntibodyRows | None,
    discriminator: Discriminator | None,
) -> pd.DataFrame:
    """Makes a line per distinct antibody of each antigen, malformed ones too; valid ones first, then the best.

    The best is the likeliest, or that of the highest predicted affinity by a discriminator without a doubt.

    Args:
        found: from `sample_pairs`.
        inputs: `id`, `antigen` and `source_row` of each antigen.
        needs_light: whether a heavy chain alone is a fault.
        asked: affinity that was asked for.
        training: antibodies that the model was trained on.
        discriminator: predicts affinities.

    Returns:
        `request`, the antigen's place; `COLUMNS`; `asked_affinity`, `predicted_affinity`, `nearest_heavy` and `is_copy`
        where these were asked for, NaN for what is not known. `rank` counts from 1 within each antigen.

    Cost: with training 0.1 s for 12,000 antibodies.
    """
    drawn: dict[tuple[int, AntibodyPair], list[float]] = {}
    for request, samples in enumerate(found):
        for one in samples:
            drawn.setdefault((request, one.pair), []).append(one.log_probability)
    table = inputs.iloc[[request for request, _ in drawn]].rename_axis("request").reset_index()
    rows = AntibodyRows.of_pairs([pair for _, pair in drawn], table["antigen"].tolist())
    problems = [problem or "" for problem in find_problems(rows, needs_light)]
    table["rank"] = 0
    table["heavy"] = rows.chain("heavy")
    table["light"] = rows.chain("light")
    table["copies"] = [len(known) for known in drawn.values()]
    table["log_probability"] = [round(max(known), DIGITS) for known in drawn.values()]
    table["valid"] = ["no" if problem else "yes" for problem in problems]
    table["problem"] = problems
    table["cdr_h3"] = [find_cdr3(chain) or "" for chain in rows.heavy]
    if asked is not None:
        table["asked_affinity"] = asked
    if discriminator is not None:
        table["predicted_affinity"] = discriminator.predict(rows)
    if training is not None:
        nearest = find_nearest(rows, training)
        table["nearest_heavy"] = nearest["nearest_heavy"]
        table["is_copy"] = np.where(nearest["is_copy"], "yes", "no")
    order = {"request": True, "valid": False, "log_probability": False}  # whether ascending
    if discriminator is not None and discriminator.doubt is None:
        order = {"request": True, "valid": False, "predicted_affinity": False, "log_probability": False}
    table = table.sort_values([*order], ascending=[*order.values()], ignore_index=True)
    table["rank"] = table.groupby("request").cumcount() + 1
    return table


def describe_table(table: pd.DataFrame) -> tuple[str, list[str]]:
    """Describes what was drawn, in a sentence; and what should make the reader suspicious."""
    copies = table["copies"]
    owner = table["antigen"]
    drawn = copies.sum()
    distinct = len(table)
    num_antigens = owner.nunique()
    text = (
        f"{drawn:,} antibodies for {num_antigens:,} antigens: {distinct:,} distinct, "
        f"{copies[table['valid'] == 'yes'].sum():,} with the pattern of conserved residues; all are in the table."
    )
    warnings = []
    if distinct < COLLAPSED_BELOW * drawn and drawn > num_antigens:
        warnings.append(f"{100 * distinct / drawn:.3g} % are distinct: the model, or its temperature, collapsed.")
    of_antibody = owner.groupby([table["heavy"], table["light"]])
    if shared := (of_antibody.nunique() > 1).sum():
        warnings.append(f"{shared:,} antibodies were written for several antigens: it may not read the antigen.")
    if "is_copy" in table and (copied := (table["is_copy"] == "yes").sum()):
        warnings.append(f"{copied:,} lines of the table are training antibodies to the residue.")
    return text, warnings


def write_fasta(path: Path, names: Sequence[str], table: pd.DataFrame) -> None:
    """Writes two records per antibody, `NAME_RANK_heavy` and `NAME_RANK_light`, with what is wrong in their titles.

    Chains without a residue have no record.

    Args:
        names: of the antigens.
    """
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        for one in table.itertuples():
            title = f"log_probability={one.log_probability:.4f} copies={one.copies} valid={one.valid}"
            title += f' problem="{one.problem}"' if one.problem else ""
            for chain, residues in (("heavy", one.heavy), ("light", one.light)):
                if residues:
                    file.write(f">{names[one.request]}_{one.rank}_{chain} {title}\n{residues}\n")


def name_antigens(ids: Sequence[Any], numbers: Sequence[int]) -> list[str]:
    """Names each antigen in a FASTA by one word: its id, with its row where ids are missing or repeat."""
    words = ["_".join(str(one or "").split()) for one in ids]
    return [
        word if word and words.count(word) == 1 else f"{word}_row{number}".lstrip("_")
        for word, number in zip(words, numbers)
    ]

"""One rule set for residues: what is accepted, what is changed (and counted), what is refused (with a remedy)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .arguments import DataArguments
from .columns import distinct
from .row_errors import RowError, find_rows, is_missing, shorten

STANDARD = "ACDEFGHIKLMNPQRSTVWY"
UNKNOWN = "X"
RARE = "UZOBJ"  # accepted here; the tokenizer maps them to X for models whose vocabulary lacks them
STOP = "*"
# ESM-2's tokens, in the order of their ids.
ESM_VOCABULARY = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
LEAVE_OUT = "Fill it in, or leave the row out."
NAME_COLUMN = "Fill it in, leave the row out, or name the column in --missing_chains if rows may lack this chain."
NOT_LEARNED = f"{LEAVE_OUT} Only models trained with --missing_chains, on rows that lack this chain, do without it."

# A, C, G, T and N are 26 % of the residues in Swiss-Prot, so 24 of them in a row are one protein in 10^14 by chance;
# repeats of few letters (poly-A, silk's GA) lack one of A, C, G and T. Shorter genes would be of seven residues.
MIN_NUCLEOTIDES = 24
_SEPARATORS = re.compile(r"[\s.,;:_-]+")
_PLAIN = f"^[{STANDARD}{UNKNOWN}{RARE}]{{6,}}$"  # longer than every marker
_NUCLEOTIDES = f"^[ACGTUN]{{{MIN_NUCLEOTIDES},}}$"
_NOT_RESIDUE = re.compile(f"[^{STANDARD}{UNKNOWN}{RARE}]", re.IGNORECASE | re.ASCII).search

# What is no residue -> what it is called, and the remedy.
_CHARACTERS = (
    (STOP, "stop codon LETTER inside the sequence,", "Cut the sequence there; one at its end is taken off."),
    ("-.", "gap LETTER", "Take gaps out: sequences are read unaligned."),
    (string.digits, "digit LETTER", "Remove numbering from the sequence."),
    (string.whitespace, "white space inside the sequence,", "Join the parts; put each chain in a column of its own."),
)


class Judged(NamedTuple):
    """A cell as the `sequence` it is read as and the `changes` made for it; or the `rule` that refuses it."""

    sequence: str = ""
    rule: str = ""
    remedy: str = ""
    changes: tuple[str, ...] = ()


def clean_chains(
    columns: Mapping[str, pa.ChunkedArray | Sequence[Any]],
    args: DataArguments,
    rows: np.ndarray,
    if_missing: str = LEAVE_OUT,
) -> tuple[dict[str, pa.ChunkedArray], list[RowError], dict[str, dict[str, int]]]:
    """Applies the residue rules to sequence columns; every change is counted and every refusal names its row.

    Accepted: the 20 standard residues, X and the rare U Z O B J. Changed and counted, in rows: surrounding white space
    ("whitespace_stripped"), lower case ("upper_cased"), a stop codon `*` at the end ("stop_codon_trimmed"). Counted
    only: "longer_than_max_residues" where `args` leave long sequences to the tokenizer. Refused: missing cells,
    missing-value markers, non-text, DNA, RNA, any other character, too long; and rows without any sequence.

    Args:
        columns: name -> n cells, one per row; None and NaN are missing.
        args: what they say of `max_residues` and `too_long`; and `missing_chains`, columns whose missing cells
            (`is_missing`) are "" and counted ("missing"), not refused.
        rows: (n,) the number of each row in its file.
        if_missing: the remedy told for an empty cell of the others.

    Returns:
        The columns as text; an error for each refused cell; and column -> kind of change -> rows.

    Cost: each distinct cell is judged once; 0.1 s for 100,000 distinct ones of 120 residues.
    """
    cleaned: dict[str, pa.ChunkedArray] = {}
    errors: list[RowError] = []
    changes: dict[str, dict[str, int]] = {}
    for name, values in columns.items():
        found = distinct(values)
        cells, judged = _judge_column(found.cells, args, name in args.missing_chains, if_missing)
        refused = {one: (verdict.rule, verdict.remedy) for one, verdict in judged.items() if verdict.rule}
        errors += find_rows(refused, found, name, rows)
        num_rows = np.bincount(found.number, minlength=len(cells))
        counts: Counter[str] = Counter()
        for one, verdict in judged.items():
            counts.update(dict.fromkeys(verdict.changes, int(num_rows[one])))
        changes |= {name: dict(counts)} if counts else {}
        cleaned[name] = found.spread(cells, pa.string())
    if args.missing_chains:
        lengths = [pc.binary_length(column).to_numpy() for column in cleaned.values()]
        named, first = {error.row for error in errors}, next(iter(cleaned))
        rule, remedy = f"{' and '.join(cleaned)} are all missing", "Fill in one of them, or leave the row out."
        bare = [int(rows[i]) for i in np.flatnonzero(~np.any(lengths, axis=0))]
        errors += [RowError(row, first, "", rule, remedy) for row in bare if row not in named]
    return cleaned, errors, changes


def remedy_if_missing(columns: Sequence[str], needs_labels: bool, needs_splits: bool) -> str:
    """What to do about an empty cell in one of these sequence columns.

    A masked language model (splits without labels) does without no chain; a model that is trained already (no splits)
    has learned to do so, or has not.
    """
    if len(columns) < 2 or (needs_splits and not needs_labels):
        return LEAVE_OUT
    return NAME_COLUMN if needs_splits else NOT_LEARNED


def _judge_column(
    cells: pa.Array, args: DataArguments, may_be_missing: bool, if_missing: str
) -> tuple[pa.Array, dict[int, Judged]]:
    """Distinct cells as sequences, and what was found of those that are not plain residues."""
    is_plain = _are_plain(cells, args.max_residues)
    judged = {}
    for one in np.flatnonzero(~is_plain).tolist():
        cell = cells[one].as_py()
        is_allowed = may_be_missing and is_missing(cell)
        judged[one] = Judged(changes=("missing",)) if is_allowed else judge_sequence(cell, args, if_missing)
    sequences = pa.array([verdict.sequence for verdict in judged.values()], pa.large_string())
    if not is_plain.any():
        return sequences, judged
    return pc.replace_with_mask(cells, pa.array(~is_plain), sequences), judged


def _are_plain(cells: pa.Array, max_residues: int | None) -> np.ndarray:
    """(n,) whether a cell is residues and nothing else can be wrong with it: nearly all are, so no Python looks."""
    if not pa.types.is_large_string(cells.type):
        return np.zeros(len(cells), bool)
    is_plain = pc.and_not(pc.match_substring_regex(cells, _PLAIN), pc.match_substring_regex(cells, _NUCLEOTIDES))
    if max_residues is not None:
        is_plain = pc.and_(is_plain, pc.less_equal(pc.binary_length(cells), max_residues))
    return is_plain.fill_null(False).to_numpy(zero_copy_only=False)


def judge_sequence(cell: object, args: DataArguments, if_missing: str = LEAVE_OUT) -> Judged:
    """A single cell by the rules of `clean_chains`."""
    if not isinstance(cell, str):
        if is_missing(cell):
            return Judged(rule="the sequence is missing", remedy=if_missing)
        return Judged(rule=f"a sequence must be text, not {type(cell).__name__}", remedy="Store the column as text.")
    text = cell.strip()
    if not text:
        return Judged(rule="the sequence is empty", remedy=if_missing)
    if is_missing(text):
        return Judged(rule=f"{shorten(text)!r} reads as a missing value", remedy=if_missing)
    if rule := _find_nucleotides(text.upper()):
        return Judged(rule=rule, remedy="Translate it into amino acids first.")
    sequence = text.removesuffix(STOP)
    if wrong := _NOT_RESIDUE(sequence):
        rule, remedy = _explain(wrong.group(), wrong.start() + 1, len(text))
        return Judged(rule=rule, remedy=remedy)
    residues = sequence.upper()
    changes = ["whitespace_stripped"] * (text != cell) + ["upper_cased"] * (residues != sequence)
    changes += ["stop_codon_trimmed"] * (sequence != text)
    if not residues:
        return Judged(rule="the sequence is a stop codon alone", remedy=if_missing)
    if args.max_residues is not None and len(residues) > args.max_residues:
        if args.too_long == "error":
            rule = f"{len(residues)} residues are more than max_residues={args.max_residues}"
            return Judged(rule=rule, remedy="Raise --max_residues, leave the row out, or choose --too_long truncate.")
        changes.append("longer_than_max_residues")
    return Judged(residues, changes=tuple(changes))


def _find_nucleotides(text: str) -> str:
    """The rule that refuses DNA and RNA, each of whose four letters is there; "" for what may be a protein."""
    letters = _SEPARATORS.sub("", text)
    found = set(letters)
    if len(letters) < MIN_NUCLEOTIDES or not {"A", "C", "G"} <= found <= set("ACGTUN"):
        return ""
    if len(found & {"T", "U"}) != 1:
        return ""
    kind, alphabet = ("DNA", "ACGTN") if "T" in found else ("RNA", "ACGUN")
    return f"the sequence reads as {kind}, its {len(letters)} letters are all of {alphabet}"


def _explain(letter: str, position: int, length: int) -> tuple[str, str]:
    """Rule and remedy for a character that is no residue."""
    where = f"at position {position} of {length}"
    for letters, name, remedy in _CHARACTERS:
        if letter in letters:
            return f"{name} {where}".replace("LETTER", repr(letter)), remedy
    return (
        f"{letter!a} {where} is not a residue",
        f"Use {STANDARD}, {UNKNOWN} or {' '.join(RARE)}; one chain per column.",
    )

"""One rule set for residues: what is accepted, what is changed (and counted), what is refused (with a remedy)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..files import Json
from ..labels import NUMBER, Checked, RowError, check_cells, is_missing
from .arguments import DataArguments

STANDARD = "ACDEFGHIKLMNPQRSTVWY"
UNKNOWN_RESIDUE = "X"
RARE = "UZOBJ"  # accepted here; the tokenizer maps them to X for models whose vocabulary lacks them
STOP = "*"
# ESM-2's tokens, in the order of their ids.
ESM_VOCABULARY = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
ESM2: Json = {  # of EsmConfig, what ESM-2 has in all sizes
    "vocab_size": len(ESM_VOCABULARY),
    "pad_token_id": ESM_VOCABULARY.index("<pad>"),
    "mask_token_id": ESM_VOCABULARY.index("<mask>"),
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "emb_layer_norm_before": False,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LEAVE_OUT = "Fill it in, or leave the row out."
NAME_COLUMN = f"{LEAVE_OUT} If rows may lack this chain, name the column in --missing_chains of training."

# A, C, G, T and N are 26 % of the residues in Swiss-Prot, so 24 of them in a row are one protein in 10^14 by chance;
# repeats of few letters (poly-A, silk's GA) lack one of A, C, G and T. Shorter genes would be of seven residues.
MIN_NUCLEOTIDES = 24
_SEPARATORS = re.compile(r"[\s.,;:_-]+")
_MAY_BE_NUCLEOTIDES = re.compile(r"[ACGTUN\s.,;:_-]+").fullmatch
_IS_PLAIN = re.compile(f"[{STANDARD}{UNKNOWN_RESIDUE}{RARE}]{{6,}}").fullmatch  # longer than every marker
_NOT_RESIDUE = re.compile(f"[^{STANDARD}{UNKNOWN_RESIDUE}{RARE}]", re.IGNORECASE | re.ASCII).search

# SaProt's: a residue, then the 3Di state of its place, # where one of them is not known.
_ALTERNATES = re.compile("(?:[A-Z#][a-z#]){3,}").fullmatch
ALTERNATING = "capitals and small letters alternate, as residues and 3Di states do for SaProt"
KEEP_CAPITALS = "Keep the capitals alone, for an encoder such as ESM-2; if all are residues, write all as capitals."

# What is no sequence, but names one.
_NAMES = (
    (r"(p\.)?([A-Z][a-z]{0,2}\d+([A-Z*=][a-z]{0,2}|del)[\s:;,/_+-]*)+", "mutations"),
    (r"(?i).+\.(pdb|pdbqt|cif|mmcif|ent|fasta|fa|a3m)(\.gz)?", "the name of a file"),
    (NUMBER, "a number"),
    (r"[A-Z]\d[A-Z\d]{3}\d([A-Z\d]{3}\d)?(-\d+)?|\d[A-Za-z\d]{3}([_:.][A-Za-z\d]+)?", "an entry of UniProt or the PDB"),
)
WRITE_OUT = "Write the whole sequence, or name its column in --sequence_columns of training."

# What is no residue -> what it is called, and the remedy.
_CHARACTERS = (
    (STOP, "stop codon LETTER inside the sequence,", "Cut the sequence there; one at its end is taken off."),
    ("-.", "gap LETTER", "Take gaps out: sequences are read unaligned."),
    (string.digits, "digit LETTER", "Remove numbering from the sequence."),
    (string.whitespace, "white space inside the sequence,", "Join the parts; put each chain in a column of its own."),
)

Changes = dict[str, dict[str, int]]  # column -> kind of change -> rows


def clean_chains(
    columns: Mapping[str, pa.ChunkedArray | Sequence[Any]],
    args: DataArguments,
    rows: np.ndarray,
) -> tuple[dict[str, pa.ChunkedArray], list[RowError], Changes]:
    """Applies the residue rules to sequence columns; every change is counted and every refusal names its row.

    Accepted: the 20 standard residues, X and the rare U Z O B J. Changed and counted, in rows: surrounding white space
    ("whitespace_stripped"), lower case ("upper_cased"), a stop codon `*` at the end ("stop_codon_trimmed"). Refused:
    missing cells, missing-value markers, non-text, DNA, RNA, residues with 3Di states between them, any other
    character, too long (where `args` do not leave that to the tokenizer); and rows without any sequence.

    Args:
        columns: name -> n cells, one per row; None and NaN are missing.
        args: what they say of `max_residues` and `too_long`; and `missing_chains`, columns whose missing cells
            (`is_missing`) are "" and counted ("missing"), not refused.
        rows: (n,) the number of each row in its file.

    Returns:
        The columns as text; an error for each refused cell; and column -> kind of change -> rows.

    Cost: each distinct cell is checked once; 0.1 s for 100,000 distinct ones of 120 residues.
    """
    cleaned = {}
    errors = []
    changes = {}
    if_missing = NAME_COLUMN if len(columns) > 1 else LEAVE_OUT
    for name, values in columns.items():
        may_be_missing = name in args.missing_chains
        check = partial(check_sequence, args=args, if_missing=if_missing, may_be_missing=may_be_missing)
        column = check_cells(values, check, name, rows)
        errors += column.errors
        counts: Counter[str] = Counter()
        times = np.bincount(column.found.number, minlength=len(column.checked))
        for one, num in zip(column.checked, times.tolist()):
            counts.update(dict.fromkeys(one.changes, num))
        if counts:
            changes[name] = dict(counts)
        if counts or column.errors or getattr(values, "type", None) != pa.string():
            values = column.to_rows(pa.string())
        cleaned[name] = values  # as they were read where nothing changed: text is most of what memory holds
    if args.missing_chains:
        lengths = [pc.binary_length(column).to_numpy() for column in cleaned.values()]
        named = {error.row for error in errors}
        first = next(iter(cleaned))
        rule = f"{' and '.join(cleaned)} are all missing"
        remedy = "Fill in one of them, or leave the row out."
        for row in rows[~np.any(lengths, axis=0)].tolist():
            if row not in named:
                errors.append(RowError(row, first, "", rule, remedy))
    return cleaned, errors, changes


def check_sequence(
    cell: object, args: DataArguments, if_missing: str = LEAVE_OUT, may_be_missing: bool = False
) -> Checked:
    """Checks a single cell by the rules of `clean_chains`; "" where it is refused."""
    if is_missing(cell):
        if may_be_missing:
            return Checked("", changes=("missing",))
        return Checked("", "the sequence is missing", if_missing)
    if not isinstance(cell, str):
        return Checked("", f"a sequence must be text, not {type(cell).__name__}", "Store the column as text.")
    text = cell.strip()
    if rule := _find_nucleotides(text.upper()):
        return Checked("", rule, "Translate it into amino acids first.")
    sequence = text
    changes = []
    if text != cell:
        changes.append("whitespace_stripped")
    if not _IS_PLAIN(text):
        sequence = text.removesuffix(STOP)
        if _ALTERNATES(sequence):
            return Checked("", ALTERNATING, KEEP_CAPITALS)
        if wrong := _NOT_RESIDUE(sequence):
            if name := next((what for form, what in _NAMES if re.fullmatch(form, text)), None):
                return Checked("", f"reads as {name}, not as a sequence", WRITE_OUT)
            return Checked("", *_explain(wrong.group(), wrong.start() + 1, len(text)))
        if not sequence:
            return Checked("", "the sequence is a stop codon alone", if_missing)
        if sequence != sequence.upper():
            changes.append("upper_cased")
        if sequence != text:
            changes.append("stop_codon_trimmed")
    if args.max_residues is not None and args.too_long == "error" and len(sequence) > args.max_residues:
        rule = f"{len(sequence)} residues are more than max_residues={args.max_residues}"
        return Checked("", rule, "Raise --max_residues, leave the row out, or choose --too_long truncate.")
    return Checked(sequence.upper(), changes=tuple(changes))


def _find_nucleotides(text: str) -> str:
    """Returns the rule that refuses DNA and RNA, each of whose four letters is there; "" for what may be a protein."""
    if not _MAY_BE_NUCLEOTIDES(text):
        return ""
    letters = _SEPARATORS.sub("", text)
    found = set(letters)
    has_all = {"A", "C", "G"} <= found and len(found & {"T", "U"}) == 1
    if len(letters) < MIN_NUCLEOTIDES or not has_all:
        return ""
    kind, alphabet = ("DNA", "ACGTN") if "T" in found else ("RNA", "ACGUN")
    return f"the sequence reads as {kind}, its {len(letters)} letters are all of {alphabet}"


def _explain(letter: str, position: int, length: int) -> tuple[str, str]:
    """Returns rule and remedy for a character that is no residue."""
    where = f"at position {position} of {length}"
    for letters, name, remedy in _CHARACTERS:
        if letter in letters:
            return f"{name} {where}".replace("LETTER", repr(letter)), remedy
    return (
        f"{letter!a} {where} is not a residue",
        f"Use {STANDARD}, {UNKNOWN_RESIDUE} or {' '.join(RARE)}; one chain per column.",
    )

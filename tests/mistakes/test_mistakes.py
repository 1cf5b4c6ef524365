"""Mistakes that users make: each is named, and its innocent twin passes."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from mistakes import BASE, NUM_ROWS, Case, Mistake, check_mistake, check_twin, make_sequence, parametrized, spread

from hf_ext.data import DataArguments, load_data
from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation.alarms import unit_alarms
from hf_ext.pretrained import check_folder
from hf_ext.property import TASK

pytestmark = pytest.mark.internals
PKD = BASE["pKd"]

ROWS = [f"{sequence},{label}" for sequence, label in zip(*BASE.values())]
CHAINS = {"heavy": BASE["sequence"], "light": BASE["sequence"][::-1]}


def content(*lines: str, separator: str = ",", words: str = "") -> Case:
    return Case(text="\n".join(lines).replace(",", separator) + "\n", words=words)


def other_name(folder: Path) -> Path:
    (folder / "pairs.csv").write_text("sequence,pKd\n")
    return folder / "pair.csv"


def fasta(body, header: str = "pKd={label}", words: str = "") -> Case:
    """60 records, of which `body` gives the lines below the header, by the record's number."""

    def make(folder: Path) -> Path:
        records = [f">P{number} {header.format(label=label)}\n{body(number)}\n" for number, label in enumerate(PKD)]
        (folder / "a.fasta").write_text("".join(records))
        return folder / "a.fasta"

    return Case(make=make, words=words)


def wrapped(text: str, width: int) -> str:
    return "\n".join(text[start : start + width] for start in range(0, len(text), width))


def signals(number: int, length: int, letters: str = "SLTM") -> str:
    return "".join(random.Random(number).choices(letters, k=length))


def varied(number: int) -> str:
    return make_sequence(number, 20 + number)


def in_header(folder: Path) -> Path:
    records = [f">P{number} TARGET={signals(number, 20 + number)}\n{varied(number)}\n" for number in range(NUM_ROWS)]
    (folder / "a.fasta").write_text("".join(records))
    return folder / "a.fasta"


BELOW = "{folder}/a.fasta, row 1: below the sequence stand as many letters again"

FASTA = [
    Mistake(
        "annotations below sequences",
        fasta(lambda number: f"{varied(number)}\n{signals(number, 20 + number)}"),
        (f"{BELOW} (", "in most records. These are annotations", ">P1 TARGET=HHHEEC"),
        Case(make=in_header, words="--label_column TARGET"),
    ),
    Mistake(
        "annotations below sequences of one length",
        fasta(lambda number: f"{make_sequence(number, 60)}\n{signals(number, 60)}"),
        (BELOW,),
        fasta(lambda number: wrapped(make_sequence(number, 120), 60)),
    ),
    Mistake(
        "annotations that are wrapped as their sequences",
        fasta(lambda number: f"{wrapped(make_sequence(number, 99), 60)}\n{wrapped(signals(number, 99), 60)}"),
        (BELOW,),
        fasta(lambda number: wrapped(make_sequence(number, 70 + 35 * (number % 4)), 70)),
    ),
    Mistake(
        "two lines of annotations",
        fasta(lambda number: f"{varied(number)}\n{signals(number, 20 + number)}\n{'01' * 10}{'1' * number}"),
        (BELOW,),
        fasta(lambda number: wrapped(make_sequence(number, 240), 80)),
    ),
    Mistake(
        "DNA that is wrapped",
        fasta(lambda number: wrapped(signals(number, 120, "ACGT"), 60)),
        ("{folder}/a.fasta, row 1, column 'sequence'", "reads as DNA", "Translate"),
    ),
    Mistake(
        "3Di states below sequences of one length",
        fasta(lambda number: f"{make_sequence(number, 33)}\n{make_sequence(number + 100, 33)}"),
        (BELOW,),
        fasta(lambda number: make_sequence(number, 33)),
    ),
    Mistake(
        "a label that is no KEY=value of a header",
        fasta(varied, "{label}"),
        ("{folder}/a.fasta: there is no column 'pKd'. Columns: id, sequence.", "KEY=value in its headers"),
        fasta(varied),
    ),
]

FILES = [
    Mistake("a mistyped file", Case(make=other_name), ("{folder}/pair.csv: file not found", "pairs.csv")),
    Mistake("a folder without train", Case(make=lambda folder: folder), ("{folder}: no train file",)),
    Mistake(
        "a web page",
        content("<html><body>Please log in</body></html>"),
        ("{file}", "Columns: <html><body>Please log in"),
    ),
    Mistake("a header alone", content("sequence,pKd"), ("{file}: the file has only a header",)),
    Mistake("an empty file", Case(text=""), ("{file}: the file is empty",)),
    Mistake("semicolons", content("sequence,pKd", *ROWS, separator=";"), ("{file}, row 1", "semicolon-separated")),
    Mistake(
        "a column in other case",
        Case(columns={"kd": BASE["pKd"]}, words="--label_column pkd"),
        ("{file}: there is no column 'pkd' (did you mean 'pKd'?). Columns:",),
        Case(columns={"kd": BASE["pKd"]}, words="--label_column kd"),
    ),
    *(
        Mistake(
            f"columns with '{sign}' in between",
            Case(columns=CHAINS, words=f"--sequence_columns heavy{sign}light"),
            (f"there is no column 'heavy{sign}light'", "(write several with a blank between: heavy light). Columns:"),
            Case(columns=CHAINS, words="--sequence_columns heavy light"),
        )
        for sign in (",", "+")
    ),
    Mistake(
        "a column with a blank for an underscore",
        Case(columns={"p_kd_mean": BASE["pKd"], "pKd_mea": BASE["pKd"]}, words="--label_column pKd-mean"),
        ("did you mean 'p_kd_mean'?",),
    ),
    Mistake(
        "several columns that are not there",
        Case(columns={"Antibody": BASE["sequence"]}, words="--label_column pkd --group_column antibody --id_column nr"),
        ("there are no columns", "'pkd' (did you mean 'pKd'?)", "'antibody' (did you mean 'Antibody'?)", "'nr'"),
    ),
    Mistake(
        "a column twice", content("sequence,pKd,pKd", *(f"{row},1" for row in ROWS)), ("'pKd' occurs more than once",)
    ),
    Mistake(
        "ragged rows",
        content("sequence,pKd", ROWS[0], f"{ROWS[1]},x", *ROWS[2:6], "MKTVL", *ROWS[6:]),
        ("{file}: the header has 2 fields, but row 3 has 3, row 8 has 1.",),
        content("sequence,pKd", *ROWS, ""),
    ),
    Mistake(
        "two files joined",
        content("sequence,pKd", *ROWS, "sequence,pKd", *ROWS),
        ("{file}, row 62, column 'pKd', value 'pKd': the label is not a number",),
        content("sequence,pKd", *ROWS),
    ),
]


DNA = "ATGGCATTCGGATCCAAGTGGCTA" * 3
LONG = make_sequence(1, 1100)


def cell(value: str, words: str = "") -> Case:
    return Case({(5, "sequence"): value}, words=words)


TWO_CHAINS = "--sequence_columns sequence light"
LIGHT = [make_sequence(500 + number) for number in range(NUM_ROWS)]
HALF = [light if number % 2 else "" for number, light in enumerate(LIGHT)]


def light_chains(cells: list[str], words: str = "") -> Case:
    return Case(columns={"light": cells}, words=f"{TWO_CHAINS} {words}")


def said(*words: str) -> tuple[str, ...]:
    return ("{file}, row 5, column 'sequence'", *words)


# What SaProt reads: each residue has the 3Di state of its place behind it.
STRUCTURE_AWARE = "MdEvVpLqKlAaGvSd"
ALTERNATE = said("capitals and small letters alternate", "3Di states", "Keep the capitals alone")

SEQUENCES = [
    Mistake("structure-aware sequences", cell(STRUCTURE_AWARE), ALTERNATE, cell("MKTayiakqrLVnpGH")),
    Mistake("structure-aware sequences with masks", cell("M#Ev#pLq#d"), ALTERNATE),
    *(
        Mistake(f"{value} for a sequence", cell(value), said(f"reads as {what}, not as a sequence", "whole sequence"))
        for value, what in (
            ("A23G", "mutations"),
            ("A23G:T50L", "mutations"),
            ("p.Ala23Gly", "mutations"),
            ("1a2b.pdb", "the name of a file"),
            ("model.cif.gz", "the name of a file"),
            ("P12345", "an entry of UniProt or the PDB"),
            ("1abc_A", "an entry of UniProt or the PDB"),
            ("7.3", "a number"),
        )
    ),
    Mistake("numbering", cell("1 MKTVL"), said("digit '1' at position 1 of 7", "Remove numbering")),
    Mistake("DNA", cell(DNA), said("reads as DNA", "72 letters", "Translate"), cell("GATTACA" * 3)),
    Mistake("empty", cell(""), said("the sequence is missing", "leave the row out")),
    Mistake(
        "a chain missing",
        light_chains(HALF),
        ("{file}, row 2, column 'light'", "name the column in --missing_chains"),
        light_chains(HALF, "--missing_chains light"),
    ),
    Mistake(
        "a chain missing everywhere",
        light_chains([""] * NUM_ROWS, "--missing_chains light"),
        ("column 'light': 48 of 48 train rows, 6 of 6 validation rows, 6 of 6 test rows lack it", "--sequence_columns"),
        light_chains(LIGHT),
    ),
    Mistake(
        "a chain said to be missing that is not",
        light_chains(LIGHT, "--missing_chains light"),
        ("--missing_chains light: no row lacks it", "will refuse rows that lack it"),
        light_chains(HALF, "--missing_chains light"),
        kind="warning",
    ),
    Mistake("two chains in one cell", cell("MKTVL:ACDEF"), said("':' at position 6", "one chain per column")),
    Mistake(
        "white space inside", cell("MKTVL ACDEF"), said("white space inside", "column of its own"), cell(" MKTVL ")
    ),
    Mistake("a stop codon", cell("MK*TVL"), said("stop codon '*' inside the sequence"), cell("MKTVL*")),
    Mistake("a gap", cell("MK-TVL"), said("gap '-' at position 3 of 6", "Take gaps out")),
    Mistake(
        "too long for the limit",
        cell(LONG, "--max_residues 1000 --too_long error"),
        said("1100 residues are more than max_residues=1000", "--too_long truncate"),
        cell(LONG[:1000], "--max_residues 1000 --too_long error"),
    ),
    Mistake(
        "too long for the encoder",
        Case(
            {(5, "sequence"): LONG, (9, "sequence"): LONG + "A"}, words="--split_sizes 0.98 0.01 0.01 --too_long error"
        ),
        (
            "Input 'sequence' has 1101 residues; its encoder takes 1022",
            "{file}: 2 rows are too long: row 5 of train (1,100 residues), row 9 of train (1,101 residues)",
            "--too_long truncate",
            "--max_residues N --bad_rows drop",
        ),
        cell(LONG[:1022], "--too_long error"),
    ),
    Mistake(
        "too long for the encoder, and to be cut",
        # 58 rows of 20 residues, and these
        Case({(5, "sequence"): LONG, (9, "sequence"): LONG}, words="--too_long truncate"),
        (
            "sequence: longer than the 1,022 residues that its encoder takes: 1 of 59 sequences (2 of 60 rows)",
            "156 residues, 4.64% of all, are not read",
            "--too_long error",
        ),
        cell(LONG[:1022]),
        kind="warning",
    ),
]


def labels(values, words: str = "", **columns) -> Case:
    return Case(columns={"pKd": list(values), **columns}, words=words)


def label(value: object, words: str = "") -> Case:
    return Case({(5, "pKd"): value}, words=words)


def of_label(*words: str) -> tuple[str, ...]:
    return ("{file}, row 5, column 'pKd'", *words)


MOLAR = [f"{10**-value:.3g}" for value in PKD]
NANOMOLAR = [f"{10 ** (9 - value):.4g}" for value in PKD]
BOUNDED = [f"<={value}" if value < 6 else str(value) for value in PKD]
MARKS = ["<" if value < 6 else "" for value in PKD]
# Rows 2 and 3, 4 and 5, ... are one sequence each, measured twice.
TWICE = [make_sequence(number // 2) for number in range(NUM_ROWS)]
LEVELS = [5 + 0.2 * (number // 2) for number in range(NUM_ROWS)]

LABELS = [
    Mistake("a missing label", label(""), of_label("the label is missing", "leave the row out")),
    Mistake(
        "names of classes",
        labels(["soluble", "insoluble"] * 30, "--task regression"),
        ("value 'soluble': the label is not a number", "give --task classification for names"),
        labels(["soluble", "insoluble"] * 30),
    ),
    Mistake("units everywhere", labels(["7 nM", "8 nM"] * 30), ("row 2, column 'pKd', value '7 nM'", "decimal point")),
    Mistake(
        "0 and 1",
        labels([0, 1] * 30, "--task regression"),
        ("Two values, 0 and 1: a regression is fitted", "RMSE and Spearman say little", "--task classification"),
        labels([0, 1] * 30),
        kind="warning",
    ),
    Mistake("a decimal comma", label("7,3"), of_label("not a number", "decimal point"), label("7.3")),
    Mistake("all the same", labels([7.0] * NUM_ROWS), ("column 'pKd'", "training labels are 7", "nothing to learn")),
    Mistake(
        "one sequence",
        Case(columns={"sequence": BASE["sequence"][:1] * NUM_ROWS}),
        ("sequence: the same in all training rows", "nothing to learn"),
    ),
    Mistake(
        "-999 for not measured",
        label("-999"),
        of_label("value '-999'", "reads as a missing value", "between 5.2 and 11.3", "Leave the row out"),
        labels([*spread(-2000, 2000, NUM_ROWS - 1), -999]),
    ),
    Mistake(
        "0 for not measured",
        labels([0] * 9 + PKD[9:]),
        ("exactly 0, the lowest value", "write them as <=0; if nothing was measured there, leave them out"),
        labels([0] * 2 + spread(0.01, 3)[2:]),
        kind="warning",
    ),
    Mistake(
        "a detection limit that is not marked",
        labels([max(value, 6.0) for value in PKD]),
        ("exactly 6, the lowest value, and not marked as censored", "<=6"),
        labels([f"<={6.0}" if value < 6 else value for value in PKD], "--loss tobit"),
        kind="warning",
    ),
    Mistake(
        "log10 Kd with a threshold for it",
        labels([-value for value in PKD], "--binder_threshold -8"),
        ("all labels are negative (-11.3 to -5.2)", "--binder_threshold -8 takes", "the weakest"),
        labels([value - 12 for value in spread(9.0, 11.9)], "--binder_threshold -1"),  # a fitness as logarithm
        kind="note",
    ),
    Mistake(
        "binding energies with a threshold for them",
        labels(spread(-13.5, -6.8), "--binder_threshold -11"),
        ("binding energies, of which the lowest bind best",),
        labels(spread(6.8, 13.5), "--binder_threshold 11"),
        kind="note",
    ),
    Mistake(
        "Kd in M",
        labels(MOLAR),
        ("as concentrations in M", "-log10", "weakest binders"),
        labels([value / 1e5 for value in spread(-30, 30)]),  # small effects of both signs
        kind="warning",
    ),
    Mistake(
        "Kd in nM",
        labels(NANOMOLAR),
        ("as concentrations in nM or pM", "pKd = 9 - log10 of nM"),
        labels(spread(1.0, 5000.0)),  # melting points, counts: positive and wide, but even
        kind="warning",
    ),
    Mistake(
        "Kd in M among pKd",
        labels([MOLAR[row] if row < 12 else value for row, value in enumerate(PKD)]),
        ("labels are at most", "e-07, the other", "at least 5.2", "two units in one column"),
        labels([*spread(5, 6.5, 30), *spread(9, 10.5, 30)]),  # two families of binders
        kind="warning",
    ),
    Mistake(
        "repeated rows with labels far apart",
        Case(columns={"sequence": TWICE, "pKd": [value + 1.5 * (row % 2) for row, value in enumerate(LEVELS)]}),
        # Noise: every pair differs by 1.5, so sqrt(1.5^2 / 2) = 1.061 remains.
        ("30 of 30 sequences that occur more than once", "Noise of 1.06", "RMSE", "no Pearson rises above"),
        Case(columns={"sequence": TWICE, "pKd": LEVELS}),
        kind="note",
    ),
    Mistake(
        "bounds with a loss that takes them for values",
        labels(BOUNDED),
        ("training labels are bounds", "--loss mse takes for exact values", "--loss tobit"),
        labels(BOUNDED, "--loss tobit"),
        kind="warning",
    ),
    Mistake(
        "a censor column with a loss that does not read it",
        labels(PKD, "--censor_column mark --loss huber", mark=MARKS),
        ("training labels are bounds", "--loss huber takes for exact values"),
        labels(PKD, "--censor_column mark --loss ranking", mark=MARKS),
        kind="warning",
    ),
    Mistake(
        "tobit without a bound",
        labels(PKD, "--loss tobit"),
        ("--loss tobit: none of the 48 training labels is a bound", "--censor_column"),
        labels(BOUNDED, "--loss tobit"),
        kind="warning",
    ),
    Mistake(
        "a threshold above all labels",
        labels(spread(4.0, 8.5), "--binder_threshold 9"),
        ("--binder_threshold 9: all 60 labels (4 to 8.5) are below it", "say nothing"),
        labels(spread(4.0, 8.5), "--binder_threshold 7"),
        kind="warning",
    ),
]

PARTS = ["train"] * 40 + ["valid"] * 10 + ["test"] * 10
VARIANTS = [make_sequence(0, 100)[:row] + "W" + make_sequence(0, 100)[row + 1 :] for row in range(NUM_ROWS)]


def parts(names=PARTS, words: str = "--split_column split", **columns) -> Case:
    return Case(columns={"split": list(names), **columns}, words=words)


SPLITS = [
    Mistake(
        "no share for validation",
        Case(words="--split_sizes 0.8 0 0.2"),
        ("There is no validation split", "--split_sizes"),
        Case(words="--split_sizes 0.8 0.1 0.1"),
    ),
    Mistake(
        "a split column without validation",
        parts([name.replace("valid", "train") for name in PARTS]),
        ("no row says validation: 6 of 50 train rows (seed 42) became it",),
        parts(),
        kind="note",
    ),
    Mistake(
        "a column validation that nothing reads",
        parts([name.replace("valid", "train") for name in PARTS], Validation=[name == "valid" for name in PARTS]),
        ("column 'Validation' is not read", "Write validation into 'split' wherever 'Validation' is true"),
        parts(words="--split_column validation", validation=PARTS),
        kind="note",
    ),
    Mistake(
        "a column validation beside a random split",
        parts(words="", validation=[name == "valid" for name in PARTS]),
        ("column 'validation' is not read: --split_column names one column", "into that column"),
        parts(words="--split random", validation=[name == "valid" for name in PARTS]),
        kind="note",
    ),
    Mistake(
        "no test rows",
        parts([name.replace("test", "train") for name in PARTS]),
        ("There is no test split", "--split_sizes"),
        parts(),
    ),
    Mistake(
        "a chain that only test rows lack",
        parts(words=f"--split_column split --missing_chains light {TWO_CHAINS}", light=[*LIGHT[:50], *[""] * 10]),
        ("column 'light': 0 of 40 train rows, 0 of 10 validation rows, 10 of 10 test rows lack it",),
    ),
    Mistake("no training rows", parts(["test"] * NUM_ROWS), ("split column 'split': no row says train",)),
    Mistake(
        "an unknown split",
        parts(["hold-out" if name == "test" else name for name in PARTS]),
        ("10 values", "row 52, column 'split', value 'hold-out': names no split. Use train, valid (or"),
        parts([name.upper() for name in PARTS]),
    ),
    Mistake(
        "one training row",
        parts(["train", *["valid"] * 29, *["test"] * 30]),
        ("{file}: there is 1 training row", "nothing can be learned"),
    ),
    Mistake(
        "a subset of one row",
        Case(words="--max_train_samples 1"),
        ("--max_train_samples 1: there is 1 training row",),
        Case(words="--max_train_samples 30"),
    ),
    Mistake(
        "clusters of one protein's variants",
        Case(columns={"sequence": VARIANTS}, words="--split cluster"),
        ("one cluster of near copies holds 60 of 60 rows, more than the train share",),
        Case(words="--split cluster"),
    ),
]

THREE_CLASSES = ["low", "middle", "high"] * 20
TWO_CLASSES = ["yes", "no"] * 30
SETS = ["nucleus;membrane", "nucleus", "-", "membrane;vesicle"] * 15
STATES = ["".join(random.Random(number).choices("HEC", k=20)) for number in range(NUM_ROWS)]
CHARGES = [" ".join(str(round(random.Random(number + i).random(), 2)) for i in range(20)) for number in range(NUM_ROWS)]
ONE_SPLIT = "--split_sizes 0.98 0.01 0.01"
MELTING = tuple(spread(40, 70))
TWO_VALUES = "--label_column pKd tm"
YES_NO = {"pKd": [0, 1] * 30, "tm": [1, 1, 0] * 20}
HOT = [f"[{number % 2}, {number % 3 % 2}, 1]" for number in range(NUM_ROWS)]


def declared(folder: Path) -> Path:
    """A folder of `save_to_disk` whose classes have names."""
    features = Features({"sequence": Value("string"), "pKd": ClassLabel(names=["low", "high"])})
    data = Dataset.from_dict({"sequence": BASE["sequence"], "pKd": [0, 1] * 30}, features=features)
    data.save_to_disk(folder / "saved")
    return folder / "saved"


def of_kind(values, given: object = None, words: str = "", **columns) -> Case:
    """Labels, of which `given` stands in row 5 instead."""
    cells = {} if given is None else {(5, "pKd"): given}
    return Case(cells, columns={"pKd": list(values), **columns}, words=words)


def several(given: object, words: str = TWO_VALUES, other=MELTING, values=tuple(PKD)) -> Case:
    """Two label columns, of which the second has `given` in row 5."""
    return Case({(5, "tm"): given}, columns={"pKd": values, "tm": other}, words=words)


KINDS = [
    Mistake("a word among numbers", label("strong"), of_label("'strong': the label is not a number", "classification")),
    Mistake(
        "a word among 0 and 1",
        of_kind([0, 1] * 30, "maybe", "--bad_rows drop"),
        ("column 'pKd' has 0 and 1 in nearly all cells, and others such as 'maybe'", "leave them empty"),
        of_kind([0, 1] * 30),
    ),
    Mistake(
        "a 10 among 0 and 1",
        of_kind([0, 1] * 30, 10),
        ("column 'pKd' has 0 and 1 in nearly all cells, and others such as '10'", "--task regression"),
        of_kind([0, 1] * 30, 1),
    ),
    Mistake(
        "an empty class",
        of_kind(THREE_CLASSES, ""),
        of_label("the class is missing", "leave the row out"),
        of_kind(THREE_CLASSES),
    ),
    Mistake(
        "a class called none",
        of_kind(["low", "none", "NA"] * 20),
        ("column 'pKd': 40 cells say 'NA' or 'none', which reads as no value", "give --marker_classes NA none"),
        of_kind(["low", "none", "NA"] * 20, words="--marker_classes none NA"),
    ),
    Mistake(
        "0 and 1 of all labels in one cell",
        of_kind(HOT),
        ("column 'pKd' has a list of 0 and 1", "a column of 0 and 1 for each label"),
        of_kind([f"[{value}, {number % 7}]" for number, value in enumerate(PKD)]),
    ),
    Mistake(
        "numbers that some cells list otherwise",
        of_kind([f"[{value}, 1.5]" for value in PKD], "[7.5]"),
        of_label("value '[7.5]': 1 numbers, not 2", "nan where one is not known"),
        of_kind([f"[{value}, {number % 7}]" for number, value in enumerate(PKD)], "[7.5, nan]"),
    ),
    Mistake(
        "-1 among columns of 0 and 1",
        several(-1, TWO_VALUES, YES_NO["tm"], YES_NO["pKd"]),
        ("columns 'pKd', 'tm' hold 0, 1 and -1", "leave these cells empty", "--task regression"),
        several(-1, f"{TWO_VALUES} --task regression", YES_NO["tm"], YES_NO["pKd"]),
    ),
    Mistake(
        "residues in two cases",
        of_kind([state.lower() if number % 2 else state for number, state in enumerate(STATES)]),
        ("differ in spelling only: 'C' and 'c', 'E' and 'e', 'H' and 'h'",),
        of_kind([state.lower() for state in STATES]),
        kind="note",
    ),
    Mistake(
        "- for what is not known beside digits",
        of_kind([state.translate(str.maketrans("HEC", "01-")) for state in STATES]),
        ("'-' beside digits is read as not known, in 60 rows",),
        of_kind([state.replace("C", "-") for state in STATES]),
        kind="note",
    ),
    Mistake(
        "blanks for coil",
        of_kind([state.replace("C", " ") for state in STATES]),
        ("column 'pKd' has labels that are as long as the sequences only if blanks count", "Write - or C"),
        of_kind([" ".join(state) for state in STATES]),
    ),
    Mistake(
        "decimal commas of residues",
        of_kind([text.replace(".", ",") for text in CHARGES]),
        ("column 'pKd' has a number for each residue with a decimal comma", "Write a point"),
        of_kind([text.replace(" ", ",") for text in CHARGES]),
    ),
    Mistake(
        "labels of residues beside sequences with blanks",
        of_kind(STATES, sequence=[" ".join(one) for one in BASE["sequence"]]),
        ("row 2, column 'sequence'", "white space inside the sequence"),
        of_kind(STATES, sequence=[f"{one}*" for one in BASE["sequence"]]),
    ),
    Mistake(
        "a class in a stream of a data set that declares it",
        Case(make=declared, words="--streaming true"),
        ("column 'pKd' numbers classes, which a stream cannot name. Drop --streaming",),
        Case(make=declared),
    ),
    Mistake(
        "two classes in a cell",
        of_kind(THREE_CLASSES, "low;high"),
        of_label("several classes in one cell", "--task multilabel"),
        of_kind(SETS),
    ),
    Mistake(
        "names of rows for classes",
        of_kind([f"P{number:05}" for number in range(NUM_ROWS)]),
        ("column 'pKd': each of the 60 rows has a class of its own", "names of rows", "--label_column"),
        of_kind([f"P{number % 6:05}" for number in range(NUM_ROWS)]),
    ),
    Mistake(
        "amounts for classes",
        of_kind(PKD, words="--task classification"),
        ("each of the 60 rows has a class of its own", "--task regression"),
    ),
    Mistake(
        "classes that are mostly names",
        of_kind(["other"] * 25 + [f"P{number:05}" for number in range(35)], words=ONE_SPLIT),
        ("35 of 36 classes have a single row",),
        of_kind(["other"] * 50 + ["rare"] * 9 + ["single"], words=ONE_SPLIT),
        kind="note",
    ),
    Mistake(
        "a class in two spellings",
        of_kind(["soluble", "Soluble", "in_soluble"] * 20),
        ("differ in spelling only: 'Soluble' and 'soluble'",),
        of_kind(["soluble", "insoluble", "in doubt"] * 20),
        kind="note",
    ),
    Mistake(
        "several labels between commas",
        of_kind(["nucleus, membrane", "nucleus, vesicle", "membrane"] * 20),
        ("most classes hold a comma", "separate them by ';'"),
        of_kind(["nucleus", "nucleus, inner", "membrane"] * 20),
        kind="note",
    ),
    Mistake(
        "several labels without their separator",
        of_kind(["nucleus|membrane", "nucleus", "vesicle"] * 20, words="--task multilabel"),
        ("column 'pKd': --task multilabel reads labels separated by ';'", "(nucleus|membrane)"),
        of_kind(["nucleus, inner;membrane", "nucleus, inner", "membrane"] * 20, words="--task multilabel"),
    ),
    Mistake(
        "one class alone",
        of_kind(["low"] * NUM_ROWS),
        ("column 'pKd': all labels of training rows are 'low'", "nothing to learn"),
        of_kind(TWO_CLASSES),
    ),
    Mistake(
        "a class that training lacks",
        parts(pKd=["low", "high"] * 25 + ["odd", "low"] * 5),
        ("1 of 3 classes (odd) stand in test and not in training", "never predicted: 5 of 10 test rows"),
        parts(pKd=["low", "high"] * 30),
        kind="warning",
    ),
    Mistake(
        "the same sequences in two classes",
        Case(columns={"sequence": TWICE, "pKd": TWO_CLASSES}),
        (
            "30 of 30 sequences that occur more than once",
            "disagree: ",
            "into one cell, joined by ; (--task multilabel)",
        ),
        Case(columns={"sequence": TWICE, "pKd": [name for name in TWO_CLASSES[:30] for _ in range(2)]}),
        kind="note",
    ),
    Mistake(
        "no label in a cell of several",
        of_kind(SETS, ""),
        of_label("no label in this cell", "Write - for a row"),
        of_kind(SETS, "-"),
    ),
    Mistake(
        "the same labels everywhere",
        of_kind(["a;b"] * NUM_ROWS),
        ("column 'pKd': all training rows have the same labels",),
        of_kind(SETS),
    ),
    Mistake(
        "a 2 among columns of 0 and 1",
        several(2, f"{TWO_VALUES} --task multilabel", YES_NO["tm"], YES_NO["pKd"]),
        ("{file}, row 5, column 'tm', value '2': neither 0 nor 1", "nothing for not known"),
        several("", TWO_VALUES, YES_NO["tm"], YES_NO["pKd"]),
    ),
    Mistake(
        "a label that nobody looked for",
        several("", f"{TWO_VALUES} --task multilabel", [""] * NUM_ROWS, YES_NO["pKd"]),
        ("tm: no training row says whether it has that label", "Leave the column out"),
        several("", TWO_VALUES, YES_NO["tm"], YES_NO["pKd"]),
    ),
    Mistake(
        "a row of which nothing is known",
        Case({(5, "tm"): "", (5, "pKd"): ""}, {"tm": MELTING}, TWO_VALUES),
        of_label("no label of the row is known", "leave the row out"),
        several(""),
    ),
    Mistake(
        "a bound among several values",
        several("<=50"),
        ("row 5, column 'tm', value '<=50': a bound beside other values", "leave the cell empty"),
        several("50"),
    ),
    Mistake("a word among several values", several("hot"), ("row 5, column 'tm', value 'hot'", "not a number")),
    Mistake(
        "-999 among several values", several(-999), ("row 5, column 'tm', value '-999'", "reads as a missing value")
    ),
    Mistake(
        "-100 among several values",
        several(-100, other=tuple(spread(-200, 70))),
        ("row 5, column 'tm', value '-100': -100 marks what is not known", "leave the cell empty"),
        labels([-100, *spread(-200, 70)[1:]]),
    ),
    Mistake(
        "one of several values always the same",
        several(1, other=[1] * NUM_ROWS),
        ("column 'tm': all 48 training labels are 1", "nothing to learn"),
    ),
    Mistake(
        "labels of fewer residues than the sequence",
        of_kind(STATES, "HEC"),
        of_label("3 labels for a sequence of 20 residues", "leave the row out"),
        of_kind(STATES, STATES[0]),
    ),
    Mistake("no labels of residues", of_kind(STATES, ""), of_label("the labels are missing"), of_kind(STATES)),
    Mistake(
        "no residue known",
        of_kind(STATES, "?" * 20),
        of_label("no residue's label is known"),
        of_kind(STATES, "?" * 19 + "H"),
    ),
    Mistake(
        "one class of residues alone",
        of_kind(["C" * 20] * NUM_ROWS),
        ("column 'pKd': all known labels of training residues are 'C'",),
        of_kind(STATES),
    ),
    Mistake(
        "sequences for labels of residues",
        of_kind(BASE["sequence"], words="--task residue_classification"),
        ("column 'pKd' holds the sequences themselves",),
    ),
    Mistake(
        "a mask of another length",
        of_kind(STATES, words="--mask_column mask", mask=["1" * 20] * 3 + ["11"] + [""] * 56),
        ("{file}, row 5, column 'mask', value '11'", "a mask of 2 for 20 labels"),
        of_kind(STATES, words="--mask_column mask", mask=["1" * 19 + "0"] * 4 + [""] * 56),
    ),
    Mistake(
        "letters for a mask",
        of_kind(STATES, words="--mask_column mask", mask=["11x" + "1" * 17] * NUM_ROWS),
        ("row 2, column 'mask'", "a mask that is neither 0 nor 1 at position 3 of 20"),
    ),
    Mistake(
        "a mask for labels of rows",
        of_kind(TWO_CLASSES, words="--mask_column mask", mask=["1" * 20] * NUM_ROWS),
        ("--mask_column mask says which residues have a label", "--task classification has one per row"),
    ),
    Mistake(
        "residues of two sequences",
        of_kind(STATES, words=f"{TWO_CHAINS} --task residue_classification", light=LIGHT),
        ("residues of one sequence have labels; name one of sequence light",),
        of_kind(STATES, words="--task residue_classification", light=LIGHT),
    ),
    Mistake(
        "pooling of residues",
        of_kind(STATES, words="--pooling max"),
        ("--pooling max: leave it out where each residue has a label",),
        of_kind(TWO_CLASSES, words="--pooling max"),
    ),
    Mistake(
        "a word among numbers of residues",
        of_kind(CHARGES, CHARGES[3].replace(" ", " high ", 1)),
        of_label("'high' at position 2 of 21 is not a number", "nan where it is not known"),
        of_kind(CHARGES, f"nan {CHARGES[3].partition(' ')[2]}"),
    ),
    Mistake(
        "fewer numbers than residues",
        of_kind(CHARGES, "0.5 0.7"),
        of_label("2 labels for a sequence of 20 residues"),
        of_kind([f"[{text.replace(' ', ', ')}]" for text in CHARGES]),
    ),
    Mistake(
        "several columns of classes",
        of_kind(TWO_CLASSES, words=f"{TWO_VALUES} --task classification", tm=TWO_CLASSES),
        ("--task classification: name one label column, not 2",),
        of_kind(TWO_CLASSES, words=TWO_VALUES, tm=TWO_CLASSES),
    ),
    Mistake(
        "a sequence for the label",
        Case(words="--label_column sequence"),
        ("label_column=sequence", "none of --sequence_columns"),
    ),
    Mistake(
        "a censor column for classes",
        of_kind(TWO_CLASSES, words="--censor_column mark", mark=MARKS),
        ("--censor_column mark is for one column of numbers",),
    ),
    *(
        Mistake(
            f"{words} for classes",
            of_kind(TWO_CLASSES, words=words),
            (f"{words} is for one number per row", "one of 2 classes (no, yes)"),
            of_kind(TWO_CLASSES),
        )
        for words in ("--binder_threshold 9", "--loss tobit")
    ),
    Mistake(
        "classes in a stream",
        of_kind(TWO_CLASSES, words="--task classification --streaming true"),
        ("task=classification: names of classes are collected over all rows", "drop --streaming"),
        of_kind(TWO_CLASSES, words="--task classification"),
    ),
]

THREE = dict.fromkeys(("heavy", "light", "antigen"), BASE["sequence"])


def option(text: str, **columns) -> Case:
    return Case(columns=columns, words=text)


OPTIONS = [
    Mistake(
        "a head of no units",
        option("--head_sizes 0"),
        ("--head_sizes 0", "lets nothing through", "head_sizes: [] in the YAML"),
        option("--head_sizes 8"),
    ),
    Mistake("a mistyped flag", option("--learning_rat 0.1"), ("--learning_rat", "did you mean '--learning_rate'")),
    Mistake("a rate below 0", option("--learning_rate -1"), ("learning_rate=-1.0", "not negative")),
    Mistake("an unknown metric", option("--metric_for_best_model spearmann"), ("spearmann", "spearman")),
    Mistake("adapters on frozen towers", option("--use_peft true --tower_training frozen"), ("contradict each other",)),
    Mistake(
        "two encoders for three columns",
        option("--sequence_columns heavy light antigen --encoders {encoder} {encoder}", **THREE),
        ("2 encoders for 3 sequence columns", "--tower_inputs heavy light,antigen"),
        option(
            "--sequence_columns heavy light antigen --encoders {encoder} {encoder} --tower_inputs heavy+light antigen",
            **THREE,
        ),
    ),
    Mistake(
        "a column that no tower reads",
        option("--sequence_columns heavy light --tower_inputs heavy", **THREE),
        ("Towers read ['heavy']", "each exactly once"),
        option("--sequence_columns heavy light --tower_inputs heavy,light", **THREE),
    ),
    Mistake(
        "an encoder folder that is not there",
        option("--encoders {folder}/esm2"),
        ("Encoder '{folder}/esm2': there is no such folder", "Nearest names there: esm_2"),
    ),
    Mistake("an encoder's file", option("--encoders {encoder}/config.json"), ("is a file: give its folder",)),
]

ALL = [*FASTA, *FILES, *SEQUENCES, *LABELS, *SPLITS, *KINDS, *OPTIONS]


@parametrized(ALL)
def test_mistake_is_named(mistake, tmp_path, demo_encoders):
    (tmp_path / "esm_2").mkdir()
    check_mistake(mistake, tmp_path, demo_encoders[1])


@pytest.mark.sampled(8)
@parametrized([mistake for mistake in ALL if mistake.twin != Case()])
def test_its_innocent_twin_passes(mistake, tmp_path, demo_encoders):
    check_twin(mistake, tmp_path, demo_encoders[1])


def fault(case: Case, folder: Path, **arguments) -> str:
    given = DataArguments(dataset_name=str(case.write(folder)), label_column="pKd", **arguments)
    with pytest.raises(DataError) as error:
        load_data(given, output_dir=folder / "out", seed=0)
    return str(error.value)


MANY = Case(
    {
        **{(row, "sequence"): "" for row in range(2, 32)},
        (40, "sequence"): "MKT:VL",
        (41, "pKd"): "-999",
        (42, "pKd"): "7,3",
        (43, "antibody"): " ",
        (44, "split"): "hold-out",
    },
    columns={"antibody": ["a"] * NUM_ROWS, "split": ["train"] * 40 + ["test"] * 20},
)


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path):
    text = fault(MANY, tmp_path, group_column="antibody", split_column="split")
    assert text.startswith("35 values cannot be used:")
    for words in (
        "row 2, column 'sequence', value '': the sequence is missing",
        "  ... and 27 more in column 'sequence': the sequence is missing",  # 20 lines for 6 kinds are 3 each
        "row 40, column 'sequence', value 'MKT:VL': ':' at position 4 of 6 is not a residue",
        "row 41, column 'pKd', value '-999': the label reads as a missing value",
        "row 42, column 'pKd', value '7,3': the label is not a number",
        "row 43, column 'antibody', value ' ': the group is missing",
        "row 44, column 'split', value 'hold-out': names no split. Use train, valid",
    ):
        assert words in text, words
    assert "row 5, column 'sequence'" not in text


def test_dropping_bad_rows_never_drops_rows_of_an_unknown_split(tmp_path):
    text = fault(MANY, tmp_path, split_column="split", bad_rows="drop")
    assert text.startswith("1 value cannot be used:\n")
    assert "row 44, column 'split', value 'hold-out': names no split" in text


RNG = np.random.default_rng(0)
# Shapes that real sets have, drawn here because the sets themselves stay where they are.
REAL_LOOKING = {
    "pKd by SPR": RNG.normal(8.5, 0.7, 700).clip(6, 10.5),
    "fitness with most variants dead": RNG.lognormal(-2.5, 1.8, 3000).clip(0, 9),
    "fitness of single variants": RNG.beta(2, 1.5, 5000),
    "stability scores": RNG.normal(0.5, 0.9, 5000),
    "changes in binding energy": RNG.normal(1.0, 1.5, 2000),
    "melting points": RNG.normal(60, 9, 400),
    "percent of wild type": RNG.gamma(1.2, 40, 1000),
    "classes": RNG.integers(0, 3, 500).astype(float),
    "hits": RNG.integers(0, 2, 500).astype(float),
}


def test_labels_as_real_sets_have_them_raise_no_question_of_units():
    assert {name: unit_alarms(values) for name, values in REAL_LOOKING.items()} == {name: [] for name in REAL_LOOKING}


def test_few_labels_say_nothing_about_units():
    assert unit_alarms(np.array([float(text) for text in MOLAR[:29]])) == []
    assert unit_alarms(np.array([float(text) for text in MOLAR[:30]])) != []


def test_what_can_only_be_a_path_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "encoders" / "esm2").mkdir(parents=True)
    (tmp_path / "encoders" / "esm2" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name, words in (
        ("./encoders/esm3", "encoders holds no 'esm3'. Nearest names there: esm2."),
        ("encoders/esm2/more/x", "encoders/esm2 holds no 'more'. Folders there: none."),
        ("../nowhere/esm2", "holds no 'nowhere'"),
        ("~/nowhere/esm2", "holds no 'nowhere'"),
        ("encoders\\esm2", "there is no such folder"),
        ("encoders/esm2/config.json", "give its folder, 'encoders/esm2'"),
    ):
        with pytest.raises(ArgumentError) as error:
            check_folder(name, "Encoder")
        assert words in str(error.value)


def test_what_may_be_a_hub_id_is_left_to_the_hub(tmp_path, monkeypatch):
    (tmp_path / "encoders" / "esm2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("facebook/esm2_t6_8M_UR50D", "esm2", "encoders/esm2", str(Path("encoders").absolute())):
        assert check_folder(name, "Encoder") == ""
    assert check_folder("encoders/esm3", "Encoder").endswith("holds no 'esm3'. Nearest names there: esm2.")


# Rows 52 to 54 of the file, the first of test, repeat rows 2, 3 and 4.
LEAKED = [*BASE["sequence"][:50], *BASE["sequence"][:3], *BASE["sequence"][53:]]


def run(folder, encoder, words="", **columns):
    """Trains for two epochs; results, log and report."""
    case = Case(columns={"split": PARTS, **columns}, words=words)
    quick = "--split_column split --num_train_epochs 2 --head_sizes 4 --disable_tqdm true"
    command = [*case.command(folder, encoder), *quick.split(), "--embedding_cache_dir", str(folder / "cache")]
    TASK.main(command)
    out = folder / "out"
    results = json.loads((out / "all_results.json").read_text())
    return results, (out / "run.log").read_text(), (out / "README.md").read_text()


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory, demo_encoders):
    bounded = [f"<={label}" if label < 6 else str(label) for label in BASE["pKd"]]
    folder = tmp_path_factory.mktemp("mistaken")
    return run(folder, demo_encoders[1], "--binder_threshold 20", sequence=LEAKED, pKd=bounded)


@pytest.fixture(scope="module")
def innocent(tmp_path_factory, demo_encoders):
    return run(tmp_path_factory.mktemp("innocent"), demo_encoders[1])


@pytest.mark.nightly
def test_the_verdict_names_test_rows_that_stand_in_train(mistaken, innocent):
    text = (
        "But 3 of 10 test rows (30.0%) stand in train, too: test row 52 is train row 2, test row 53 is train row 3, "
        "test row 54 is train row 4. On these, any score is memory."
    )
    assert mistaken[0]["verdict"]["text"].endswith(text)
    assert "stand in train" not in innocent[0]["verdict"]["text"]


def test_log_and_report_say_what_is_probably_a_mistake(mistaken, innocent):
    for words in ("training labels are bounds, which --loss mse takes", "--binder_threshold 20: all"):
        for place in (1, 2):
            assert words.replace("--", "") in mistaken[place].replace("\\", "").replace("--", "")
            assert words.replace("--", "") not in innocent[place].replace("\\", "").replace("--", "")
        assert any(words in text for text in mistaken[0]["data"]["warnings"])
    assert innocent[0]["data"]["warnings"] == []


def test_repeated_rows_of_unlike_labels_are_in_the_report(mistaken, innocent):
    # Three sequences twice, of which those with a bound do not count.
    assert 1 <= mistaken[0]["data"]["repeats"]["num_disagreeing"] <= 3
    assert "labels that disagree" in mistaken[1]
    assert "labels that disagree" in mistaken[2]
    assert "labels that disagree" not in innocent[2]
    assert innocent[0]["data"]["repeats"]["num_disagreeing"] == 0

"""Cells that are no protein in one-letter code, or too long for the encoder."""

import pytest
from mistakes import NUM_ROWS, Case, Mistake, check_mistake, check_twin, make_sequence, parametrized

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


MISTAKES = [
    Mistake("DNA", cell(DNA), said("reads as DNA", "72 letters", "Translate"), cell("GATTACA" * 3), before="silent"),
    Mistake("DNA in small letters", cell(DNA.lower()), said("reads as DNA"), cell("mktvl" * 4), before="silent"),
    Mistake(
        "RNA", cell(DNA.replace("T", "U")), said("reads as RNA"), cell("MKUTACGGA" + make_sequence(2)), before="silent"
    ),
    Mistake(
        "three-letter codes",
        cell("MetAlaGlySer"),
        said("three-letter codes", "one-letter"),
        cell("METALAGLY"),
        before="silent",
    ),
    Mistake(
        "three-letter codes in capitals",
        cell("METALAGLYSERTHR"),
        said("three-letter codes"),
        cell("METALAGLYSERTHRK"),
        before="silent",
    ),
    Mistake(
        "three-letter codes with hyphens as gaps",
        cell("ALA-GLY-SER-THR", "--gaps remove"),
        said("three-letter codes"),
        cell("ALA-GLY-SERT", "--gaps remove"),
        before="silent",
    ),
    Mistake(
        "three-letter codes with blanks",  # was: "put each chain in a column of its own"
        cell("Met Ala Gly Ser"),
        said("three-letter codes"),
        before="misleading",
    ),
    Mistake("empty", cell(""), said("the sequence is empty", "leave the row out")),
    Mistake(
        "a chain missing",
        light_chains(HALF),
        ("{file}, row 2, column 'light'", "name the column in --missing_chains"),
        light_chains(HALF, "--missing_chains light"),
    ),
    Mistake(
        "a chain missing everywhere",
        light_chains([""] * NUM_ROWS, "--missing_chains light"),
        ("column 'light': all 48 training rows lack it", "--sequence_columns"),
        light_chains(LIGHT),
    ),
    Mistake(
        "a chain said to be missing that is not",
        light_chains(LIGHT, "--missing_chains light"),
        ("--missing_chains light: no row lacks it", "will refuse rows that lack it"),
        light_chains(HALF, "--missing_chains light"),
        kind="warning",
    ),
    Mistake("NA", cell("NA"), said("reads as a missing value"), cell("NAKTVLA")),
    Mistake("a word", cell("WT"), said("'WT' reads as a word", "20 residues"), cell("WTWTVLA"), before="silent"),
    Mistake("a truth value", cell("TRUE"), said("reads as a truth value"), cell("TRUEK")),
    Mistake("a number", cell("7.3"), said("digit '7' at position 1")),
    Mistake("numbering", cell("MKTVL10ACDE"), said("digit '1' at position 6", "numbering")),
    Mistake("an accession", cell("P04637"), said("digit '0' at position 2")),
    Mistake("letters that are none of ASCII", cell("MK\u0422VL"), said("non-ASCII character U+0422")),
    Mistake("two chains in one cell", cell("MKTVL:ACDEF"), said("':' at position 6", "one chain per column")),
    Mistake("a FASTA header", cell(">sp|X MKT"), said("'>' at position 1 of 9 is not a residue")),
    Mistake(
        "white space inside", cell("MKTVL ACDEF"), said("white space inside", "column of its own"), cell(" MKTVL ")
    ),
    Mistake("a stop codon", cell("MKTVL*"), said("--stop_codon trim"), cell("MKTVL*", "--stop_codon trim")),
    Mistake("a stop codon inside", cell("MK*TVL", "--stop_codon trim"), said("not at the end")),
    Mistake("a gap", cell("MK-TVL"), said("--gaps remove"), cell("MK-TVL", "--gaps remove")),
    Mistake(
        "too long for the limit",
        cell(LONG, "--max_residues 1000"),
        said("1100 residues are more than max_residues=1000", "--too_long truncate"),
        cell(LONG, "--max_residues 1000 --too_long truncate"),
    ),
    Mistake(
        "too long for the encoder",  # was: neither file nor row nor how many
        Case({(5, "sequence"): LONG, (9, "sequence"): LONG + "A"}, words="--split_sizes 0.98 0.01 0.01"),
        (
            "Input 'sequence' has 1101 residues; its encoder takes 1022",
            "{file}: 2 rows are too long: row 5 of train (1,100 residues), row 9 of train (1,101 residues)",
            "--too_long truncate",
            "--max_residues N --bad_rows drop",
        ),
        cell(LONG, "--too_long window"),
        before="misleading",
    ),
]


@parametrized(MISTAKES)
def test_mistake_is_named(mistake, tmp_path, demo_encoders):
    check_mistake(mistake, tmp_path, demo_encoders[1])


@pytest.mark.sampled(16)
@parametrized(MISTAKES)
def test_its_innocent_twin_passes(mistake, tmp_path, demo_encoders):
    check_twin(mistake, tmp_path, demo_encoders[1])

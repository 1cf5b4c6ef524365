"""Text whose letters are all residues, and that is no protein in one-letter code: DNA, RNA, three-letter codes."""

from __future__ import annotations

import re

# A, C, G, T and N are 26 % of the residues in Swiss-Prot, so 24 of them in a row are one protein in 10^14 by chance;
# repeats of few letters (poly-A, silk's GA) lack one of A, C, G and T. Shorter genes would be of seven residues.
MIN_NUCLEOTIDES = 24
# The 20 codes are 1 in 400 of all words of three residues: four in a row are one 12-mer in 10^10. With separators, or
# written Ala, two and three are enough.
MIN_CODES, MIN_SEPARATED_CODES, MIN_CAPITALIZED_CODES = 4, 3, 2

_NUCLEOTIDES = re.compile("[ACGTUN]+").fullmatch
_CODE = (
    "ALA|ARG|ASN|ASP|CYS|GLN|GLU|GLY|HIS|ILE|LEU|LYS|MET|PHE|PRO|SER|THR|TRP|TYR|VAL|"  # the standard ones
    "ASX|GLX|MSE|PYL|SEC|XAA|XLE"
)
_CODES = re.compile(f"(?:{_CODE})+").fullmatch
_CAPITALIZED = re.compile("(?:[A-Z][a-z]{2})+").fullmatch
_SEPARATORS = re.compile(r"[\s.,;:_-]+")
# How all of these begin, and few proteins: most texts are judged by their first letters.
_BEGINS = re.compile(rf"\s*(?:[ACGTUN\s.,;:_-]{{12}}|(?:(?:H|AC)[\s.,;:_-]+)?(?:{_CODE}))", re.IGNORECASE).match
_ENDS = {"H", "OH", "NH2", "AC"}  # what peptide chemistry writes around: H-Ala-Gly-OH


def find_other_alphabet(text: str) -> tuple[str, str] | None:
    """What `text` is instead of a protein in one-letter code, as (rule, remedy); None where it may be one.

    Certain cases only: at least 24 letters, all of them A, C, G, T or U, N, and each of the four there; or three-letter
    codes throughout, at least four (fewer where they are separated, or capitalized: Ala-Gly-Ser, AlaGly).

    Args:
        text: ASCII, in any case, with or without gaps.
    """
    if not _BEGINS(text):
        return None
    plain = _SEPARATORS.sub("", text.upper())
    if len(plain) >= MIN_NUCLEOTIDES and _NUCLEOTIDES(plain):
        found = set(plain)
        kind = "DNA" if "T" in found else "RNA"
        if {"A", "C", "G"} <= found and ("T" in found) != ("U" in found):
            letters = "ACGTN" if kind == "DNA" else "ACGUN"
            rule = f"the sequence reads as {kind}, its {len(plain)} letters are all of {letters}"
            return rule, "Translate it into amino acids first."
    if _has_codes(text):
        rule = "the sequence reads as three-letter codes (Ala Gly Ser)"
        return rule, "Write it in one-letter code: AGS."
    return None


def _has_codes(text: str) -> bool:
    words = [word for word in _SEPARATORS.split(text) if word]
    if len(words) > 1:
        words = words[words[0].upper() in _ENDS : len(words) - (words[-1].upper() in _ENDS)]
    joined = "".join(words)
    if not joined or not _CODES(joined.upper()):
        return False
    codes = {joined[i : i + 3].upper() for i in range(0, len(joined), 3)}
    num_codes = len(joined) // 3
    if _CAPITALIZED(joined):
        return num_codes >= MIN_CAPITALIZED_CODES
    if len(words) > 1 and all(len(word) == 3 for word in words):
        return num_codes >= MIN_SEPARATED_CODES
    return num_codes >= MIN_CODES and len(codes) > 1

"""Antibody chains numbered as variable domains (IMGT) by a library, with the checks that it leaves to its users.

Both libraries accept half a domain, and of two domains in a row they give one; so conserved residues, the J motif, the
domain's length and what stands outside of it are looked at here. Positions: M.-P. Lefranc et al., IMGT unique numbering
for V-domains, Developmental and Comparative Immunology 27 (2003), 55.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, Literal

from ...data.proteins import STANDARD
from ...optional import import_problem, require
from .rows import AntibodyRows

REGIONS = {
    "FR1": (1, 26),
    "CDR1": (27, 38),
    "FR2": (39, 55),
    "CDR2": (56, 65),
    "FR3": (66, 104),
    "CDR3": (105, 117),
    "FR4": (118, 128),
}
CHAIN_TYPES = {"heavy": "H", "light": "KL"}
CONSERVED = {23: "C", 41: "W", 104: "C"}
J_STARTS = {"heavy": "W", "light": "F"}  # at 118, which tells heavy from light; glycine stands at 119 and 121
LENGTHS = {"heavy": (100, 145), "light": (90, 130)}  # residues of the domain, insertions included
MAX_OUTSIDE = 10  # residues beyond the domain's ends: a constant region, a second domain or a leader has more
RESIDUES = frozenset(STANDARD)
SHORTEST = 30  # residues; immunum takes no less
MIN_CONFIDENCE = 0.4  # of immunum; its own 0.5 refuses hypermutated antibodies, 0.3 still all shuffled chains
BATCH = 32  # chains that anarcii numbers at once

Numbered = tuple[str, list[tuple[int, str, str]]]  # chain type; position, letter of an insertion or "", residue


@dataclass(frozen=True)
class NumberedDomain:
    """A variable domain found in a chain.

    Attributes:
        chain_type: "H", "K" or "L".
        positions: IMGT position -> residue; insertions are left out here, not in `regions`.
        regions: name of `REGIONS` -> its residues, insertions included.
        num_outside: residues of the chain that are not of the domain.
    """

    chain_type: str
    positions: dict[int, str]
    regions: dict[str, str]
    num_outside: int

    @property
    def length(self) -> int:
        """Residues of the domain."""
        return sum(map(len, self.regions.values()))


@dataclass
class Numberer:
    """Numbers chains, each distinct one once however often it is asked for.

    Args:
        library: "immunum" aligns with profiles; "anarcii", a language model, numbers also what is far from antibodies.

    Cost: 0.3 ms a distinct chain on one CPU thread; 0.12 s with anarcii, and 2 s for its import.
    """

    library: Literal["immunum", "anarcii"] = "immunum"
    _known: dict[str, NumberedDomain | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Raises `MissingDependencyError` where the library is not installed, or does not import."""
        extra = {"immunum": "numbering", "anarcii": "anarcii"}[self.library]
        require(self.library, extra, "numbering antibodies")

    @classmethod
    def of(cls, wanted: Literal["auto", "immunum", "anarcii", "off"]) -> Numberer | None:
        """What `--numbering` asks for; "auto" is immunum where it works, else None.

        Raises:
            MissingDependencyError: a library that was named is not installed, or does not import.
        """
        if wanted == "auto":
            return cls() if import_problem("immunum") is None else None
        return None if wanted == "off" else cls(wanted)

    def number(self, sequences: Iterable[str]) -> list[NumberedDomain | None]:
        """The domain in each sequence; None where there is none, or letters that are no residues."""
        asked = list(sequences)
        new = [
            one
            for one in dict.fromkeys(asked)
            if one not in self._known and len(one) >= SHORTEST and RESIDUES.issuperset(one)
        ]
        number = _number_by_immunum if self.library == "immunum" else _number_by_anarcii
        if new:
            self._known.update((one, _read(found, one)) for one, found in zip(new, number(new)))
        return [self._known.get(one) for one in asked]


@dataclass(frozen=True)
class Domains:
    """Numbered domains of n rows, heavy and light; None where a chain is missing or no variable domain."""

    heavy: list[NumberedDomain | None]
    light: list[NumberedDomain | None]

    @classmethod
    def of(cls, rows: AntibodyRows, numberer: Numberer) -> Domains:
        """Numbers every distinct chain once."""
        return cls(numberer.number(rows.chain("heavy")), numberer.number(rows.chain("light")))

    def are_numbered(self, rows: AntibodyRows) -> list[bool]:
        """Whether each row's chains are numbered with the right type, whatever else they hold."""
        return [all(_is_numbered(domain, chain) for chain, domain in self._chains(rows, i)) for i in range(len(rows))]

    def find_problems(self, rows: AntibodyRows) -> list[str | None]:
        """Why each row is not made of whole variable domains and nothing else; a missing light chain may be."""
        problems = ([find_domain_problem(one, chain) for chain, one in self._chains(rows, i)] for i in range(len(rows)))
        return [next(filter(None, found), None) for found in problems]

    def _chains(self, rows: AntibodyRows, row: int) -> list[tuple[str, NumberedDomain | None]]:
        both = [("heavy", self.heavy[row]), ("light", self.light[row])]
        return both[:1] if rows.light[row] is None else both


def find_domain_problem(domain: NumberedDomain | None, chain: str) -> str | None:
    """Why a domain is not one whole variable domain of a "heavy" or "light" chain; None where it is."""
    if domain is None:
        return f"{chain} chain is not numbered as a variable domain"
    if not _is_numbered(domain, chain):
        return f"{chain} chain is of type {domain.chain_type}"
    for position, residue in CONSERVED.items():
        found = domain.positions.get(position, "nothing")
        if found != residue:
            return f"{chain} chain has {found} at position {position}, where {residue} is conserved"
    motif = "".join(domain.positions.get(position, "-") for position in range(118, 122))
    if (motif[:2], motif[3]) != (f"{J_STARTS[chain]}G", "G"):
        return f"{chain} chain has {motif} for the J motif {J_STARTS[chain]}GxG"
    shortest, longest = LENGTHS[chain]
    if not shortest <= domain.length <= longest:
        return f"{chain} domain of {domain.length} residues, not {shortest} to {longest}"
    if domain.num_outside > MAX_OUTSIDE:
        return f"{chain} chain with {domain.num_outside} residues outside its variable domain"
    return None


def _is_numbered(domain: NumberedDomain | None, chain: str) -> bool:
    return domain is not None and domain.chain_type in CHAIN_TYPES[chain]


def _number_by_immunum(sequences: Sequence[str]) -> Iterator[Numbered | None]:
    from immunum import Annotator

    annotator = Annotator(chains=list("HKL"), scheme="imgt", min_confidence=MIN_CONFIDENCE)
    for sequence in sequences:
        # `number` would call four residues of a shuffled chain a domain; `number_domains` refuses what is that short.
        found: list[Any] = [one for one in annotator.number_domains(sequence) if one.error is None]
        best: Any = max(found, key=lambda one: one.confidence, default=None)
        if best is None:
            yield None
        else:  # positions as "111" and, inserted, "111A"
            places = [(place.rstrip(ascii_uppercase), place, one) for place, one in best.numbering.items()]
            yield best.chain, [(int(position), place.removeprefix(position), one) for position, place, one in places]


def _number_by_anarcii(sequences: Sequence[str]) -> Iterator[Numbered | None]:
    import torch
    from anarcii import Anarcii

    num_threads = torch.get_num_threads()
    try:
        # It sets the process's threads when it is made; a number below 1 would take all cores.
        model = Anarcii(seq_type="antibody", mode="speed", batch_size=BATCH, cpu=True, ncpu=num_threads)
        answers = model.number({str(place): one for place, one in enumerate(sequences)})
    finally:
        torch.set_num_threads(num_threads)
    for place in range(len(sequences)):
        found = answers[str(place)]
        if found["error"] or not found["numbering"]:
            yield None
        else:
            residues = [(position, letter.strip(), one) for (position, letter), one in found["numbering"] if one != "-"]
            yield found["chain_type"], residues


def _read(numbered: Numbered | None, sequence: str) -> NumberedDomain | None:
    if numbered is None:
        return None
    chain_type, residues = numbered
    regions = {
        name: "".join(one for position, _, one in residues if first <= position <= last)
        for name, (first, last) in REGIONS.items()
    }
    positions = {position: one for position, insertion, one in residues if not insertion}
    return NumberedDomain(chain_type, positions, regions, len(sequence) - len(residues))

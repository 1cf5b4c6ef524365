"""Antibody chains numbered as variable domains (IMGT) by a library, with the checks that it leaves to its users.

Both libraries accept half a domain, and of two domains in a row they give one; so conserved residues, the J motif, the
domain's length and what stands outside of it are looked at here. Positions: M.-P. Lefranc et al., IMGT unique numbering
for V-domains, Developmental and Comparative Immunology 27 (2003), 55.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...data.proteins import STANDARD
from ...optional import import_problem, require

RESIDUES = frozenset(STANDARD)
CHAIN_TYPES = {"heavy": "H", "light": "KL"}
CONSERVED = {23: "C", 41: "W", 104: "C"}
J_STARTS = {"heavy": "W", "light": "F"}  # at 118, which tells heavy from light; glycine stands at 119 and 121
LENGTHS = {"heavy": (100, 145), "light": (90, 130)}  # residues of the domain, insertions included
MAX_OUTSIDE = 10  # residues beyond the domain's ends: a constant region, a second domain or a leader has more
SHORTEST = 30  # residues; immunum takes no less
MIN_CONFIDENCE = 0.4  # of immunum; its own 0.5 refuses hypermutated antibodies, 0.3 still all shuffled chains
BATCH = 32  # chains that anarcii numbers at once


@dataclass(frozen=True)
class NumberedDomain:
    """A variable domain found in a chain.

    Attributes:
        chain_type: "H", "K" or "L".
        positions: IMGT position -> residue; insertions are left out here, and counted in `length`.
        length: residues of the domain.
    """

    chain_type: str
    positions: dict[int, str]
    length: int


@dataclass
class Numberer:
    """Numbers chains (IMGT), each distinct one once however often it is asked for.

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
        new = [one for one in dict.fromkeys(asked) if one not in self._known]
        readable = [one for one in new if len(one) >= SHORTEST and RESIDUES.issuperset(one)]
        self._known.update(dict.fromkeys(new))
        if readable:
            number = _number_by_immunum if self.library == "immunum" else _number_by_anarcii
            self._known.update(zip(readable, number(readable)))
        return [self._known[one] for one in asked]

    def find_type_problem(self, chain: str, sequence: str) -> str | None:
        """Why a sequence does not number as a variable domain of a "heavy" or "light" chain, whatever else it holds."""
        (domain,) = self.number([sequence])
        if domain is None:
            return f"{chain} chain is not numbered as a variable domain"
        return None if domain.chain_type in CHAIN_TYPES[chain] else f"{chain} chain is of type {domain.chain_type}"

    def find_domain_problem(self, chain: str, sequence: str) -> str | None:
        """Why a sequence is not one whole variable domain of a "heavy" or "light" chain; None where it is."""
        (domain,) = self.number([sequence])
        problem = self.find_type_problem(chain, sequence)
        if domain is None or problem:
            return problem
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
        outside = len(sequence) - domain.length
        if outside > MAX_OUTSIDE:
            return f"{chain} chain with {outside} residues outside its variable domain"
        return None


def _number_by_immunum(sequences: Sequence[str]) -> Iterator[NumberedDomain | None]:
    from immunum import Annotator

    annotator = Annotator(chains=list("HKL"), scheme="imgt", min_confidence=MIN_CONFIDENCE)
    for sequence in sequences:
        # `number` would call four residues of a shuffled chain a domain; `number_domains` refuses what is that short.
        found: list[Any] = [one for one in annotator.number_domains(sequence) if one.error is None]
        best: Any = max(found, key=lambda one: one.confidence, default=None)
        yield None if best is None else _read(best.chain, best.numbering)


def _number_by_anarcii(sequences: Sequence[str]) -> Iterator[NumberedDomain | None]:
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
        residues = {f"{at}{letter.strip()}": one for (at, letter), one in found["numbering"] or [] if one != "-"}
        yield None if found["error"] or not residues else _read(found["chain_type"], residues)


def _read(chain_type: str, residues: dict[str, str]) -> NumberedDomain:
    """From residues at "111" and, inserted, "111A"."""
    positions = {int(place): one for place, one in residues.items() if place.isdigit()}
    return NumberedDomain(chain_type, positions, len(residues))

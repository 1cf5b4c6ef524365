"""Antibody chains numbered as variable domains (IMGT) by `anarcii`, with the checks that it leaves to its users.

anarcii 2.0.8 accepts half a domain, and of two domains in a row it numbers one; so conserved residues, the J motif, the
domain's length and what stands outside of it are looked at here. Positions: M.-P. Lefranc et al., IMGT unique numbering
for V-domains, Developmental and Comparative Immunology 27 (2003), 55.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...optional import require
from .motifs import MAX_OUTSIDE
from .structure import RESIDUES

REGIONS = {
    "FR1": (1, 26),
    "CDR1": (27, 38),
    "FR2": (39, 55),
    "CDR2": (56, 65),
    "FR3": (66, 104),
    "CDR3": (105, 117),
    "FR4": (118, 128),
}
CONSERVED = {23: "C", 41: "W", 104: "C"}
# The J motif's first residue tells heavy from light; glycine follows at both places.
_J_MOTIF = {"heavy": {118: "W", 119: "G", 121: "G"}, "light": {118: "F", 119: "G", 121: "G"}}
_CHAIN_TYPES = {"heavy": ("H",), "light": ("K", "L")}
LENGTHS = {"heavy": (100, 145), "light": (90, 130)}  # residues of the domain, insertions included
SHORTEST = 20  # residues; below, nothing is given to the library
BATCH = 32


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
        on_cpu: False lets the library take an accelerator where it finds one.

    Attributes: `num_numbered` and `seconds`, what was spent so far.

    Cost: 0.12 s a distinct chain on one CPU thread, and 2 s for the first import.
    """

    on_cpu: bool = True
    num_numbered: int = 0
    seconds: float = 0.0
    _known: dict[str, NumberedDomain | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Raises `MissingDependencyError` where anarcii is not installed, or does not import."""
        require("anarcii", "numbering", "numbering antibodies")

    def number(self, sequences: Iterable[str]) -> list[NumberedDomain | None]:
        """The domain in each sequence; None where there is none, or letters that are no residues."""
        asked = list(sequences)
        new = [one for one in dict.fromkeys(asked) if one not in self._known and _may_be_numbered(one)]
        if new:
            start = time.perf_counter()
            self._known.update(zip(new, self._run(new)))
            self.seconds += time.perf_counter() - start
            self.num_numbered += len(new)
        return [self._known.get(one) for one in asked]

    def cost(self) -> dict[str, float | int | None]:
        """Distinct chains numbered, seconds, and seconds a chain; JSON-able."""
        mean = self.seconds / self.num_numbered if self.num_numbered else None
        return {"num_numbered": self.num_numbered, "seconds": self.seconds, "seconds_per_chain": mean}

    def _run(self, sequences: Sequence[str]) -> list[NumberedDomain | None]:
        import torch
        from anarcii import Anarcii

        num_threads = torch.get_num_threads()
        try:
            # It sets the process's threads when it is made; a number below 1 would take all cores.
            model = Anarcii(seq_type="antibody", mode="speed", batch_size=BATCH, cpu=self.on_cpu, ncpu=num_threads)
            found = model.number({str(place): one for place, one in enumerate(sequences)})
        finally:
            torch.set_num_threads(num_threads)
        return [_read(found[str(place)], one) for place, one in enumerate(sequences)]


def find_domain_problem(domain: NumberedDomain | None, chain: str) -> str | None:
    """Why a domain is not one whole variable domain of a "heavy" or "light" chain; None where it is."""
    if domain is None:
        return f"{chain} chain is not numbered as a variable domain"
    if domain.chain_type not in _CHAIN_TYPES[chain]:
        return f"{chain} chain is of type {domain.chain_type}"
    for position, residue in CONSERVED.items():
        found = domain.positions.get(position, "nothing")
        if found != residue:
            return f"{chain} chain has {found} at position {position}, where {residue} is conserved"
    if any(domain.positions.get(position) != residue for position, residue in _J_MOTIF[chain].items()):
        motif = "".join(domain.positions.get(position, "-") for position in range(118, 122))
        return f"{chain} chain has {motif} for the J motif {'WGxG' if chain == 'heavy' else 'FGxG'}"
    shortest, longest = LENGTHS[chain]
    if not shortest <= domain.length <= longest:
        return f"{chain} domain of {domain.length} residues, not {shortest} to {longest}"
    if domain.num_outside > MAX_OUTSIDE:
        return f"{chain} chain with {domain.num_outside} residues outside its variable domain"
    return None


def _may_be_numbered(sequence: str) -> bool:
    return len(sequence) >= SHORTEST and RESIDUES.issuperset(sequence)


def _read(found: Any, sequence: str) -> NumberedDomain | None:
    """anarcii's answer for a sequence: {"numbering": [((position, insertion), residue or "-"), ...], ...}."""
    if found["error"] or not found["numbering"]:
        return None
    residues = [(position, insertion.strip(), one) for (position, insertion), one in found["numbering"] if one != "-"]
    regions = {
        name: "".join(one for position, _, one in residues if first <= position <= last)
        for name, (first, last) in REGIONS.items()
    }
    positions = {position: one for position, insertion, one in residues if not insertion}
    return NumberedDomain(found["chain_type"], positions, regions, len(sequence) - len(residues))

"""How human antibodies are by OASis: the share of their 9-residue peptides that human antibody repertoires hold.

Source: D. Prihoda et al., BioPhi, mAbs 14 (2022), 2020203; peptides of at least 10 % of the subjects of the Observed
Antibody Space, as promb (MIT) ships them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...evaluation._arrays import FloatArray
from ...optional import require
from .rows import AntibodyRows

PEPTIDE = 9


@dataclass
class Humanness:
    """The share of a pair's 9-mers that are human; the peptides are loaded when they are first asked for.

    Attributes: `load_s`, seconds that loading took; None before.

    Cost: 7 to 30 s and 0.8 GB to load, then 0.1 ms a chain.
    """

    load_s: float | None = None
    _database: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises `MissingDependencyError` where promb is not installed, or does not import."""
        require("promb", "humanness", "OASis humanness")

    def score(self, rows: AntibodyRows) -> FloatArray:
        """(n,), of both chains together; 0 for a pair that is too short to hold a peptide."""
        return np.array([self.score_chains(filter(None, pair)) for pair in rows.pairs], dtype=np.float64)

    def score_chains(self, chains: Iterable[str]) -> float:
        """The share over the peptides of all chains; 0 where they hold none."""
        peptides = [one[i : i + PEPTIDE] for one in chains for i in range(len(one) - PEPTIDE + 1)]
        known = self._load()
        return sum(known.contains(one) for one in peptides) / len(peptides) if peptides else 0.0

    def _load(self) -> Any:
        if self._database is None:
            import promb

            start = time.perf_counter()
            self._database = promb.init_db("human-oas", verbose=False)
            self.load_s = time.perf_counter() - start
        return self._database

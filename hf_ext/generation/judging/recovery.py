"""How like the antibodies that are known to bind the same antigen, and were held out, each output is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data.near_copies import pair_identities
from ...evaluation._arrays import FloatArray
from ...evaluation.scores import Score
from .numbering import REGIONS, Domains
from .rows import CHAINS, AntibodyRows
from .scores import Sampling, mean_score
from .validity import find_cdr3

MAX_BINDERS = 100  # of one antigen that outputs are held against, a seeded sample of more


@dataclass(frozen=True)
class Recovery:
    """Identity to the held-out binder of the same antigen that is most alike, row by row, (n,) each.

    NaN where the antigen has no held-out binder (with that region); 0 where the output has no such chain or region.

    Attributes:
        cdr3: of the heavy chain's CDR3, found by pattern.
        heavy, light: of whole chains, most of which is germline in any antibody.
        regions: "heavy CDR1" and so on, from numbering; empty without it.
    """

    cdr3: FloatArray
    heavy: FloatArray
    light: FloatArray
    regions: dict[str, FloatArray]

    def scores(self, sampling: Sampling) -> dict[str, Score]:
        """The mean of each, by name, with its interval."""
        columns = {"cdr3": self.cdr3, "heavy": self.heavy, "light": self.light, **self.regions}
        return {name: mean_score(values, sampling) for name, values in columns.items()}


def judge_recovery(
    rows: AntibodyRows,
    held_out: AntibodyRows,
    domains: Domains | None = None,
    held_out_domains: Domains | None = None,
    seed: int = 0,
) -> Recovery:
    """Holds every output against the held-out binders of its antigen, and takes the one that is most alike.

    More binders make a higher number likelier: compare only what was held against the same ones, as the baselines are.

    Args:
        rows: the outputs.
        held_out: binders that training did not hold, with their antigens.
        domains, held_out_domains: of both, for regions; None: chains and CDR3 only.
        seed: of the sample of an antigen's binders, where there are more than 100.

    Cost: 10 us per output and binder of its antigen.
    """
    left, right = _pairs(rows.antigens, held_out.antigens, seed)

    def best(mine: Sequence[str], theirs: Sequence[str]) -> FloatArray:
        return _best(len(rows), left, right, mine, theirs)

    regions: dict[str, FloatArray] = {}
    if domains is not None and held_out_domains is not None:
        regions = _recover_regions(best, domains, held_out_domains)
    cdr3 = best(*([find_cdr3(one) or "" for one in each.heavy] for each in (rows, held_out)))
    chains = [best(rows.chain(chain), held_out.chain(chain)) for chain in CHAINS]
    return Recovery(cdr3, chains[0], chains[1], regions)


def _recover_regions(best: Callable[..., FloatArray], mine: Domains, theirs: Domains) -> dict[str, FloatArray]:
    found = {}
    for chain in CHAINS:
        for region in REGIONS:
            columns = [
                [one.regions[region] if one else "" for one in getattr(domains, chain)] for domains in (mine, theirs)
            ]
            found[f"{chain} {region}"] = best(*columns)
    return found


def _pairs(antigens: Sequence[str], known: Sequence[str], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and binders of the same antigen, as two equally long columns of places."""
    binders: dict[str, list[int]] = {}
    for place, antigen in enumerate(known):
        binders.setdefault(antigen, []).append(place)
    generator = np.random.default_rng(seed)
    chosen: dict[str, Any] = {
        antigen: places if len(places) <= MAX_BINDERS else generator.permutation(places)[:MAX_BINDERS]
        for antigen, places in binders.items()
    }
    sizes = [len(chosen.get(antigen, ())) for antigen in antigens]
    right = [np.asarray(chosen[antigen], dtype=np.int64) for antigen in antigens if antigen in chosen]
    return np.repeat(np.arange(len(antigens)), sizes), np.concatenate(right or [np.zeros(0, dtype=np.int64)])


def _best(num_rows: int, left: np.ndarray, right: np.ndarray, mine: Sequence[str], theirs: Sequence[str]) -> FloatArray:
    """The highest identity of each row to its binders that have such a sequence."""
    there = np.array([bool(theirs[place]) for place in right], dtype=bool)
    left, right = left[there], right[there]
    identity = pair_identities([mine[row] for row in left], [theirs[place] for place in right])
    found = np.full(num_rows, np.nan)
    np.fmax.at(found, left, identity)
    return found

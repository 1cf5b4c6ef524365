"""Whether an output is a pair of protein chains at all: its tokens, its letters, both chains. It says no more."""

from __future__ import annotations

from .rows import AntibodyRows

RESIDUES = frozenset("ACDEFGHIKLMNPQRSTVWY")


def find_structure_problems(rows: AntibodyRows, needs_light: bool = True) -> list[str | None]:
    """What is wrong with the form of each row; None where it is a pair of chains of the 20 residues.

    This passes for any string of residues: `find_motif_problems` and `numbering` say whether it is an antibody.

    Args:
        needs_light: whether a heavy chain alone is a problem.
    """
    return [
        malformed or _chain_problem("heavy", heavy) or _light_problem(light, needs_light)
        for heavy, light, malformed in zip(rows.heavy, rows.light, rows.malformed)
    ]


def _light_problem(light: str | None, needs_light: bool) -> str | None:
    if light is None:
        return "no light chain" if needs_light else None
    return _chain_problem("light", light)


def _chain_problem(chain: str, sequence: str) -> str | None:
    if not sequence:
        return f"no {chain} chain"
    foreign = sorted(set(sequence) - RESIDUES)
    return f"{chain} chain with {', '.join(foreign)}" if foreign else None

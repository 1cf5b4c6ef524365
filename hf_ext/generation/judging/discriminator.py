"""A trained affinity model that judges generated antibodies, and what its own record says it is worth."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...affinity.predictor import AffinityPredictor, find_model
from ...errors import ArgumentError
from ...evaluation._arrays import FloatArray
from .rows import AntibodyRows
from .validity import find_structure_problems

RECORD = "all_results.json"
ROLES = ("heavy", "light", "antigen")
_NAMES = {  # how columns are called, with - and blanks as _; the first of a role that fits
    "heavy": ("heavy", "vh", "h"),
    "light": ("light", "vl", "l"),
    "antigen": ("antigen", "ag", "target"),
}


@dataclass(frozen=True)
class Trust:
    """Whether a discriminator's numbers may be believed here.

    Attributes:
        doubts: clauses that say why not; none where they may.
        label_std: standard deviation of its test labels, label units; None where its record does not say.
    """

    doubts: tuple[str, ...] = ()
    label_std: float | None = None

    @property
    def is_trusted(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.doubts


@dataclass(frozen=True)
class Discriminator:
    """Predicts the affinity of antibodies for their antigens.

    Attributes:
        predictor: of a trained affinity model.
        roles: column that it reads -> "heavy", "light" or "antigen".
        record: its `all_results.json`; None where that was not beside it.
        name: as the user gave it.
    """

    predictor: AffinityPredictor
    roles: Mapping[str, str]
    record: Mapping[str, Any] | None = field(default=None, repr=False)
    name: str = "discriminator"

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        columns: Mapping[str, str] | None = None,
        device: str | None = None,
    ) -> Discriminator:
        """Loads what `recipes/max_speed.py` wrote, from a folder or from the Hub, with its record where there is one.

        Args:
            columns: column of the model -> "heavy", "light" or "antigen"; None finds that out by their names.

        Raises:
            ArgumentError: as `AffinityPredictor.from_pretrained`; or columns that cannot be told apart.

        Cost: as `AffinityPredictor.from_pretrained`.
        """
        folder = find_model(name_or_path, revision)
        predictor = AffinityPredictor.from_pretrained(folder, device=device)
        return cls(predictor, find_roles(predictor.columns, columns), read_record(folder), str(name_or_path))

    def predict(self, rows: AntibodyRows) -> FloatArray:
        """(n,) label units; NaN for rows that it cannot read: malformed, no such chain, too long for its encoder.

        Raises:
            DataError: an antigen holds what is no residue, or a prediction is not finite.
        """
        columns = {name: self._column(rows, role) for name, role in self.roles.items()}
        readable = self._find_readable(rows, columns)
        found = np.full(len(rows), np.nan)
        if readable.any():
            chosen = {name: [one for one, keep in zip(values, readable) if keep] for name, values in columns.items()}
            found[readable] = self.predictor.predict(chosen)
        return found

    def _column(self, rows: AntibodyRows, role: str) -> list[str]:
        return list(rows.antigens) if role == "antigen" else rows.chain(role)

    def _find_readable(self, rows: AntibodyRows, columns: Mapping[str, Sequence[str]]) -> np.ndarray:
        collator = self.predictor.collator
        may_lack = {self.roles[name] for name in collator.missing_chains}
        needs_light = "light" in self.roles.values() and "light" not in may_lack
        readable = np.array([one is None for one in find_structure_problems(rows, needs_light)], dtype=bool)
        for name, parts in collator.columns.items():
            limit = collator.tokenizers[name].max_residues
            if limit is not None and collator.too_long == "error":
                readable &= np.sum([[len(one) for one in columns[part]] for part in parts], axis=0) <= limit
        return readable


def find_roles(columns: Sequence[str], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Which of heavy chain, light chain and antigen each column of a model is.

    Args:
        columns: of the model.
        given: column -> role, where names do not tell.

    Raises:
        ArgumentError: a column whose role is not told, or told twice; or a role or column that there is none of.
    """
    wrong = {name: role for name, role in (given or {}).items() if name not in columns or role not in ROLES}
    if wrong:
        raise ArgumentError(
            f"Discriminator columns {wrong}: the model reads {', '.join(columns)}, each of them one of "
            f"{', '.join(ROLES)}."
        )
    roles = {name: (given or {}).get(name) or _guess(name) for name in columns}
    known = [role for role in roles.values() if role]
    unclear = [name for name, role in roles.items() if role is None or known.count(role) > 1]
    if unclear:
        raise ArgumentError(
            f"The discriminator reads {', '.join(columns)}: what {', '.join(unclear)} stands for is not clear. Name "
            "each of these columns as heavy, light or antigen, for example {'sequence_a': 'heavy'}."
        )
    return {name: role for name, role in roles.items() if role}


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """`all_results.json` of a model's folder; None where it is not there, as on the Hub.

    Raises:
        ArgumentError: it is there and damaged.
    """
    path = Path(folder) / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArgumentError(f"{path}: damaged, no JSON ({error}). Copy the model's folder again.") from error
    return record if isinstance(record, dict) else None


def examine_record(
    record: Mapping[str, Any] | None, test_antigens: Collection[str], training_antigens: Collection[str] | None = None
) -> Trust:
    """Says what speaks against a discriminator before it has predicted anything.

    Args:
        record: its `all_results.json`; None: unknown, which is a doubt.
        test_antigens: that antibodies are generated for.
        training_antigens: that it was trained on; None: unknown, which is a doubt too.
    """
    doubts = []
    verdict = (record or {}).get("verdict") or {}
    if verdict.get("outcome") is None:
        doubts.append("what it is worth is not known: no verdict of its own test is beside it")
    elif verdict["outcome"] != "better":
        doubts.append(f"its own record says: {str(verdict.get('text', verdict['outcome'])).splitlines()[0]}")
    if training_antigens is None:
        doubts.append("whether it was trained on these antigens is not known")
    else:
        asked, seen = set(test_antigens), set(training_antigens)
        if asked & seen:
            doubts.append(f"it was trained on {len(asked & seen):,} of these {len(asked):,} antigens")
    std = (((record or {}).get("labels") or {}).get("test") or {}).get("std")
    return Trust(tuple(doubts), float(std) if isinstance(std, int | float) and std > 0 else None)


def _guess(column: str) -> str | None:
    words = column.lower().replace("-", "_").replace(" ", "_").split("_")
    fitting = [role for role, names in _NAMES.items() if any(word in names for word in words)]
    return fitting[0] if len(fitting) == 1 else None

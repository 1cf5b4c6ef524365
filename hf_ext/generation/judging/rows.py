"""Antibodies with the antigen that each was written for, or is known to bind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...errors import DataError

CHAINS = ("heavy", "light")


class HasChains(Protocol):
    """A pair: `heavy`, and `light`, None where there is none."""

    @property
    def heavy(self) -> str: ...

    @property
    def light(self) -> str | None: ...


@dataclass(frozen=True)
class AntibodyRows:
    """n antibodies as columns of equal length.

    Attributes:
        heavy: capital letters; "" where there is none.
        light: None where the antibody is a heavy chain alone.
        antigens: what each was written for.
        malformed: what was wrong with the tokens it was decoded from; None where nothing was.
    """

    heavy: tuple[str, ...]
    light: tuple[str | None, ...]
    antigens: tuple[str, ...]
    malformed: tuple[str | None, ...]

    def __post_init__(self) -> None:
        sizes = {name: len(getattr(self, name)) for name in ("heavy", "light", "antigens", "malformed")}
        if len(set(sizes.values())) > 1:
            raise DataError(f"Antibodies in columns of unequal length: {sizes}. Give each row one of each.")

    @classmethod
    def of(
        cls, pairs: Iterable[HasChains], antigens: Sequence[str], malformed: Sequence[str | None] | None = None
    ) -> AntibodyRows:
        """From pairs with `heavy` and `light`, row by row as `antigens` and `malformed`.

        Raises:
            DataError: other numbers of them.
        """
        pairs = list(pairs)
        problems = [None] * len(pairs) if malformed is None else malformed
        light = tuple(pair.light or None for pair in pairs)
        return cls(tuple(pair.heavy for pair in pairs), light, tuple(antigens), tuple(problems))

    @classmethod
    def of_columns(cls, heavy: Sequence[str], light: Sequence[str | None], antigens: Sequence[str]) -> AntibodyRows:
        """From columns; raises `DataError` where their lengths differ."""
        chains = tuple(one or None for one in light)
        return cls(tuple(heavy), chains, tuple(antigens), (None,) * len(heavy))

    def __len__(self) -> int:
        return len(self.heavy)

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        """(heavy, light) of each row."""
        return list(zip(self.heavy, self.light))

    def chain(self, name: str) -> list[str]:
        """The "heavy" or "light" chains, "" where there is none."""
        return [one or "" for one in getattr(self, name)]

    def select(self, rows: Any) -> AntibodyRows:
        """Some rows: (n,) bool, or row numbers."""
        asked = np.asarray(rows)
        chosen = np.arange(len(self))[asked if asked.size else asked.astype(np.int64)]
        columns = (self.heavy, self.light, self.antigens, self.malformed)
        heavy, light, antigens, malformed = (tuple(column[i] for i in chosen) for column in columns)
        return AntibodyRows(heavy, light, antigens, malformed)

"""Which rows an evaluation while training looks at: a fixed subset of each set, and the rest where it is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..distributed import Team
from ..evaluation.dataset_subset import ChosenRows, choose_rows
from .evaluation_schedule import subset_size

FEW_ROWS = 50

logger = logging.getLogger(__name__)

# A loader as evaluations of the run use it, of a dataset and of the positions of some of its rows (None: of all).
MakeLoader = Callable[[Any, Any], Any]


@dataclass
class EvalParts:
    """An evaluation set in two parts: the subset, and the rest, whose loader is made when it is needed first."""

    dataset: Any
    settings: tuple[Any, ...]  # that the choice and its loaders were made with
    chosen: ChosenRows
    subset: Any
    rest: Any = None

    def rest_loader(self, make_loader: MakeLoader) -> Any:
        """Of the rows outside the subset; of a stream, which cannot be entered at a row, of all."""
        if self.rest is None:
            self.rest = make_loader(self.dataset, self.chosen.rest if self.chosen.kept is None else None)
        return self.rest


class EvaluationRows:
    """The parts of each evaluation set, chosen once: as long as the set and what decides the choice are the same.

    Loaders are kept, since Accelerate holds on to every loader that it prepared, and so to its persistent workers.
    """

    def __init__(self, args: Any, team: Team):
        self._args, self._team = args, team
        self._parts: dict[str, EvalParts] = {}

    def chosen(self, name: str) -> ChosenRows:
        """The choice that was made last in the set of that name ("" where there is but one)."""
        return self._parts[name].chosen

    def parts(self, name: str, sets: Any, group_column: str | None, make_loader: MakeLoader) -> EvalParts:
        """The parts of `sets[name]`, or of `sets` itself where the name is "", with the shares of their groups.

        Raises:
            DataError: see `choose_rows`.
        """
        dataset, args = sets[name] if name else sets, self._args
        seed = args.seed if args.data_seed is None else args.data_seed
        settings = (subset_size(args), group_column, seed, args.eval_batch_size)
        known = self._parts.get(name)
        if known is not None and known.dataset is dataset and known.settings == settings:
            return known
        chosen = choose_rows(dataset, size=settings[0], group_column=group_column, seed=seed)
        if len(chosen.rows) < FEW_ROWS and not chosen.are_all and self._team.is_main:
            self._warn_of_few(name, chosen)
        loader = make_loader(dataset, chosen.rows) if chosen.kept is None else make_loader(chosen.kept, None)
        self._parts[name] = EvalParts(dataset, settings, chosen, loader)
        return self._parts[name]

    def _warn_of_few(self, name: str, chosen: ChosenRows) -> None:
        logger.warning(
            "eval_subset=%g leaves %d of %d evaluation rows%s: scores of so few swing by chance, and with "
            "them which model counts as the best. Give %d or more, or leave it out.",
            *(self._args.eval_subset, len(chosen.rows), chosen.num_rows, f" ({name})" if name else "", FEW_ROWS),
        )

"""The time of `gpu_session.py`: its parts within a budget, and what a part does in rounds within its own.

Nothing here imports torch, and time passes on the clock that is given, so that a test can tell it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_ext.errors import RunEnded
from hf_ext.files import write_text

ROOT = Path(__file__).resolve().parents[1]
CUT = "cut"
LEAST_S = 30.0  # a part that was cut begins anew with as much: it needs 12 s to start, and some for a model
Turn = Callable[[], dict[str, Any]]
# What a side may raise that cannot run on this card, or not yet: it is written down, and the others go on.
TURN_ERRORS = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(ImportError, OSError, MemoryError, RunEnded),
)


def run_parts(
    parts: Sequence[str], budget_s: float, run: Callable[[str, float], str], clock: Callable[[], float] = time.monotonic
) -> None:
    """Runs each part once, then those that were cut again, until the budget is used.

    No part takes more than an even share of the budget; what one leaves, later ones share.

    Args:
        budget_s: of all parts.
        run: runs a part, given its name and the seconds after which it must have ended; returns how it ended.
        clock: seconds that only grow.
    """
    ends = clock() + budget_s
    cut = []
    for number, part in enumerate(parts):
        share = (ends - clock()) / (len(parts) - number)
        if run(part, min(share, budget_s / len(parts))) == CUT:
            cut.append(part)
    for part in cut:
        if ends - clock() >= LEAST_S:
            run(part, min(ends - clock(), budget_s / len(parts)))


@dataclass
class Entry:
    """What a part has found so far, and how long it may go on.

    Attributes:
        result: of the part, JSON-able: `rounds` of each side, `problems` of sides that failed, `now` what is under way.
        ends: on `clock`. turn_ends: the same of the turn at hand, so that each side has one.
        save: writes the session with it.
    """

    result: dict[str, Any]
    ends: float
    save: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    turn_ends: float = 0.0
    _warm_s: dict[str, float] = field(default_factory=dict)

    def begin(self, what: str, least_s: float = 0.0) -> bool:
        """Writes down what comes next; whether `least_s` are left for it."""
        self.result["now"] = what
        self.save()
        return self.ends - self.clock() >= least_s

    def take_rounds(self, sides: Mapping[str, Turn], rounds: int, warms_up: bool = False, least_s: float = 0.0) -> bool:
        """Runs sides in turn, every second round backwards, until each has its rounds; whether all have.

        Goes on from the rounds that `result` holds, and saves after each turn. A side that fails says why under
        `problems`, and has no further turn. No turn begins that would end too late, by what the one before took, or
        would take again (`again_s` of it).

        Args:
            warms_up: the first turn of each side in this process is no round.
            least_s: how much time there must be for the first turn of a side.
        """
        found = self.result.setdefault("rounds", {})
        problems = self.result.setdefault("problems", {})
        for number in range(-1 if warms_up else 0, rounds):
            for side in [*sides][:: -1 if number % 2 else 1]:
                have = len(found.get(side, ()))
                if side in problems or have == rounds or 0 <= number < have:
                    continue
                if not self.begin(f"{side}, round {number + 1}", self._estimate_s(side, least_s)):
                    return False
                began = self.clock()
                waiting = [one for one in sides if one not in found and one not in problems]
                self.turn_ends = began + (self.ends - began) / max(1, len(waiting))
                try:
                    turn = sides[side]()
                except TURN_ERRORS as error:
                    problems[side] = f"{type(error).__name__}: {first_line(str(error))}"
                    self.save()
                    continue
                took_s = self.clock() - began
                if number < 0:
                    self._warm_s[side] = took_s
                    continue
                found.setdefault(side, []).append({**turn, "turn_s": round(took_s, 3)})
                self.save()
        return True

    def _estimate_s(self, side: str, least_s: float) -> float:
        """Of a turn: as the last one; after the warm-up, which may have compiled, as the longest of other sides."""
        turns = {name: rounds[-1] for name, rounds in self.result["rounds"].items()}
        last = {name: turn.get("again_s", turn["turn_s"]) for name, turn in turns.items()}
        if side in last or side not in self._warm_s:
            return last.get(side, least_s)
        return min(self._warm_s[side], max(last.values(), default=self._warm_s[side]))


def first_line(text: str) -> str:
    """Of a message, without folders of this machine."""
    lines = [line.strip() for line in text.replace(str(ROOT), "PROJECT").splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def open_entry(path: Path, part: str, ends: float) -> Entry:
    """Opens that of a part, in its process: the session that started it does not write meanwhile."""
    session = json.loads(path.read_text(encoding="utf-8"))
    return Entry(session["parts"][part]["result"], ends, lambda: save_session(path, session))


def save_session(path: Path, session: dict[str, Any]) -> None:
    write_text(path, json.dumps(session, indent=1) + "\n")

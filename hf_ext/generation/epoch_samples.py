"""At each evaluation: a few antibodies for the same validation antigens, scored and kept for the report."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..files import write_text
from .building import Inputs
from .judging.rows import AntibodyRows
from .judging.validity import find_problems
from .measuring import Decoded, sample_rows
from .preparing import PairData

FILE = "epoch_samples.jsonl"

logger = logging.getLogger(__name__)


class EpochSamples(TrainerCallback):
    """Writes antibodies for some validation antigens whenever the model is evaluated, always with the same draws.

    What was measured goes to the trainer's log history (`sampled_valid`, `sampled_unique`, `sampled_memorised`, shares
    of the antibodies), and with the antibodies to `epoch_samples.jsonl`, a line per evaluation. The main process writes
    while the others wait at the next step.

    Args:
        folder: of the run.
        num: antibodies, one for each of so many antigens; antigens repeat where there are fewer.
        data: of the stage.
        inputs: how antigens become tokens.
        decoded: how tokens are chosen.
        seed: of the draws.

    Cost: up to 320 passes of the decoder over one token of each.
    """

    def __init__(
        self,
        folder: str,
        num: int,
        data: PairData,
        inputs: Inputs,
        decoded: Decoded,
        seed: int,
    ):
        self._path = Path(folder) / FILE
        self._known = set(data.antibodies("train").pairs)
        distinct = list(dict.fromkeys(data.antibodies("validation").antigens))
        self._antigens = [distinct[i % len(distinct)] for i in range(num)]
        self._inputs, self._decoded, self._needs_light, self._seed = inputs, decoded, data.needs_light, seed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A continued run drops what was written after the step that it continues from."""
        if state.is_world_process_zero and self._path.is_file():
            write_text(self._path, "".join(self._lines_before(state.global_step + 1 if state.global_step else 0)))

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called by Trainer after each evaluation."""
        if not (self._antigens and state.is_world_process_zero):
            return
        rows = sample_rows(model, self._inputs, self._antigens, self._decoded, self._seed)
        scores = self._score(rows)
        entry = {"epoch": round(float(state.epoch or 0), 2), "step": state.global_step}
        state.log_history.append({**scores, **entry})
        columns = zip(rows.antigens, rows.heavy, rows.light)
        samples = [dict(zip(("antigen", "heavy", "light"), one)) for one in columns]
        line = json.dumps({**entry, **scores, "samples": samples}) + "\n"
        # An evaluation that a stop gave up is made up for in the run that goes on, at the same step.
        write_text(self._path, "".join([*self._lines_before(state.global_step), line]))
        shown = ", ".join(f"{name.removeprefix('sampled_')} {value:.0%}" for name, value in scores.items())
        logger.info("Step %d, %d antibodies: %s; the first: %s", entry["step"], len(rows), shown, _show(rows))

    def _lines_before(self, step: int) -> list[str]:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.is_file() else []
        return [line for line in lines if json.loads(line)["step"] < step]

    def _score(self, rows: AntibodyRows) -> dict[str, float]:
        num_valid = find_problems(rows, None, self._needs_light).count(None)
        num_known = sum(pair in self._known for pair in rows.pairs)
        numbers = {"valid": num_valid, "unique": len(set(rows.pairs)), "memorised": num_known}
        return {f"sampled_{name}": number / len(rows) for name, number in numbers.items()}


def _show(rows: AntibodyRows, most: int = 60) -> str:
    heavy: Sequence[str] = rows.heavy
    return f"{heavy[0][:most]}..." if len(heavy[0]) > most else heavy[0]

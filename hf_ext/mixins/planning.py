"""The plan inside a Trainer: made and applied before the Accelerator exists, written beside the results."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

from transformers import Trainer

from ..checkpoints.disk import describe_failure, is_disk_failure
from ..checkpoints.folder_lock import find_other_run
from ..overrides import find_own_loss
from ..plain_arguments import as_fast_arguments
from ..plan import Plan, describe_model, make_plan
from ..processes import check_fsdp, check_parallelism
from ..speedups import Run

logger = logging.getLogger(__name__)


PARAMETERS = tuple(inspect.signature(Trainer.__init__).parameters)[1:]


class PlanMixin:
    """Decides and applies the speed-ups of `args` before Trainer reads its arguments.

    Takes what Trainer takes, by position too, and `plan`. Where a speed-up is applied, `trainer.args` is a copy with
    what the plan set: a second trainer made from the caller's `args` does not scale a learning rate that is scaled
    already. Without, it is the caller's; of plain `TrainingArguments`, `as_fast_arguments` of them.

    `keeps_records`: whether anything was asked for that Trainer does not have. Without, a run leaves in its output
    folder what Trainer's leaves, and neither `plan.json` nor `throughput.json`.

    Raises (from the constructor):
        PlanRefused: a request would do something else than asked on this machine, model or data.
    """

    def __init__(self, *args: Any, plan: Plan | None = None, **kwargs: Any):
        given = _by_name(args, kwargs)
        arguments = as_fast_arguments(given.get("args"))
        model, collator, dataset = (given.get(name) for name in ("model", "data_collator", "train_dataset"))
        self.keeps_records = plan is not None or arguments.asks_for_more
        self.plan = plan or make_plan(arguments, model, dataset, collator)
        self.plan.check()
        if any(decision.status == "applied" for decision in self.plan.decisions):
            arguments = copy.copy(arguments)
            arguments.accelerator_config = copy.copy(arguments.accelerator_config)
        check_fsdp(arguments)
        check_parallelism(arguments, describe_model(model).families)
        own_loss = find_own_loss(self, given.get("compute_loss_func"))
        self._run = Run(arguments, model, collator, dataset, own_loss=own_loss)
        try:
            self.plan.apply(self._run)
            given |= {"args": arguments, "model": self._run.model}  # a speed-up may have wrapped it
            super().__init__(**given)
        except BaseException:
            self._run.restore()
            raise
        self._save_plan()

    def record_evidence(self, name: str, **evidence: Any) -> None:
        """Adds a measurement to one decision and rewrites `plan.json`."""
        self.plan.record(name, **evidence)
        self._save_plan()

    def _save_plan(self) -> None:
        if not (self.keeps_records and self.is_world_process_zero()):  # type: ignore[attr-defined]
            return
        if other := find_other_run(self.args.output_dir):  # type: ignore[attr-defined]
            logger.warning("plan.json is not written: %s", other)
            return
        try:
            self.plan.save(self.args.output_dir)  # type: ignore[attr-defined]
        except OSError as error:
            if not is_disk_failure(error):
                raise
            # A full disk must not cost the model that is trained: checkpoints have their own rules for that.
            logger.error("plan.json was not written: %s", describe_failure(error, self.args.output_dir))  # type: ignore[attr-defined]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; then adds what speed-ups measured while it trained to the plan."""
        measures = {name: start() for name, start in self._run.measurements.items()}
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        for name, measure in measures.items():
            self.record_evidence(name, **measure())
        return output

    def end(self) -> None:
        """As in Trainer; also switches back what the plan switched in the process and in the model."""
        self._run.restore()
        super().end()  # type: ignore[misc]

    def close(self) -> None:
        """As `LeavingMixin`; also switches back what the plan switched in the process and in the model."""
        self._run.restore()
        super().close()  # type: ignore[misc]


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor by their names, those without one in the order of Trainer's.

    By name, because a class between this one and Trainer may have another order.
    """
    if len(args) > len(PARAMETERS):
        raise TypeError(f"{len(args)} arguments by position: Trainer takes {', '.join(PARAMETERS)}.")
    named = dict(zip(PARAMETERS, args))
    if twice := named.keys() & kwargs.keys():
        raise TypeError(f"Given twice, by position and by name: {', '.join(sorted(twice))}.")
    return {**named, **kwargs}

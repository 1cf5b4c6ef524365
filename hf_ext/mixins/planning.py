"""The plan inside a Trainer: made and applied before the Accelerator exists, written beside the results."""

from __future__ import annotations

import copy
import logging
from typing import Any

from ..checkpoints.disk import describe_failure, is_disk_failure
from ..plan import Plan, describe_model, make_plan
from ..processes import check_fsdp, check_parallelism
from ..speedups import Run
from ..training_args import FastTrainingArguments

logger = logging.getLogger(__name__)


class PlanMixin:
    """Decides and applies the speed-ups of `args` before Trainer reads its arguments.

    `trainer.args` is a copy with what the plan set; the caller's `args` stay as they are, so that a second trainer
    made from them does not scale a learning rate that is scaled already.

    Raises (from the constructor):
        PlanRefused: a request would do something else than asked on this machine, model or data.
    """

    def __init__(
        self,
        model: Any = None,
        args: FastTrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        plan: Plan | None = None,
        **kwargs: Any,
    ):
        args = copy.copy(FastTrainingArguments(output_dir="trainer_output") if args is None else args)
        args.accelerator_config = copy.copy(args.accelerator_config)
        self.plan = plan or make_plan(args, model, train_dataset, data_collator)
        self.plan.check()
        check_fsdp(args)
        check_parallelism(args, describe_model(model).families)
        self._run = Run(args, model, data_collator, train_dataset)
        try:
            self.plan.apply(self._run)
            model = self._run.model  # a speed-up may have wrapped it
            super().__init__(model, args, data_collator, train_dataset, eval_dataset, **kwargs)  # type: ignore[call-arg]
        except BaseException:
            self._run.restore()
            raise
        self._save_plan()

    def record_evidence(self, name: str, **evidence: Any) -> None:
        """Adds a measurement to one decision and rewrites `plan.json`."""
        self.plan.record(name, **evidence)
        self._save_plan()

    def _save_plan(self) -> None:
        if not self.is_world_process_zero():  # type: ignore[attr-defined]
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

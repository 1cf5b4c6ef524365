"""The plan of one run: applied before Trainer reads its arguments, measured as it trains, kept beside its results."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainingArguments, enable_full_determinism, set_seed

from ..checkpoints import find_other_run
from ..data import kept_random_states, reads_text
from ..errors import ArgumentError
from ..files import Facts, describe_failure, is_disk_failure
from ..models import replaced
from ..plan import Plan, describe_model, make_plan
from ..processes import check_fsdp, check_parallelism
from ..speedups import Run
from ..training_args import asks_for_more, complete_arguments
from .optimizers import check_given, require_optimizer

logger = logging.getLogger(__name__)


class PlannedRun:
    """Carries a plan out on a run, and keeps `plan.json` as the plan is.

    Attributes:
        plan: the decisions; `run`: what they are applied to, and how to switch it back.
        keeps_records: whether the run leaves `plan.json` in its output folder.
    """

    def __init__(self, plan: Plan, run: Run, keeps_records: bool = True):
        self.plan = plan
        self.run = run
        self.keeps_records = keeps_records
        self._decided = [*plan.decisions]

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Carries out what was decided; switches it back where that fails, or what is built on it in here.

        Raises:
            PlanRefused: a decision that a measurement made necessary to take again is refused.
            MissingDependencyError: the optimizer, or a decision, needs a package that does not work here.
        """
        require_optimizer(self.run.args)
        for module in self.run.model.modules() if isinstance(self.run.model, torch.nn.Module) else ():
            # bitsandbytes repacks its 4-bit layers (0.50.2) when they first evaluate on a CPU with AVX512-BF16, and
            # they then give no gradient.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        try:
            self.plan.apply(self.run)
            yield
        except BaseException:
            self.run.restore()
            raise

    def renew(self, make: Callable[[], Any]) -> Any:
        """Returns the model that `make` gives now, from the seed of the arguments, with the plan carried out on it.

        Arguments stay as they are: a search, or the user, may have set them since. Random states are those that `make`
        leaves, as in Trainer. Raises as `applying`.
        """
        self.run.restore()
        self.run.model = None  # two of them may not fit into the memory
        seed_process(self.run.args)
        self.run.model = make()
        self.plan.decisions = [*self._decided]
        with replaced(self.run, args=copy.copy(self.run.args)), kept_random_states(), self.applying():
            return self.run.model

    def applied(self, name: str) -> bool:
        """Tells whether a speed-up was applied, see `Plan.applied`."""
        return self.plan.applied(name)

    def record(self, name: str, **evidence: object) -> None:
        """Adds a measurement to one decision and rewrites `plan.json`."""
        self.plan.record(name, **evidence)
        self.save()

    def save(self) -> None:
        """Writes `plan.json` on the main process, unless another run works in the output folder.

        A full disk is said and must not cost the model that is trained: checkpoints have their own rules for that.

        Raises:
            OSError: for another reason than the disk.
        """
        folder = self.run.args.output_dir
        if not (self.keeps_records and self.run.args.process_index == 0):
            return
        if other := find_other_run(folder):
            logger.warning("plan.json is not written: %s", other)
            return
        try:
            self.plan.save(folder)
        except OSError as error:
            # Two runs that begin in a folder at the same moment may take away each other's draft.
            if not (is_disk_failure(error) or isinstance(error, FileNotFoundError)):
                raise
            logger.error("plan.json was not written: %s", describe_failure(error, folder))


def seed_process(args: TrainingArguments) -> None:
    """Sets seeds as Trainer does before it calls `model_init`."""
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)


def plan_run(given: Facts, plan: Plan | None, own_loss: str | None, own_batches: str | None) -> PlannedRun:
    """Decides the speed-ups of a run, and checks the decisions; changes nothing.

    Where a speed-up will be applied, rows are text or workers would live on, the run's arguments are a copy: a second
    trainer made from the caller's does not scale a learning rate that is scaled already.

    Args:
        given: Trainer's arguments by name.
        plan: one that was made before; None makes it.
        own_loss, own_batches: see `Run`.

    Raises:
        PlanRefused: a request would do something else than asked on this machine, model or data.
        ArgumentError: an optimizer that DeepSpeed would not take, or whose rate is its own, with `lr_scaling`.
    """
    args = complete_arguments(given.get("args"))
    model, collator, dataset = (given.get(name) for name in ("model", "data_collator", "train_dataset"))
    keeps_records = plan is not None or asks_for_more(args)
    plan = plan or make_plan(args, model, dataset, collator)
    plan.check()
    is_text = reads_text(collator)
    lives_on = args.dataloader_persistent_workers
    if is_text or lives_on or any(decision.status == "applied" for decision in plan.decisions):
        args = copy.copy(args)
        args.accelerator_config = copy.copy(args.accelerator_config)
    if is_text:  # columns that no model names
        args.remove_unused_columns = False
    if lives_on:
        logger.warning("dataloader_persistent_workers is off: a continued run would draw other random numbers.")
        args.dataloader_persistent_workers = False
    check_fsdp(args)
    check_parallelism(args, describe_model(model).families)
    optimizers = given.get("optimizers") or ()
    check_given(args, optimizers)
    if args.lr_scaling and any((*optimizers, given.get("optimizer_cls_and_kwargs"))):
        raise ArgumentError("lr_scaling: the trainer was given an optimizer, which has its own rate. Leave one out.")
    run = Run(args, model, collator, dataset, own_loss=own_loss, own_batches=own_batches)
    return PlannedRun(plan, run, keeps_records)

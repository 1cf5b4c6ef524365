"""Room for checkpoints: what stays, what goes, and what is stored less of where the budget is small."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..checkpoints.budget import Degradation, Sizes, check_budget, choose_degradation
from ..checkpoints.disk import free_bytes, used_bytes
from ..checkpoints.rotation import Entry, Policy, SavePlan, plan_cleanup, plan_save
from ..checkpoints.sharded_weights import OPTIMIZER
from ..checkpoints.state import expected_optimizer_bytes
from ..checkpoints.stored import Stored
from ..checkpoints.weights import export_bytes, weights_bytes
from ..hub.pins import PREFIX as PIN_PREFIX
from ..zero import STATE_FOLDER

GB = 10**9
SMALL_FILES_BYTES = 2**20  # tokenizer, configs, and what logs grow by between two checkpoints
OPTIMIZER_FILES = ("optimizer.json", "optimizer.safetensors")
STATE_FOLDERS = (f"{OPTIMIZER}/", f"{STATE_FOLDER}/")  # of FSDP2, of DeepSpeed

logger = logging.getLogger(__name__)


class DiskBudgetMixin:
    """Keeps the output folder within `save_total_size_gb`, at the moment of writing too, and rotates checkpoints.

    Raises (when training begins):
        ArgumentError: the budget is too small for what is to be kept; the message has the arithmetic.
    """

    args: Any
    model: Any
    state: Any
    optimizer: Any
    checkpoints: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._degradation: Degradation | None = None
        self._best_step_saved: int | None = None
        self._optimizer_sizes: tuple[tuple[int, ...], tuple[int, int]] | None = None
        self.add_callback(DiskBudgetCallback(self))  # type: ignore[attr-defined]

    @property
    def optimizer_state_dtype(self) -> torch.dtype | None:
        """What optimizer state is rounded to before it is saved; None leaves it as it is."""
        steps = self._degradation.steps if self._degradation else ()
        return torch.bfloat16 if "bf16_optimizer_state" in steps else None

    def checkpoint_sizes(self) -> Sizes:
        """Upper bounds of what one checkpoint takes, without degradation."""
        weights = weights_bytes(self.model)
        if self.args.save_only_model:
            return Sizes(weights, 0, SMALL_FILES_BYTES)
        full, half = self._optimizer_bytes()
        other = SMALL_FILES_BYTES + self.early_stopping_bytes()  # type: ignore[attr-defined]
        return Sizes(weights, full, other, half)

    def _optimizer_bytes(self) -> tuple[int, int]:
        """Of the optimizer's state as it is and in bfloat16; told anew where other parameters train."""
        # Training waits for it: 100 ms for 300 parameters.
        trained = [p.numel() for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        key = (id(self.optimizer), len(trained), sum(trained))
        if self._optimizer_sizes is None or self._optimizer_sizes[0] != key:
            full, half = (expected_optimizer_bytes(self.optimizer, dtype) for dtype in (None, torch.bfloat16))
            self._optimizer_sizes = (key, (full, half))
        return self._optimizer_sizes[1]

    def rotation_policy(self) -> Policy:
        """What the arguments ask to keep; with degradation, what was decided when training began."""
        if self._degradation:
            return self._degradation.policy
        gb = self.args.save_total_size_gb
        return Policy(
            limit=self.args.save_total_limit,
            keep_best=self.args.metric_for_best_model is not None,
            keep_epoch=self.args.keep_epoch_checkpoint,
            budget_bytes=None if gb is None else round(gb * GB),
        )

    def check_disk_budget(self) -> None:
        """Refuses a budget that cannot hold what will be written, or decides to store less."""
        self._degradation = None
        policy = self.rotation_policy()
        if self.args.disk_policy == "refuse":
            check_budget(self.checkpoint_sizes(), policy, self._other_bytes())
            return
        self._degradation = choose_degradation(self.checkpoint_sizes(), policy, self._other_bytes())
        if self._degradation.steps:
            logger.warning("save_total_size_gb: checkpoints store less: %s.", ", ".join(self._degradation.steps))

    def make_room(self, step: int) -> None:
        """Deletes, before anything is written, what the budget or the disk cannot hold beside checkpoint `step`.

        Raises:
            OSError: the budget has no room for it, whatever is deleted.
        """
        self.checkpoints.make_way(step)
        policy = self.rotation_policy()
        if policy.budget_bytes is not None:
            self._free_room(step, policy, self._other_bytes())
        free = free_bytes(self.checkpoints.folder)
        if free < self.checkpoint_sizes().full_bytes:
            held = sum(entry.num_bytes for entry in self._entries())
            plan = self._plan(step, dataclasses.replace(policy, budget_bytes=free + held), 0)
            self._carry_out(plan.strip_first, plan.delete_first)

    def _free_room(self, step: int, policy: Policy, other_bytes: int) -> None:
        plan = self._plan(step, policy, other_bytes)
        if not plan.shortfall_bytes and self._carry_out(plan.strip_first, plan.delete_first):
            return
        short = self._plan(step, policy, other_bytes).shortfall_bytes  # what was being copied stayed
        logger.error("save_total_size_gb=%g is %d bytes short.", self.args.save_total_size_gb, short)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def rotate(self) -> None:
        """Deletes and strips what no role keeps, now that the newest checkpoint is in place."""
        plan = plan_cleanup(self._entries(), self.best_saved_step(), self.rotation_policy())
        self._carry_out(plan.strip_after, plan.delete_after)
        self._best_step_saved = self.best_saved_step()

    def best_saved_step(self) -> int | None:
        """Step of the best checkpoint there is: where the best step itself was not saved, that of the best before."""
        steps = (self.state.best_global_step, self._best_step_saved)
        return next((step for step in steps if self.checkpoint_folder(step)), None)  # type: ignore[attr-defined]

    def _plan(self, step: int, policy: Policy, other_bytes: int) -> SavePlan:
        sizes = self._degradation.sizes if self._degradation else self.checkpoint_sizes()
        entries = self._entries()
        # What was logged so far, and a large tokenizer, are in the newest one: the bound knows neither.
        like_newest = entries[-1].num_bytes + SMALL_FILES_BYTES // 2 if entries and entries[-1].is_resumable else 0
        new = Entry(
            step,
            max(sizes.full_bytes, like_newest),
            ends_epoch=float(self.state.epoch).is_integer(),
            is_resumable=not self.args.save_only_model,
            optimizer_bytes=sizes.optimizer,
        )
        best = step if self.state.best_global_step == step else self.best_saved_step()
        return plan_save(entries, new, best, policy, other_bytes, self._best_step_saved)

    def _carry_out(self, strip: tuple[int, ...], delete: tuple[int, ...]) -> bool:
        """Whether all of it could be done; what is being copied stays."""
        files = {stored.step: _optimizer_files(stored) for stored in self.checkpoints.checkpoints()}
        done = [self.checkpoints.strip(step, files.get(step, OPTIMIZER_FILES)) for step in strip]
        done += [self.delete_checkpoint(step) for step in delete]  # type: ignore[attr-defined]
        return all(done)

    def _entries(self) -> list[Entry]:
        return [
            Entry(
                stored.step,
                stored.num_bytes,
                ends_epoch=stored.ends_epoch,
                is_pinned=self.checkpoints.is_pinned(stored.step),
                is_resumable=bool(_optimizer_files(stored)),
                optimizer_bytes=sum(stored.manifest.files[name].size for name in _optimizer_files(stored)),
            )
            for stored in self.checkpoints.checkpoints()
        ]

    def _other_bytes(self) -> int:
        """What the output folder holds beside checkpoints, with the model that is saved into it at the end."""
        folder = Path(self.args.output_dir)
        if self.args.local_checkpoint_dir is None:
            kept = sum(stored.num_bytes for stored in self.checkpoints.checkpoints())
        else:  # copies of the local ones, made and deleted in the background
            kept = sum(used_bytes(path) for path in [*folder.glob("checkpoint-*"), *folder.glob(".*-checkpoint-*")])
        kept += sum(used_bytes(path) for path in folder.glob(f"{PIN_PREFIX}*"))  # a slow Hub takes no room from a run
        beside = used_bytes(folder) - kept + SMALL_FILES_BYTES // 2
        # Rounded up: a log that grows by a block must not make the budget that a refusal named too small.
        rounded = -(-beside // SMALL_FILES_BYTES) * SMALL_FILES_BYTES
        return rounded + export_bytes(self.model)


def _optimizer_files(stored: Stored) -> list[str]:
    return [n for n in stored.manifest.files if n in OPTIMIZER_FILES or n.startswith(STATE_FOLDERS)]


class DiskBudgetCallback(TrainerCallback):
    """Checks the budget once the optimizer exists."""

    def __init__(self, trainer: DiskBudgetMixin):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step, a refusal on all processes; a resumed run first finishes a rotation cut short."""
        self.trainer._load_together(self._begin if args.should_save else None)  # type: ignore[attr-defined]

    def _begin(self) -> None:
        self.trainer.rotate()
        self.trainer.copy_checkpoints()  # type: ignore[attr-defined]
        self.trainer.check_disk_budget()

"""Pushes to the Hub through `hf_ext.hub`: by allow-list, from pinned copies, verified."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from transformers import TrainerCallback

from ..checkpoints.disk import describe_failure, is_disk_failure
from ..checkpoints.manifest import Manifest
from ..checkpoints.merging import check_mergeable, write_merged
from ..checkpoints.sharded_weights import SHARDED
from ..checkpoints.stored import Stored
from ..errors import ArgumentError, HfExtError
from ..hub.allowed import holds_model
from ..hub.background import Job, PushProcess, PushQueue
from ..hub.pins import pin_files, unpin
from ..hub.pushing import LAST_CHECKPOINT, list_sources, open_repository, resolve_token
from .model_push import CARD, ModelPushMixin

logger = logging.getLogger(__name__)


class PushingMixin(ModelPushMixin):
    """`--push_to_hub` without what stock Trainer sends: by allow-list, private unless told otherwise, checked.

    The constructor makes the repository and proves the token. While training, `hub_strategy` says what is pushed, each
    from a pinned copy and by a process of its own, which training never waits for: "every_save" the model of each
    checkpoint, "best" that of each new best one, "checkpoint" as every_save plus the whole newest checkpoint as
    `last-checkpoint/`, from which a run continues elsewhere; "end" nothing. A save during a push is left out
    (`hub_always_push`: waits its turn); one that failed is a warning and is made up for with the next. A run that is
    stopped leaves a push that takes longer than `push_grace_s`, or until `max_hours`, and says so.

    `save_model` also begins a push; `push_to_hub` pushes what `output_dir` may share, downloads it, loads it and
    compares predictions. Copies of what is being uploaded come on top of `save_total_size_gb`.

    Raises (from the constructor, `push_to_hub` and `end`, on all processes):
        HubError: no right to write, or no Hub; the last push of the run failed. Nothing local is lost.
    """

    checkpoints: Any
    stop_reason: str | None
    push_retries = 3
    push_wait_s = 2.0  # before the first retry; doubles
    push_grace_s = 10.0  # schedulers kill 30 s after SIGTERM, and the last checkpoint needs some of it

    def __init__(self, *args: Any, **kwargs: Any):
        self._pushes = PushQueue()
        super().__init__(*args, **kwargs)
        if not self.args.push_to_hub:
            return
        if self.args.hub_strategy == "checkpoint" and self.keeps_library_files:  # type: ignore[attr-defined]
            raise ArgumentError(
                "hub_strategy=checkpoint: DeepSpeed and FSDP1 write pickles. Use end, best or every_save; FSDP2 "
                "checkpoints can be pushed."
            )
        self.add_callback(PushCallback(self._pushes))  # type: ignore[attr-defined]
        atexit.register(_wait_at_exit, self._pushes)

    # --- the repository ---------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository, private unless `hub_private_repo` is False, and proves that it can be written to.

        Raises:
            HubError: on all processes; see `open_repository`.
        """
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        self.hub_model_id = self._on_main(lambda: open_repository(name, **self._access(token), **self._place(private)))

    def _access(self, token: str | None = None) -> dict[str, Any]:
        return {
            "token": resolve_token(token or self.args.hub_token, "the same command"),
            "endpoint": constants.ENDPOINT,
            "retries": self.push_retries,
            "wait_s": self.push_wait_s,
        }

    def _place(self, private: bool | None = None, revision: str | None = None) -> dict[str, Any]:
        private = self.args.hub_private_repo if private is None else private
        return {"private": private is not False, "revision": revision or self.args.hub_revision}

    # --- while training ---------------------------------------------------------------------------------------------

    def _push_checkpoint(self, step: int | None) -> None:
        """Begins the push of what `hub_strategy` wants on the Hub when `step` is the newest checkpoint."""
        if not self._is_main or self.args.hub_strategy == "end":
            return
        target = self.best_saved_step() if self.args.hub_strategy == "best" else step  # type: ignore[attr-defined]
        folder = self.checkpoint_folder(target)  # type: ignore[attr-defined]
        if folder is None or target == self._pushes.pushed_step:
            return
        if self._pushes.is_busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._begin_push(folder.name, target, folder, partial(self._pin_checkpoint, target, folder))

    def _begin_push(self, name: str, step: int | None, shown: Path, pin: Callable[[], Path], **settings: Any) -> None:
        """Pins now and pushes when it is its turn; what goes wrong is noted, and the run goes on."""
        try:
            pinned = pin()
        except OSError as error:
            if not is_disk_failure(error):
                raise
            self._pushes.note_failure(name, describe_failure(error, f"The copy of {shown} that is pushed"))
            return
        except HfExtError as error:
            self._pushes.note_failure(name, str(error))
            return
        checkpoint = pinned / LAST_CHECKPOINT
        push = {"message": f"Training in progress, {name}", **self._place(), **settings}
        push["checkpoint"] = str(checkpoint) if checkpoint.is_dir() else None
        start = partial(PushProcess, pinned, str(self.hub_model_id), access=self._access(), push=push)
        self._pushes.add(Job(name, step, pinned, shown, start))

    def _pin_checkpoint(self, step: Any, folder: Path) -> Path:
        is_model, is_sharded = holds_model(folder), (folder / SHARDED).is_file()
        if is_sharded:
            check_mergeable(folder)
        sources = list_sources(folder, folder if self.args.hub_strategy == "checkpoint" else None, needs_model=is_model)
        sources.pop(CARD, None)  # PEFT's template
        is_spread = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if not (is_model or is_sharded) and (step != self.state.global_step or is_spread):
            raise ArgumentError(
                f"{folder} is no whole model, but what trains of one or pieces of one, and the whole is not at hand. "
                "The next checkpoint, or the trained model, is pushed in its place."
            )
        pinned = pin_files(sources, folder.parent, folder.parent.name)
        if not is_model:
            try:
                if is_sharded:
                    write_merged(Stored(folder, Manifest.read(folder)), pinned)
                else:
                    self._save_pretrained(self.model, pinned, None)  # type: ignore[attr-defined]
                (pinned / CARD).unlink(missing_ok=True)
            except BaseException:
                unpin(pinned)
                raise
        return pinned

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        logger.warning("%s is of a hyperparameter search and is not pushed.", checkpoint_folder)

    # --- the end of training ----------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._leave_pushes(0)
            raise

    def _finish_current_push(self) -> None:
        """Trainer's last act of training: waits for the push under way, and makes up for one that failed."""
        if not self.args.push_to_hub:
            return
        if self.stop_reason is not None:
            self._leave_pushes(self._grace_s())
            return
        self._wait_together(lambda: self._pushes.is_busy)
        self._push_checkpoint(self._saved_step)  # type: ignore[attr-defined]
        self._wait_together(lambda: self._pushes.is_busy)

    def _grace_s(self) -> float:
        """How long a run that was stopped may still push."""
        if not str(self.stop_reason).startswith("max_hours"):
            return self.push_grace_s
        age_s = time.monotonic() - self._process_began  # type: ignore[attr-defined]
        return max(self.push_grace_s, self.args.max_hours * 3600 - age_s - self.push_grace_s)

    def _leave_pushes(self, grace_s: float) -> None:
        if self._pushes.wait(grace_s):
            return
        names = ", ".join(self._pushes.give_up())
        logger.warning(
            "%s: not on the Hub, which took longer than the %.0f s that a stop leaves. The run that continues pushes "
            "the next one.",
            names,
            grace_s,
        )


class PushCallback(TrainerCallback):
    """Notices between steps that a push has ended."""

    def __init__(self, pushes: PushQueue):
        self.pushes = pushes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Cost: some microseconds."""
        self.pushes.advance()


def _wait_at_exit(pushes: PushQueue) -> None:
    """For scripts that end without `end`: nothing else would say that a push failed."""
    if pushes.is_busy:
        logger.warning("Waiting for the push to the Hub.")
        pushes.wait()
        if pushes.failure is not None:
            logger.error("The last push to the Hub failed: %s", pushes.failure)

"""The pushes of a run: one at a time, beside training, which never waits for the Hub and never ends because of it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, ModelCard

from ..argument_checks import read_hub_strategy
from ..checkpoints.manifest import CHECKPOINT_NAME
from ..errors import ArgumentError, HfExtError, RunEnded
from .allowed import CARD, LAST_CHECKPOINT, is_draft
from .push import HubError, open_repository, push_folder

GRACE_S = 10.0  # after a stop: schedulers kill 30 s after SIGTERM, and the last checkpoint needs some of it
END_WAIT_S = 1800.0  # at the end of training, and of the process

logger = logging.getLogger(__name__)


@dataclass
class _Job:
    """A push that waits or runs. Afterwards `commit` or `error` is set."""

    name: str
    work: Callable[[], CommitInfo] = field(repr=False)  # it knows the token
    commit: CommitInfo | None = None
    error: Exception | None = None


class Pusher:
    """`--push_to_hub` without what stock Trainer sends: by allow-list, private unless told otherwise, compared.

    `open` makes the repository and proves the token. While training, `hub_strategy` says what is pushed: "every_save"
    the model of each checkpoint, "best" that of each new best one, "checkpoint" as every_save plus the whole newest
    checkpoint as `last-checkpoint/`, from which a run continues elsewhere, "all_checkpoints" plus each checkpoint under
    its own name; "end" nothing. One daemon thread sends. A save during a push waits, and replaces what waited
    (`hub_always_push`: waits its turn). A push that failed is a warning and is made up for with the next, and at the
    end. A checkpoint stays on the disk while it is sent, on top of `save_total_limit` and `save_total_size_gb`.

    It stands where Trainer has its `push_in_progress`: `is_done` and `wait_until_done` are Trainer's names.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._lock = threading.Lock()
        self._thread = threading.Thread()  # the last one that was begun
        self._running: _Job | None = None
        self._waiting: list[_Job] = []
        self._pushed = ""  # name of the last checkpoint that the Hub has
        self._failure: str | None = None  # of the last push
        self._is_left = False  # whether nobody waits for what is sent

    def open(self, token: str | None = None, private: bool | None = None) -> str:
        """Makes the repository, private unless `hub_private_repo` is False, and proves that it can be written to.

        Returns:
            Its name with the owner.

        Raises:
            HubError: on all processes; see `open_repository`.
            ArgumentError: the strategy would push a library's pickles.
        """
        args = self._trainer.args
        strategy = read_hub_strategy(args)
        if strategy in ("checkpoint", "all_checkpoints") and self._trainer._ext_backend.is_spread:
            raise ArgumentError(
                f"hub_strategy={strategy}: what FSDP and DeepSpeed write only they can read, and is no file to share. "
                "Use end: the trained model is pushed whole."
            )
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        settings = self._settings(token, private)
        atexit.register(_wait_at_exit, weakref.ref(self))
        return self._trainer._ext_team.on_main(lambda: open_repository(name, **settings))

    # --- what is pushed ---------------------------------------------------------------------------------------------

    def push_checkpoint(self, folder: Path) -> None:
        """Begins the push of what `hub_strategy` wants on the Hub when `folder` is the newest checkpoint."""
        trainer, strategy = self._trainer, read_hub_strategy(self._trainer.args)
        store, number = trainer.checkpoints, CHECKPOINT_NAME.fullmatch(folder.name)
        if strategy == "end" or not trainer._ext_team.is_main or number is None:
            return
        if folder.absolute().parent != store.folder:
            logger.warning("%s is of a hyperparameter search and is not pushed.", folder)
            return
        step = trainer._ext_saver.retention.best_step() if strategy == "best" else int(number[1])
        with self._lock:
            known = {self._pushed, *(job.name for job in [self._running, *self._waiting] if job is not None)}
        if step is None or f"checkpoint-{step}" in known or not store.path(step).is_dir():
            return
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        path, repo_id, settings = store.path(step), trainer.hub_model_id, self._settings()
        place = {"checkpoint": LAST_CHECKPOINT, "all_checkpoints": path.name}.get(strategy)

        def work() -> CommitInfo:
            with store.pinned(step):
                message = f"Training in progress, {path.name}"
                return push_folder(path, repo_id, checkpoint_as=place, message=message, **settings)

        self._submit(_Job(path.name, work))

    def push_model(
        self,
        message: str | None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> CommitInfo | None:
        """Pushes what the output folder may share; all processes call it. None: what the arguments say.

        Returns:
            The commit, on all processes; None where it is not `blocking`.

        Raises:
            HfExtError, HubError: on all processes, if `blocking`; else `close` says how it went.
        """
        folder, name, team = self._trainer.args.output_dir, self._trainer.hub_model_id, self._trainer._ext_team
        given = {"message": str(message), **self._settings(token, private, revision)}
        job = _Job("The trained model", partial(push_folder, folder, name, **given))
        if team.is_main:
            self._submit(job)
        if not blocking:
            return None
        self._wait()

        def conclude() -> CommitInfo | None:
            if job.error is not None:
                raise job.error
            return job.commit

        return team.on_main(conclude)

    def save_with_card(self, save: Callable[[], None], about: dict[str, Any]) -> None:
        """Saves the model; a card in the output folder that somebody wrote stays, else Trainer makes one of `about`."""
        self._wait()  # for what is being sent of the folder
        path, is_main = Path(self._trainer.args.output_dir, CARD), self._trainer._ext_team.is_main
        written = path.read_bytes() if is_main and path.is_file() else None
        save()
        if not is_main:
            return
        if written is not None and not is_draft(written):
            path.write_bytes(written)  # PEFT adds to a card what it finds in the model
            return
        self._trainer.create_model_card(**{"model_name": self._trainer.hub_model_id.split("/")[-1], **about})
        card = ModelCard.load(path)
        base = card.data.base_model
        if isinstance(base, str) and (os.path.isabs(base) or os.path.exists(base)):  # which the Hub refuses
            del card.data.base_model
            card.data.tags = [tag for tag in card.data.tags or [] if base not in tag] or None
            card.save(path)

    def _settings(
        self, token: str | None = None, private: bool | None = None, revision: str | None = None
    ) -> dict[str, Any]:
        args = self._trainer.args
        is_private = (args.hub_private_repo if private is None else private) is not False
        return {"token": token or args.hub_token, "private": is_private, "revision": revision or args.hub_revision}

    # --- the thread -------------------------------------------------------------------------------------------------

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._is_left = False
            if self._running is not None:
                self._waiting = [*self._waiting, job] if self._trainer.args.hub_always_push else [job]
                return
            self._running = job
            self._thread = threading.Thread(target=self._work, name="hub-push", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (job := self._running) is not None:
            self._send(job)
            with self._lock:
                self._running = self._waiting.pop(0) if self._waiting else None

    def _send(self, job: _Job) -> None:
        try:
            job.commit = job.work()
        except Exception as error:  # whatever it is: a thread that ends by one would never push again
            is_said = isinstance(error, HfExtError | RunEnded)
            job.error = error if is_said else HubError(f"{type(error).__name__}: {error}")
            self._failure = str(job.error)
            logger.warning("%s is not on the Hub: %s", job.name, job.error)
            return
        self._failure = None
        self._pushed = job.name if CHECKPOINT_NAME.fullmatch(job.name) else self._pushed
        logger.info("%s is on the Hub: %s", job.name, job.commit.commit_url)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _wait(self, end: float = float("inf")) -> None:
        """Until nothing runs or waits, or the main process's clock reads `end`; all processes call it."""
        self._trainer._ext_team.wait_while(lambda: self._running is not None and time.monotonic() < end)

    def is_done(self) -> bool:
        """Never: what is left to do at the end of training, all processes find out in `wait_until_done`."""
        return False

    def wait_until_done(self) -> None:
        """Trainer's last act of training: waits for the push under way, and makes up for one that failed.

        Half an hour at most; after a stop, for as long as a scheduler leaves. What is not on the Hub then is left.
        """
        trainer, stopper = self._trainer, self._trainer._ext_stopper
        left_s = stopper.left_s() or 0.0  # of `max_hours`, where that has stopped the run
        limit_s = END_WAIT_S if stopper.reason is None else max(GRACE_S, left_s - GRACE_S)
        end, newest = time.monotonic() + limit_s, trainer._ext_saver.saved_step
        self._wait(end)
        if trainer.args.push_to_hub and stopper.reason is None and newest is not None:
            self.push_checkpoint(trainer.checkpoints.path(newest))
            self._wait(end)
        self._leave(limit_s)
        self._pushed = ""  # another run of this trainer has checkpoints of these names

    def _leave(self, waited_s: float) -> None:
        """Nobody waits any longer for what runs, and what waits is not sent."""
        with self._lock:
            left, self._waiting = [job for job in [self._running, *self._waiting] if job is not None], []
        self._is_left = True
        if left:
            names = ", ".join(job.name for job in left)
            logger.warning("%s: not on the Hub after %.0f s. The next push makes up for it.", names, waited_s)

    def close(self) -> str | None:
        """Waits; returns why the last push failed, if no later one succeeded. All processes call it."""
        self._wait(time.monotonic() + END_WAIT_S)
        too_long = f"The last push did not end within {END_WAIT_S:.0f} s."
        return self._trainer._ext_team.on_main(lambda: self._failure if self._running is None else too_long)


def _wait_at_exit(reference: weakref.ref[Pusher]) -> None:
    """For scripts that end without `end`."""
    pusher = reference()
    if pusher is not None and pusher._running is not None and not pusher._is_left:
        logger.warning("Waiting for the push to the Hub.")
        pusher._thread.join(END_WAIT_S)

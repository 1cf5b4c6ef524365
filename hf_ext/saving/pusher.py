"""The pushes of a run: one at a time, beside training, which never waits for the Hub and never ends because of it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from huggingface_hub import CommitInfo, ModelCard
from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy

from ..errors import ArgumentError, HfExtError, RunEnded
from ..files import Json
from ..hub import CARD, HubError, is_draft, open_repository, push_folder
from ..processes import Team
from ..training import Host, Stopper
from .saver import Saver

GRACE_S = 10.0  # after a stop: schedulers kill 30 s after SIGTERM, and the last checkpoint needs some of it
END_WAIT_S = 1800.0  # at the end of training, and of the process

logger = logging.getLogger(__name__)


class Pusher(TrainerCallback):
    """`--push_to_hub` without what stock Trainer sends: by allow-list, private unless told otherwise, compared.

    `open` makes the repository and proves the token. While training, `hub_strategy` says what is pushed: "every_save"
    the model of each checkpoint, "end" nothing; whole checkpoints stay here. A daemon thread sends. A save during a
    push is left to the next one, and the last one to the end (`hub_always_push`: waits its turn). A push that failed is
    a warning and is made up for likewise. A checkpoint stays on the disk while it is sent, on top of `save_total_limit`
    and `save_total_size_gb`.
    """

    def __init__(self, trainer: Host, team: Team, stopper: Stopper, saver: Saver):
        self._trainer = trainer
        self._team = team
        self._stopper = stopper
        self._saver = saver
        self._thread: threading.Thread | None = None  # the last one that was begun
        self._begun = ""  # name of the checkpoint whose push was begun last, unless it failed
        self._commit: CommitInfo | None = None  # of the last push, or why it failed
        self._error: Exception | None = None

    def open(self, **given: object) -> None:
        """Makes the repository, private unless `hub_private_repo` is False, and proves that it can be written to.

        Raises:
            ArgumentError: `hub_strategy` is one that pushes whole checkpoints.
            HubError: on all processes; see `open_repository`.
        """
        trainer = self._trainer
        settings = self._settings(given)
        if trainer.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise ArgumentError(
                f"hub_strategy={trainer.args.hub_strategy.value}: whole checkpoints are not pushed. Give every_save "
                "(the model of each) or end, and keep checkpoints on a disk that outlives the run."
            )
        name = trainer.args.hub_model_id or Path(trainer.args.output_dir).absolute().name
        trainer.hub_model_id = self._team.on_main(lambda: open_repository(name, **settings))

    def _settings(self, given: Mapping[str, object]) -> Json:
        """Reads token, branch, and whether it is private: what is given, else what the arguments say."""
        args = self._trainer.args
        said = {"token": args.hub_token, "private": args.hub_private_repo, "revision": args.hub_revision}
        found = {name: value if given.get(name) is None else given[name] for name, value in said.items()}
        return {**found, "private": found["private"] is not False}

    # --- what is pushed ---------------------------------------------------------------------------------------------

    def push_checkpoint(self, newest: int) -> None:
        """Begins the push of the model of checkpoint `newest`, which is in place, where `hub_strategy` wants it."""
        trainer = self._trainer
        store = self._saver.store
        name = f"checkpoint-{newest}"
        is_due = (
            trainer.args.hub_strategy == HubStrategy.EVERY_SAVE and name != self._begun and store.path(newest).is_dir()
        )
        may_begin = trainer.args.hub_always_push or not self._is_sending()
        if not (is_due and may_begin and self._team.is_main):
            return
        self._begun = name
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        given = {"message": f"Training in progress, {name}", **self._settings({})}
        pins = ExitStack()  # also while it waits its turn
        pins.enter_context(store.pinned(newest))

        def push() -> CommitInfo:
            with pins:
                return push_folder(store.path(newest), trainer.hub_model_id, **given)

        self._send(name, push)

    def push_model(self, message: str | None, blocking: bool = True, **given: object) -> CommitInfo | None:
        """Pushes what the output folder may share; all processes call it.

        Args:
            given: `token`, `revision`, `private`, where they are others than the arguments say.

        Returns:
            The commit, on all processes; None where it is not `blocking`.

        Raises:
            HfExtError, HubError: on all processes, if `blocking`; else `close` says how it went.
        """
        trainer = self._trainer
        settings = self._settings(given)
        push = partial(push_folder, trainer.args.output_dir, trainer.hub_model_id, message=str(message), **settings)
        if self._team.is_main:
            self._send("The trained model", push)
        if not blocking:
            return None
        self._wait()
        return self._team.on_main(self._conclude)

    def _conclude(self) -> CommitInfo | None:
        if self._error is not None:
            raise self._error
        return self._commit

    def save_with_card(self, save: Callable[[], None], about: Json) -> None:
        """Saves the model; a card in the output folder that the user wrote stays, else Trainer makes one of `about`."""
        self._wait()  # for what is being sent of the folder
        path = Path(self._trainer.args.output_dir, CARD)
        is_main = self._team.is_main
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
        if isinstance(base, str) and os.path.exists(base):  # a folder, which the Hub refuses
            del card.data.base_model
            card.data.tags = [tag for tag in card.data.tags or [] if base not in tag] or None
            card.save(path)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _is_sending(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _send(self, name: str, push: Callable[[], CommitInfo]) -> None:
        """Begins a push; it waits for the one before it."""
        before = self._thread

        def send() -> None:
            if before is not None:
                before.join()
            try:
                self._commit = push()
                self._error = None
                logger.info("%s is on the Hub: %s", name, self._commit.commit_url)
            except Exception as error:  # whatever it is: else it would be lost
                is_said = isinstance(error, HfExtError | RunEnded)
                self._error = error if is_said else HubError(f"{type(error).__name__}: {error}")
                self._begun = ""
                logger.warning("%s is not on the Hub: %s", name, self._error)

        self._thread = threading.Thread(target=send, name="hub-push", daemon=True)
        atexit.register(self._thread.join, END_WAIT_S)  # for scripts that end without `end`
        self._thread.start()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _wait(self, end: float = float("inf")) -> None:
        """Blocks until all is sent, or the main process's clock reads `end`; all processes call it."""
        self._team.wait_while(lambda: self._is_sending() and time.monotonic() < end)

    def on_train_end(self, *event: object, **kwargs: object) -> None:
        """Waits for the push under way, and makes up for one that failed.

        Half an hour at most, after a stop a few seconds. What is not on the Hub then is left.
        """
        newest = self._saver.saved_step
        if not self._trainer.args.push_to_hub or newest is None:
            return
        limit_s = END_WAIT_S if self._stopper.reason is None else GRACE_S
        end = time.monotonic() + limit_s
        self._wait(end)
        self.push_checkpoint(newest)
        self._wait(end)
        self._begun = ""  # another run of this trainer has checkpoints of these names
        if self._thread is not None and self._is_sending():
            atexit.unregister(self._thread.join)
            logger.warning("What is being sent to the Hub was not there after %.0f s. The next push sends it.", limit_s)

    def close(self) -> str | None:
        """Waits; returns why the last push failed, if no later one succeeded. All processes call it."""
        self._wait(time.monotonic() + END_WAIT_S)
        failure = f"The last push did not end within {END_WAIT_S:.0f} s." if self._is_sending() else self._error
        return self._team.on_main(lambda: None if failure is None else str(failure))

"""Pushes to the Hub through `hf_ext.hub`: by allow-list, from pinned copies, verified."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from transformers import TrainerCallback

from ..disk import describe_failure, is_disk_failure
from ..errors import ArgumentError, HfExtError
from ..held import replaced
from ..hub.background import Job, PushProcess, PushQueue
from ..hub.card import drop_local_base, is_draft
from ..hub.pins import sweep_pins
from ..hub.pushing import LAST_CHECKPOINT, Push, open_repository, resolve_token
from ..training_args import FastTrainingArguments
from .push_pins import CARD, pin_checkpoint, pin_export
from .team import Team

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How often a request to the Hub is repeated, after how many seconds first, and what a stop leaves a push."""

    retries: int
    wait_s: float
    grace_s: float


class Pusher(TrainerCallback):
    """`--push_to_hub` without what stock Trainer sends: by allow-list, private unless told otherwise, checked.

    `open` makes the repository and proves the token. While training, `hub_strategy` says what is pushed, each from a
    pinned copy and by a process of its own, which training never waits for: "every_save" the model of each checkpoint,
    "best" that of each new best one, "checkpoint" as every_save plus the whole newest checkpoint as
    `last-checkpoint/`, from which a run continues elsewhere; "end" nothing. A save during a push is left out
    (`hub_always_push`: waits its turn); one that failed is a warning and is made up for with the next.

    Copies of what is being uploaded come on top of `save_total_size_gb`.

    Attributes:
        repo_id: where to; None before `open`.
        is_saving: whether the model is being saved, which Trainer follows with a push of its own.
    """

    def __init__(self, args: FastTrainingArguments, team: Team):
        self._args, self._team = args, team
        self._queue = PushQueue()
        self._is_spread = False
        self.repo_id: str | None = None
        self.is_saving = False

    # --- the repository ---------------------------------------------------------------------------------------------

    def open(self, patience: Patience, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository, private unless `hub_private_repo` is False, and proves that it can be written to.

        Raises:
            HubError: on all processes; see `open_repository`.
        """
        name = self._args.hub_model_id or self._folder.absolute().name
        place = self.place(private)
        self.repo_id = self._team.on_main(lambda: open_repository(name, **self._access(patience, token), **place))

    def begin(self, is_spread: bool, keeps_library_files: bool) -> None:
        """Once it is known how checkpoints are written; what is under way when the process ends is waited for.

        Args:
            is_spread: whether FSDP or DeepSpeed spreads the weights over processes.
            keeps_library_files: whether checkpoints hold a library's pickles.

        Raises:
            ArgumentError: the strategy would push pickles.
        """
        if self._args.hub_strategy == "checkpoint" and keeps_library_files:
            raise ArgumentError(
                "hub_strategy=checkpoint: DeepSpeed and FSDP1 write pickles. Use end, best or every_save; FSDP2 "
                "checkpoints can be pushed."
            )
        self._is_spread = is_spread
        atexit.register(_wait_at_exit, self._queue)

    def place(self, private: bool | None = None, revision: str | None = None) -> dict[str, Any]:
        """Settings of a push; None for what the arguments say."""
        private = self._args.hub_private_repo if private is None else private
        return {"private": private is not False, "revision": revision or self._args.hub_revision}

    def _access(self, patience: Patience, token: str | None = None) -> dict[str, Any]:
        return {
            "token": resolve_token(token or self._args.hub_token, "the same command"),
            "endpoint": constants.ENDPOINT,
            "retries": patience.retries,
            "wait_s": patience.wait_s,
        }

    @property
    def _folder(self) -> Path:
        return Path(str(self._args.output_dir))

    # --- while training ---------------------------------------------------------------------------------------------

    @property
    def wants_checkpoints(self) -> bool:
        """Whether `saved` is to be called after a save."""
        return self._team.is_main and self._args.hub_strategy != "end"

    def saved(
        self,
        step: int | None,
        folder: Path | None,
        model: Any,
        global_step: int,
        announce: Callable[[], object],
        patience: Patience,
    ) -> None:
        """Begins the push of a checkpoint, unless it is there, not due, or not on this machine's disk.

        Args:
            step: of the checkpoint; `folder`: its place, None where there is none.
            model: as it trains now, after `global_step` steps.
            announce: tells callbacks.
        """
        if folder is None or step == self._queue.pushed_step:
            return
        if self._queue.is_busy and not self._args.hub_always_push:
            return
        announce()
        whole = model if step == global_step and not self._is_spread else None
        pin = partial(pin_checkpoint, folder, whole, self._args.hub_strategy == "checkpoint")
        self._begin_push(folder.name, step, folder, pin, patience)

    def leave_out_trial(self, folder: str) -> None:
        """Says that a checkpoint of a hyperparameter search is not pushed."""
        logger.warning("%s is of a hyperparameter search and is not pushed.", folder)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notices that a push has ended. Cost: some microseconds."""
        self._queue.advance()

    def begin_export(self, name: str, patience: Patience, **push: Any) -> None:
        """Begins the push of what the output folder may share, beside the script; `close` says how it went."""
        if self._team.is_main:
            self._begin_push(name, None, self._folder, partial(pin_export, self._folder), patience, **push)

    def _begin_push(
        self, name: str, step: int | None, shown: Path, pin: Callable[[], Path], patience: Patience, **push: Any
    ) -> None:
        """Pins now and pushes when it is its turn; what goes wrong is noted, and the run goes on."""
        try:
            pinned = pin()
        except OSError as error:
            if not is_disk_failure(error):
                raise
            self._queue.note_failure(name, describe_failure(error, f"The copy of {shown} that is pushed"))
            return
        except HfExtError as error:
            self._queue.note_failure(name, str(error))
            return
        checkpoint = pinned / LAST_CHECKPOINT
        push = {"message": f"Training in progress, {name}", **self.place(), **push}
        push["checkpoint"] = str(checkpoint) if checkpoint.is_dir() else None
        start = partial(PushProcess, pinned, str(self.repo_id), access=self._access(patience), push=push)
        self._queue.add(Job(name, step, pinned, shown, start))

    # --- the trained model ------------------------------------------------------------------------------------------

    def saving(self) -> AbstractContextManager[None]:
        """While the model is saved, `is_saving`."""
        return replaced(self, is_saving=True)

    def save_with_card(self, save: Callable[[], None], make_card: Callable[..., None], about: dict[str, Any]) -> None:
        """Saves; a card in the output folder that somebody wrote stays, else `make_card` makes one, as `about` says."""
        path, is_main = self._folder / CARD, self._team.is_main
        card = path.read_bytes() if is_main and path.is_file() else None
        with self.saving():
            save()
        if not is_main:
            return
        if card is not None and not is_draft(card):
            path.write_bytes(card)  # PEFT adds to a card what it finds in the model
            return
        make_card(**{"model_name": str(self.repo_id).split("/")[-1], **about})
        drop_local_base(path)

    def push_and_check(
        self, push: dict[str, Any], token: str | None, check: Callable[[Path], str], patience: Patience
    ) -> Push | None:
        """Pushes what the output folder may share, downloads it and has `check` say what is known of it.

        Waits for what is under way. All processes call it.

        Raises:
            HubError: on all processes: it was refused, did not arrive, or `check` found another model.
            DiskFailure: no room for the copy or the download.
        """
        self.wait()
        folder, process = self._folder, list[PushProcess]()
        into = Path(tempfile.mkdtemp(prefix="hf_ext-download-"))

        def start() -> None:
            access = self._access(patience, token)
            process.append(PushProcess(folder, str(self.repo_id), access=access, push=push, into=into / "model"))

        def conclude() -> Push:
            done = process[0].result()
            self._queue.failure = None
            logger.info("%s: %d files; %s.", done.url, len(done.files), check(into / "model"))
            return done

        try:
            self._team.on_main(start)
            self._team.wait_while(lambda: not process[0].is_done())
            return self._team.on_main(conclude)
        finally:
            for one in process:
                one.kill()
            if process:
                sweep_pins(folder.absolute().parent, folder.absolute().name)
            shutil.rmtree(into, ignore_errors=True)

    # --- the end ----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until no push is under way or waits. All processes call it."""
        self._team.wait_while(lambda: self._queue.is_busy)

    def close(self) -> str | None:
        """Waits; returns why the last push failed, if no later one succeeded. All processes call it."""
        self.wait()
        return self._team.on_main(lambda: self._queue.failure)

    @contextmanager
    def left_on_error(self) -> Iterator[None]:
        """What is not on the Hub is left at once, if training ends by an exception."""
        try:
            yield
        except BaseException:
            self.leave(0)
            raise

    def leave(self, grace_s: float) -> None:
        """Waits for so long, then leaves what is not on the Hub, and says so."""
        if self._queue.wait(grace_s):
            return
        names = ", ".join(self._queue.give_up())
        logger.warning(
            "%s: not on the Hub, which took longer than the %.0f s that a stop leaves. The run that continues pushes "
            "the next one.",
            names,
            grace_s,
        )


def grace_s(patience: Patience, left_s: float | None) -> float:
    """How long a run that was stopped may still push: also what `max_hours` leaves.

    Args:
        left_s: seconds that it leaves, where it stopped the run; None where something else did.
    """
    return patience.grace_s if left_s is None else max(patience.grace_s, left_s - patience.grace_s)


def _wait_at_exit(pushes: PushQueue) -> None:
    """For scripts that end without `end`: nothing else would say that a push failed."""
    if pushes.is_busy:
        logger.warning("Waiting for the push to the Hub.")
        pushes.wait()
        if pushes.failure is not None:
            logger.error("The last push to the Hub failed: %s", pushes.failure)

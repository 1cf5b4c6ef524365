"""Pushing the trained model: saved, sent, downloaded again, loaded and compared."""

from __future__ import annotations

import logging
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ..hub.attempts import HubError
from ..hub.background import PushProcess, PushQueue
from ..hub.card import drop_local_base, is_draft
from ..hub.pins import pin_files, sweep_pins
from ..hub.pushing import Push, list_sources
from .main_process import MainProcessMixin
from .push_check import PushCheckMixin

CARD = "README.md"

logger = logging.getLogger(__name__)


class ModelPushMixin(PushCheckMixin, MainProcessMixin):
    """`save_model`, `push_to_hub` and `end` of `PushingMixin`."""

    state: Any
    control: Any
    callback_handler: Any
    hub_model_id: Any
    _pushes: PushQueue
    _is_saving = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer, but the push that follows runs beside the script; `push_to_hub` or `end` says how it went."""
        self._is_saving = True
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            self._is_saving = False
        folder = Path(self.args.output_dir)
        is_export = not _internal_call and output_dir in (None, self.args.output_dir)
        if self.args.push_to_hub and is_export and self._is_main:
            pin = partial(_pin_export, folder)
            self._begin_push("the saved model", None, folder, pin, message="Model save")  # type: ignore[attr-defined]

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves and pushes the model with what else may be shared, downloads it, compares bytes and predictions.

        Predictions are those of the downloaded model, with the downloaded tokenizers, for 16 rows of the evaluation or
        training data; see `check_download`. To be called by all processes.

        Args:
            commit_message, token, revision, private: as in Trainer; None for what the arguments say.
            blocking: False pushes beside the script, without the check; `end` says how it went.
            kwargs: for `create_model_card`, where `output_dir` has no card yet.

        Returns:
            The `Push`, on all processes; None with `blocking=False`.

        Raises:
            HubError: on all processes: it was refused, did not arrive, does not load or predicts otherwise. The message
                says what repeats it.
            DiskFailure: no room for the copy or the download.
        """
        if self._is_saving:  # Trainer's `save_model` calls this
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)  # type: ignore[attr-defined]
        folder = Path(self.args.output_dir)
        self._save_with_card(folder / CARD, kwargs)
        push = {"message": commit_message, **self._place(private, revision)}  # type: ignore[attr-defined]
        if not blocking:
            if self._is_main:
                pin = partial(_pin_export, folder)
                self._begin_push("the trained model", None, folder, pin, **push)  # type: ignore[attr-defined]
            return None
        self._wait_together(lambda: self._pushes.is_busy)
        return self._push_and_check(folder, push, token)

    def _save_with_card(self, path: Path, about: dict[str, Any]) -> None:
        card = path.read_bytes() if self._is_main and path.is_file() else None
        self._is_saving = True
        try:
            super().save_model()  # type: ignore[misc]
        finally:
            self._is_saving = False
        if not self._is_main:
            return
        if card is not None and not is_draft(card):
            path.write_bytes(card)  # PEFT adds to a card what it finds in the model
            return
        name = str(self.hub_model_id).split("/")[-1]
        self.create_model_card(**{"model_name": name, **about})  # type: ignore[attr-defined]
        drop_local_base(path)

    def _push_and_check(self, folder: Path, push: dict[str, Any], token: str | None) -> Push | None:
        process: list[PushProcess] = []
        into = Path(tempfile.mkdtemp(prefix="hf_ext-download-"))

        def start() -> None:
            access = self._access(token)  # type: ignore[attr-defined]
            process.append(PushProcess(folder, str(self.hub_model_id), access=access, push=push, into=into / "model"))

        def conclude() -> Push:
            done = process[0].result()
            self._pushes.failure = None
            logger.info("%s: %d files; %s.", done.url, len(done.files), self.check_download(into / "model"))
            return done

        try:
            self._on_main(start)
            self._wait_together(lambda: not process[0].is_done())
            return self._on_main(conclude)
        finally:
            for one in process:
                one.kill()
            if process:
                sweep_pins(folder.absolute().parent, folder.absolute().name)
            shutil.rmtree(into, ignore_errors=True)

    def end(self) -> None:
        """As in Trainer, once the push under way has ended.

        Raises:
            HubError: on all processes: the last push failed, and no later one succeeded.
        """
        failure = None
        if self.args.push_to_hub:
            self._wait_together(lambda: self._pushes.is_busy)
            failure = self._on_main(lambda: self._pushes.failure)
        super().end()  # type: ignore[misc]
        if failure is not None:
            raise HubError(failure)


def _pin_export(folder: Path) -> Path:
    return pin_files(list_sources(folder), folder.absolute().parent, folder.absolute().name)

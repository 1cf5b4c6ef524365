"""What a run says goes to the terminal and, with times, to `run.log`."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from ..errors import show_text

LOGGER = logging.getLogger("hf_ext")


class _Shown(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Names and values of foreign files neither drive the terminal nor show tokens."""
        return show_text(super().format(record))


class RunLog(logging.FileHandler):
    """A log file that, on a disk that takes no more, says so once instead of a traceback per line."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by logging in place of the error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            print(f"{self.baseFilename} could not be written: {error.strerror}. Lines are missing.", file=sys.stderr)

    def close(self) -> None:
        """As in logging; lines for which there is still no room are given up."""
        with suppress(OSError):
            super().close()


def start_run_log(folder: str | os.PathLike[str] | None, is_main_process: bool = True) -> logging.Logger:
    """Sends hf_ext's messages to the terminal and appends them to `<folder>/run.log`; other processes only warn.

    Warnings of transformers, accelerate and datasets go to the file too. With no folder there is no file.
    """
    disable_progress_bar()  # of loading and saving; training and embedding keep theirs
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        handler.close()
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO if is_main_process else logging.WARNING)
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setFormatter(_Shown("%(message)s"))
    LOGGER.addHandler(terminal)
    for own in logging.getLogger("transformers").handlers:  # that names what config.json says
        own.setFormatter(_Shown(own.formatter._fmt if own.formatter else None))
    if is_main_process and folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = RunLog(Path(folder) / "run.log", encoding="utf-8")
        file.setFormatter(_Shown("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("hf_ext", "transformers", "accelerate", "datasets", "py.warnings"):
            logging.getLogger(name).addHandler(file)
        logging.captureWarnings(True)
    return LOGGER

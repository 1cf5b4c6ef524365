"""What a run says goes to the terminal and, with times, to `run.log`."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

LOGGER = logging.getLogger("hf_ext")


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
    terminal.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(terminal)
    if is_main_process and folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = RunLog(Path(folder) / "run.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("hf_ext", "transformers", "accelerate", "datasets", "py.warnings"):
            logging.getLogger(name).addHandler(file)
        logging.captureWarnings(True)
    return LOGGER

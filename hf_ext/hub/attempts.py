"""Repeats what the Hub did not answer, and says what failed and how to repeat it, without the token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from ..disk import is_disk_failure
from ..errors import RunEnded

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# RuntimeError: of an LFS or Xet upload; ValueError: what the Hub answers makes no sense, or it rejects the card.
_FAILURES = (HTTPError, OSError, RuntimeError, ValueError)
_LONGEST_WAIT_S = 60.0


class HubError(RunEnded):
    """A push or its check did not succeed; the model on this disk is whole, and the message says how to repeat it."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


@dataclass(frozen=True)
class Attempts:
    """Calls something until it succeeds or there is no hope, and then says what failed and how to repeat it."""

    retries: int
    wait_s: float
    token: str
    failed: str
    repeat: str

    def __call__(self, work: Callable[[], Result]) -> Result:
        for num_failures in range(1, self.retries + 2):
            try:
                return work()
            except _FAILURES as error:
                if is_disk_failure(error):
                    raise
                reason = self._describe(error)
                if not _is_transient(error) or num_failures > self.retries:
                    # Not chained: the cause repeats what the server said, which may hold the token.
                    raise HubError(
                        f"{self.failed}, after {num_failures} attempt(s): {reason} The model on this disk is whole. "
                        f"Run, logged in (`hf auth login`) or with HF_TOKEN set: {self.repeat}"
                    ) from None
            wait_s = min(self.wait_s * 2 ** (num_failures - 1), _LONGEST_WAIT_S)
            logger.warning("The Hub: %s Attempt %d follows in %.0f s.", reason, num_failures + 1, wait_s)
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _describe(self, error: BaseException) -> str:
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause in _causes(error))
        return " ".join(causes.replace(self.token, "<token>").split()).rstrip(".") + "."


def _causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while found[-1].__cause__ is not None:
        found.append(found[-1].__cause__)
    return found


def _is_transient(error: BaseException) -> bool:
    causes = _causes(error)
    statuses = [cause.response.status_code for cause in causes if isinstance(cause, HfHubHTTPError)]
    if statuses:
        return statuses[-1] in (408, 429) or statuses[-1] >= 500
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return False
    # What is left of OSError and RuntimeError: a download of the wrong length, an upload that broke off.
    return not isinstance(error, ValueError)

"""Things to find out, each of which may fail without ending the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import HfExtError
from .facts import Finding


class Attempts:
    """What was tried, and failed, as findings; and notes beside them.

    Args:
        remedies: name of an attempt -> what to do where it fails.
    """

    def __init__(self, remedies: Mapping[str, str]):
        self.remedies = remedies
        self.problems: list[Finding] = []
        self.notes: list[str] = []

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """What `action` returns; None where it raises an error of ours, which stops the run that is looked at."""
        try:
            return action()
        except HfExtError as error:
            finding = Finding(name, "stops", "\n".join(str(error).splitlines()[:5]), self.remedies[name])
            if finding not in self.problems:
                self.problems.append(finding)
            return None

"""What a file that runs code holds."""

import os
from typing import Any


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, canary: Any):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)

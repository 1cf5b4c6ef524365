"""An attempt that may be out of memory, and getting back what it holds then."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache

from ..errors import is_out_of_memory

Result = TypeVar("Result")


class DidNotFit(Exception):
    """An attempt was out of memory; what it held is free again. Its text is the first line of the error."""


def attempt(work: Callable[[], Result]) -> Result:
    """Calls `work`; where it is out of memory, releases all that it held before that is raised.

    An error's traceback holds the frames it passed, and they the tensors: as long as the error is alive, so are they.

    Raises:
        DidNotFit: `work` was out of memory.
    """
    try:
        return work()
    except Exception as error:  # allocators raise RuntimeErrors, which wrappers turn into others
        if not is_out_of_memory(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
    clear_device_cache(garbage_collection=True)
    raise DidNotFit(said)

"""What "out of memory" looks like, wherever it comes from; and getting back what a failed attempt holds."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

# RuntimeErrors of allocators (CUDA, HIP, XPU, MPS, the CPU's on each system) and of libraries that allocate.
# Triton's "out of resource: shared memory" is none: no memory would help.
_SIGNS = re.compile(
    r"(CUDA|HIP|XPU|MPS)\b.*out of memory|ErrorOutOfMemory|MemoryAllocation|_ALLOC_FAILED|_INSUFFICIENT_RESOURCES"
    r"|can't allocate memory|not enough memory: you tried to allocate|std::bad_alloc"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the device or the host, did not suffice, and nothing else.

    Also where it is the cause of another one, as torch's compiler raises it.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(cause, RuntimeError) and _SIGNS.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


class DidNotFit(Exception):
    """An attempt was out of memory; what it held is free again. Its text is the first line of the error."""


def attempt(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises; where it is out of memory, all that it held is let go first.

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
    gc.collect()
    if torch.accelerator.is_available():  # what it keeps for the next tensors
        torch.accelerator.memory.empty_cache()
    raise DidNotFit(said)

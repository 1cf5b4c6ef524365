"""A limit on the size of files, as with `ulimit -f`, for as short as possible: it holds for pytest's output too."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Files of this process may not grow above `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

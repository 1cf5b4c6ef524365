"""What a folder holds while a run writes into it, looked at by a process of its own."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def allocated(folder: str) -> int:
    """Bytes allocated for a folder and all that is in it; what vanishes meanwhile is not counted."""
    total, waiting = 0, [folder]
    while waiting:
        place = waiting.pop()
        try:
            total += os.lstat(place).st_blocks * 512
            entries = list(os.scandir(place))
        except FileNotFoundError:
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Samples:
    """What a process of its own measured: most bytes ever seen."""

    peak_bytes = 0


@contextmanager
def sampled(folder: Path, every_s: float = 0.001) -> Iterator[Samples]:
    """Measures `folder` every millisecond, or as often as the machine allows, in a forked process."""
    samples = Samples()
    stop_reading, stop_writing = os.pipe()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.set_blocking(stop_reading, False)
            os.write(writing, str(_sample(str(folder), every_s, stop_reading)).encode())
        finally:
            os._exit(0)
    try:
        yield samples
    finally:
        os.write(stop_writing, b"!")
        os.waitpid(child, 0)
        samples.peak_bytes = int(os.read(reading, 1000))
        for descriptor in (stop_reading, stop_writing, reading, writing):
            os.close(descriptor)


def _sample(folder: str, every_s: float, stop: int) -> int:
    began = time.perf_counter()
    peak = count = 0
    while True:
        due = began + count * every_s
        peak = max(peak, allocated(folder))
        count += 1
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            os.read(stop, 1)
        except BlockingIOError:
            continue
        return max(peak, allocated(folder))

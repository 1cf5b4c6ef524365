"""Signals that come before or after training: what is under way is given up at once, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

INTERRUPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
PATIENCE_S = 10.0  # to tidy up; torchrun kills after 30 s
_LEFT = 0  # on the way of signals, which begin at 1: nobody is to be watched any more
_watched: dict[int, socket.socket] = {}  # this process, while it is watched, and where its signals are told


@contextmanager
def interruptible(give_up: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt with their name, as SIGINT does without one.

    Not where somebody handles or ignores them, as training does while it lasts; and once, however often they come.
    Only the main thread can handle signals; elsewhere this does nothing.

    Args:
        give_up: ends the process; called in another thread where `PATIENCE_S` after the signal this block has not been
            left. A process that waits in native code, for what others never send, does not come to raise anything.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in INTERRUPTING if is_main and signal.getsignal(number) == signal.SIG_DFL]
    if not numbers:
        yield
        return
    pid, came = os.getpid(), threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a process forked from this one: as if this handler were not there
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not came.is_set():
            came.set()
            raise KeyboardInterrupt(signal.Signals(number).name)

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        with _watching(interrupt, give_up):
            yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is interrupt:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def _watching(handler: Any, give_up: Callable[[], None]) -> Iterator[None]:
    """Has a thread call `give_up` where this is not left in time after a signal whose handler is `handler`."""
    left = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        # Not until the writer is closed: processes that were forked meanwhile, as data workers are, have it too.
        with reader:
            while number := int.from_bytes(reader.recv(1)):
                if signal.getsignal(number) is handler and not left.wait(PATIENCE_S):
                    give_up()

    watcher = threading.Thread(target=watch, name="interruption", daemon=True)
    watcher.start()
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _watched[os.getpid()] = writer
    try:
        yield
    finally:
        _watched.pop(os.getpid(), None)
        signal.set_wakeup_fd(previous)
        left.set()
        with suppress(OSError):  # full of signals, each of which wakes the thread too; closed, in a forked process
            writer.send(bytes([_LEFT]))
        watcher.join(timeout=1)  # never to be waited for: the end of a run comes before that of its watch
        writer.close()


def _leave_watch() -> None:
    """In a process forked from one that is watched, which would report its own signals there, as if they were its."""
    while _watched:
        signal.set_wakeup_fd(-1)
        _watched.popitem()[1].close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_watch)

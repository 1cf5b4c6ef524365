"""Signals that ask a training process to stop: noted instead of obeyed at once, and kept from its data workers."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from functools import partial
from types import FrameType
from typing import Any

from ..errors import leave_terminal

logger = logging.getLogger(__name__)


STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class SignalWatch:
    """Notes SIGTERM, SIGINT and SIGHUP instead of dying of them, while entered; a third one raises KeyboardInterrupt.

    But not a third SIGTERM. People press Ctrl-C again; machines repeat themselves: where systemd or a scheduler signals
    every process, a rank hears of one stop from there, and twice from torch elastic, which heard of it twice itself.

    SIGHUP comes when a terminal is closed: what is written to it from then on is dropped instead of being an error.

    Signals that the process ignores (SIGINT under nohup, or after `&` in a script) stay ignored. Only the main thread
    can handle signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._count = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = 0

    def __enter__(self) -> SignalWatch:
        self.received, self._count, self._pid = None, 0, os.getpid()
        if threading.current_thread() is not threading.main_thread():
            logger.info("Training runs in a thread: signals will not save a checkpoint.")
            return self
        for number in STOPPING:
            previous = signal.getsignal(number)
            if previous not in (signal.SIG_IGN, None):
                self._previous[number] = previous
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._pid:  # a process forked from this one: as if this handler were not there
            signal.signal(number, self._previous.get(signal.Signals(number), signal.SIG_DFL))
            signal.raise_signal(number)
            return
        self._count += 1
        if name == "SIGHUP":
            leave_terminal()
        if self._count == 1:
            self.received = signal.Signals(number)
            _say(f"{name}: training stops after this batch and saves a checkpoint.")
        elif self._count == 2:
            _say(f"{name}: the stop is under way; a third signal (not SIGTERM) ends the process at once, unsaved.")
        elif name != "SIGTERM":
            for other in STOPPING:
                signal.signal(other, signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL)
            raise KeyboardInterrupt


def _say(text: str) -> None:
    # Logging from a signal handler fails where the signal interrupted a write to the same stream.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def leave_group(init: Any, worker_id: int) -> None:
    """Puts a data worker in a process group of its own.

    Signals that a terminal, `timeout` or `kill -- -PID` sends to the whole group would kill the workers, and PyTorch
    raises an error in a process whose workers die. Workers still end with the process that started them. Not covered:
    the milliseconds between a worker's start and this call, and signals to the worker itself.
    """
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    if init is not None:
        init(worker_id)


def keep_from_workers(loader: Any) -> Any:
    """The loader, whose workers, if it has any, get no signals that are sent to this process's group."""
    if getattr(loader, "num_workers", 0):
        init = partial(leave_group, loader.worker_init_fn)
        loader.worker_init_fn = init  # of loaders made from it, where a resumed run drops batches
        getattr(loader, "base_dataloader", loader).worker_init_fn = init  # of Accelerate's, which iterates
    return loader

"""Whether the death of a data worker is behind an error of a loader, and what the worker died of."""

from __future__ import annotations

import re
import traceback
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# torch 2.13 has no class for it: "DataLoader worker (pid 7) is killed by signal: Killed.", "... (pid(s) 7) exited ...".
DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\).*")
BROKEN = (RuntimeError, ConnectionError, EOFError, FileNotFoundError)  # what a loader raises where a worker is gone
_SETTLE_S = 1.0  # between the end of a worker's connections, which the loader notices, and that of its process
_KILLED = (
    "Workers are killed mostly where memory, or shared memory (/dev/shm), runs out: give fewer than "
    "dataloader_num_workers={}, or 0."
)
_ENDED = (
    "Nobody killed it: code of the dataset or of the collator ended it (sys.exit, KeyboardInterrupt, os._exit). "
    "dataloader_num_workers=0, instead of {}, shows where."
)


class Death(NamedTuple):
    """What happened, in a sentence, and what it is mostly caused by."""

    text: str
    advice: str


def find_death(error: BaseException, num_workers: int) -> Death | None:
    """The death of a worker that `error` comes from; None where it comes from something else.

    Args:
        error: one of `BROKEN`, as it was caught.
        num_workers: that were asked for, for the advice.

    Cost: a second at most, of an error that came out of a loader with workers.
    """
    loaders = _loaders(error)
    workers = [worker for loader in loaders for worker in loader._workers]
    said = DEATH.match(str(error)) or _wait_for_end(workers)
    if said is not None:
        text, pids = said[0].strip().rstrip("."), {int(pid) for pid in said["pids"].split(",")}
        codes = [worker.exitcode for worker in workers if worker.pid in pids]
        was_killed = "killed by signal" in text or any(code is not None and code < 0 for code in codes)
    else:
        # One that had no more to do is not at work any more, and has ended with 0.
        at_work = [is_at_work for loader in loaders for is_at_work in loader._workers_status]
        pairs = zip(workers, at_work, strict=True)
        dead = [worker for worker, is_at_work in pairs if worker.exitcode or (worker.exitcode == 0 and is_at_work)]
        if not dead:
            return None
        pids_and_codes = ", ".join(f"pid {worker.pid}, exit code {worker.exitcode}" for worker in dead)
        text = f"DataLoader worker ({pids_and_codes}) ended while it handed over a batch ({error!r})"
        was_killed = any(worker.exitcode < 0 for worker in dead)
    return Death(f"{text}.", (_KILLED if was_killed else _ENDED).format(num_workers))


def _loaders(error: BaseException) -> list[Any]:
    """torch's iterators over workers that `error` came through, which may be in no other reach by now."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    owners = {id(owner): owner for frame in frames if (owner := frame.f_locals.get("self")) is not None}
    return [owner for owner in owners.values() if isinstance(owner, _MultiProcessingDataLoaderIter)]


def _wait_for_end(workers: list[Any]) -> re.Match[str] | None:
    """Until a worker has ended, a second at most; torch's words if its signal handler has them."""
    try:
        ended = wait([worker.sentinel for worker in workers], _SETTLE_S) if workers else []
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(_SETTLE_S)
    except RuntimeError as raised:
        return DEATH.match(str(raised))
    return None

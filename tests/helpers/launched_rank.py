"""One rank of a launched run, without torch: `launched_rank.py FOLDER stopped,0.5:nan` does what the word of RANK says.

A number before a word: seconds to wait first. Once signals are handled, FOLDER/ready-RANK holds the process's number.
"""

import os
import signal
import sys
import time
from pathlib import Path

from hf_ext.errors import DiskFailure, NotFiniteError, TrainingStopped, exit_on_errors

ENDS = {"stopped": TrainingStopped, "nan": NotFiniteError, "disk": DiskFailure, "traceback": RuntimeError}
LIMIT_S = 60


def wait_for_signal(numbers: list[int], save_s: float) -> None:
    """As training does: goes on until it was signalled, saves, and stops."""
    ends = time.monotonic() + LIMIT_S
    while not numbers and time.monotonic() < ends:
        time.sleep(0.02)
    time.sleep(save_s)
    if not numbers:
        raise RuntimeError(f"no signal in {LIMIT_S} s")
    raise TrainingStopped(f"{len(numbers)} signals")


def main(folder: Path, words: str) -> None:
    rank, numbers = int(os.environ.get("RANK", "0")), []
    delay, _, word = words.split(",")[rank].rpartition(":")
    if word in ("waits", "waits_long"):
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            signal.signal(getattr(signal, name), lambda number, frame: numbers.append(number))
    (folder / f"ready-{rank}").write_text(str(os.getpid()))
    time.sleep(float(delay or 0))
    if word in ENDS:
        raise ENDS[word](word)
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word in ("waits", "waits_long"):
        wait_for_signal(numbers, 1.0 if word == "waits_long" else 0.1)


if __name__ == "__main__":
    with exit_on_errors():
        main(Path(sys.argv[1]), sys.argv[2])

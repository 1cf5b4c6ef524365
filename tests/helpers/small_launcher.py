"""What torchrun and `accelerate launch` do with ranks, without torch: `small_launcher.py MANNER FOLDER WORDS [WORDS]`.

One rank per word (see `launched_rank.py`), each with the variables of torch elastic; ends with 1 where one failed. More
WORDS are further attempts, as of --max_restarts. MANNER: `passes` signals on, is `deaf` to SIGTERM, or `dies` of it, as
`accelerate launch` of one process does.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).with_name("launched_rank.py")


def start(folder: str, words: str, attempt: int) -> list[subprocess.Popen]:
    num = len(words.split(","))
    given = {**os.environ, "LOCAL_WORLD_SIZE": str(num), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    command = [sys.executable, str(RANK), folder, words]
    return [subprocess.Popen(command, env={**given, "RANK": str(r)}, start_new_session=True) for r in range(num)]


def main(manner: str, folder: str, attempts: list[str]) -> int:
    ranks: list[subprocess.Popen] = []

    def pass_on(number, frame):
        for rank in ranks:
            rank.send_signal(number)

    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        number = getattr(signal, name)
        if manner == "deaf":
            signal.signal(number, lambda number, frame: None)
        elif manner == "passes":
            signal.signal(number, pass_on)
    for attempt, words in enumerate(attempts):
        ranks[:] = start(folder, words, attempt)
        statuses = [rank.wait() for rank in ranks]
        if not any(statuses):
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))

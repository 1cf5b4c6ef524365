"""What torchrun and `accelerate launch` do with ranks, without torch: `small_launcher.py FOLDER WORDS`.

One rank per word (see `launched_rank.py`); passes SIGTERM on, and ends with 1 where a rank failed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).with_name("launched_rank.py")


def main(folder: str, words: str) -> int:
    ranks: list[subprocess.Popen] = []
    signal.signal(signal.SIGTERM, lambda number, frame: [rank.send_signal(number) for rank in ranks])
    for number in range(len(words.split(","))):
        given = {**os.environ, "RANK": str(number)}
        command = [sys.executable, str(RANK), folder, words]
        ranks.append(subprocess.Popen(command, env=given, start_new_session=True))
    statuses = [rank.wait() for rank in ranks]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))

"""Through the real torchrun and `accelerate launch`: ranks save on SIGTERM, and leave their status in a file."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_files import FOLDER
from launches import clean_environment
from locations import HELPERS

STOPPED = 75
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file"),
        *(str(FOLDER / "cpu.yaml"), "--multi_gpu", "--num_processes", "2"),
    ],
}
RANK = str(HELPERS / "launched_rank.py")


def run(folder: Path, command: list[str], when: list[Path] = (), limit_s: float = 240) -> tuple[int, list[int]]:
    """Status of a command that gets SIGTERM once all files of `when` are there, and those that its processes left."""
    log, statuses = folder / "log", folder / "statuses"
    environment = {**clean_environment(HELPERS), "HF_EXT_STATUS_FILE": str(statuses)}
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            ends = time.monotonic() + limit_s
            while when and not all(path.exists() for path in when):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < ends, log.read_text()[-4000:]
                time.sleep(0.05)
            if when:
                process.send_signal(signal.SIGTERM)
            status = process.wait(limit_s)
        finally:
            process.kill()
    return status, [int(line) for line in statuses.read_text().split()] if statuses.exists() else []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_stop_is_1_of_the_launcher_and_75_in_the_file(tmp_path, name):
    """When the 1 fails, launchers pass statuses on: the file may go."""
    ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
    status, said = run(tmp_path, [*LAUNCHERS[name], RANK, str(tmp_path), "waits,waits"], ready)
    log = (tmp_path / "log").read_text()
    assert (status, said) == (1, [STOPPED, STOPPED]), log[-4000:]
    assert log.count("TrainingStopped: 1 signals") == 2

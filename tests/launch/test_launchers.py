"""Through the real torchrun and `accelerate launch`: ranks save on SIGTERM, and their status arrives."""

import contextlib
import json
import os
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
WRAPPER = [sys.executable, "-m", "hf_ext.launching", "--grace_s", "60"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [*ACCELERATE, str(FOLDER / "2cpu_ddp.yaml")],
    "accelerate, one process": [*ACCELERATE, str(FOLDER / "cpu.yaml")],
}
RANK = str(HELPERS / "launched_rank.py")
TRAINING = str(HELPERS / "launched_training.py")


def run(command: list[str], log: Path, when: list[Path] = (), limit_s: float = 240, number=signal.SIGTERM) -> int:
    """The status of a command that gets a signal once all files of `when` are there; leaves no process behind."""
    environment = clean_environment(HELPERS)
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            ends = time.monotonic() + limit_s
            while when and not all(path.exists() for path in when):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < ends, log.read_text()[-4000:]
                time.sleep(0.05)
            if when:
                process.send_signal(number)
            return process.wait(limit_s)
        finally:
            process.kill()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_stop_arrives_as_75(tmp_path, name):
    ranks = 1 if "one" in name else 2
    command = [*WRAPPER, *LAUNCHERS[name], RANK, str(tmp_path), ",".join(["waits"] * ranks)]
    ready = [tmp_path / f"ready-{rank}" for rank in range(ranks)]
    status = run(command, tmp_path / "log", ready)
    log = (tmp_path / "log").read_text()
    assert status == STOPPED, log[-4000:]
    # Once; where the launcher dies of the signal, by the kernel and by the wrapper, which knows no better.
    assert log.count("TrainingStopped: 1 signals") == ranks or (ranks == 1 and "TrainingStopped: 2 signals" in log)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAUNCHERS)
def test_without_the_wrapper_a_stop_is_no_75(tmp_path, name):
    """When this fails, launchers pass statuses on: the wrapper may go."""
    ranks = 1 if "one" in name else 2
    command = [*LAUNCHERS[name], RANK, str(tmp_path), ",".join(["waits"] * ranks)]
    status = run(command, tmp_path / "log", [tmp_path / f"ready-{rank}" for rank in range(ranks)])
    assert status in (1, -signal.SIGTERM)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["torchrun", "accelerate"])
@pytest.mark.parametrize(
    ("fails", "status"),
    [(None, STOPPED), ("nan", 65), ("killed", 1)],
)
def test_a_training_of_two_processes_ends_with_its_own_status(tmp_path, name, fails, status):
    given = ["--output_dir", str(tmp_path), "--step_s", "0.3", *(["--fails", fails] if fails else [])]
    when = [] if fails else [tmp_path / "step-4"]
    assert run([*WRAPPER, *LAUNCHERS[name], TRAINING, *given], tmp_path / "log", when) == status, (
        tmp_path / "log"
    ).read_text()[-4000:]
    if fails is None:
        step = json.loads((tmp_path / "seen-0-0.json").read_text())["step"]
        assert 4 <= step < 10
        assert (tmp_path / "run" / f"checkpoint-{step}").is_dir()


@pytest.mark.nightly
def test_a_rank_killed_while_the_others_save_is_no_stop(tmp_path):
    command = [*WRAPPER, *LAUNCHERS["torchrun"], RANK, str(tmp_path), "waits,waits_long"]
    with subprocess.Popen(command, env=clean_environment(HELPERS)) as process:
        ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
        while not all(path.exists() and path.read_text() for path in ready):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(ready[1].read_text()), signal.SIGKILL)
        assert process.wait(60) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["torchrun", "accelerate, one process"])
def test_ranks_whose_wrapper_is_killed_save_and_stop(tmp_path, name):
    ranks = 1 if "one" in name else 2
    command = [*WRAPPER, *LAUNCHERS[name], RANK, str(tmp_path), ",".join(["waits"] * ranks)]
    ready = [tmp_path / f"ready-{rank}" for rank in range(ranks)]
    assert run(command, tmp_path / "log", ready, number=signal.SIGKILL) == -signal.SIGKILL
    ends = time.monotonic() + 30
    while (tmp_path / "log").read_text().count("TrainingStopped: ") < ranks:
        assert time.monotonic() < ends, (tmp_path / "log").read_text()
        time.sleep(0.05)

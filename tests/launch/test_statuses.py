"""The wrapper ends with the training's own status, whatever the launcher says, is signalled, or ignores."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from locations import HELPERS, ROOT

from hf_ext.launching import main

LAUNCHER = str(HELPERS / "small_launcher.py")
WRAPPER = [sys.executable, "-m", "hf_ext.launching"]
STOPPED = 75


def wrapped(*command: str, grace_s: int = 20, wrapper: list[str] = WRAPPER, **environment: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen([*wrapper, "--grace_s", str(grace_s), *command], env=environment, cwd=ROOT)


def status_of(*command: str, **given) -> int:
    with wrapped(*command, **given) as process:
        return process.wait(60)


def ready(folder: Path, ranks: int = 1) -> list[int]:
    """The process numbers of ranks that handle signals."""
    paths, ends = [folder / f"ready-{rank}" for rank in range(ranks)], time.monotonic() + 30
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < ends
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


def signalled(folder: Path, *command: str, ranks: int = 2, send: tuple[str, ...] = ("SIGTERM",), **given) -> int:
    """The status where the wrapper is signalled once all ranks are ready."""
    with wrapped(*command, **given) as process:
        ready(folder, ranks)
        for name in send:
            process.send_signal(getattr(signal, name))
            time.sleep(0.2)
        return process.wait(60)


def is_alive(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["done,done"], 0),
        (["stopped,stopped"], STOPPED),
        (["stopped,0.3:done"], STOPPED),
        (["stopped,killed"], 1),  # nobody knows what it had saved
        (["stopped,0.3:nan"], 65),
        (["0.6:nan,disk"], 74),  # the first is the cause
        (["nan,0.6:disk"], 65),
        (["traceback,0.6:disk"], 1),
        (["mother"], STOPPED),  # the status of a process that the rank started is not its own
        (["stopped,stopped", "stopped,killed"], 1),
        (["stopped,stopped", "killed,killed"], 1),
        (["stopped,killed", "stopped,stopped"], STOPPED),
        (["nan,nan", "done,done"], 0),
    ],
)
def test_the_status_is_that_of_the_ranks_of_the_last_attempt(tmp_path, words, status):
    assert status_of(sys.executable, LAUNCHER, "passes", str(tmp_path), *words) == status


def test_without_the_wrapper_the_launcher_says_1(tmp_path):
    command = [sys.executable, LAUNCHER, "passes", str(tmp_path), "stopped,stopped"]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_signals_reach_the_ranks_which_save_and_stop(tmp_path, name):
    command = [sys.executable, LAUNCHER, "passes", str(tmp_path), "waits,waits_long"]
    assert signalled(tmp_path, *command, send=(name,)) == STOPPED


def test_a_rank_that_outlives_its_launcher_is_asked_to_stop_and_waited_for(tmp_path):
    command = [sys.executable, LAUNCHER, "dies", str(tmp_path), "waits_long"]
    assert signalled(tmp_path, *command, ranks=1) == STOPPED


def test_ranks_of_a_killed_launcher_do_not_go_on_alone(tmp_path):
    with wrapped(sys.executable, LAUNCHER, "passes", str(tmp_path), "waits,waits") as process:
        ranks = ready(tmp_path, 2)
        (launcher,) = psutil.Process(process.pid).children()
        launcher.kill()
        assert process.wait(60) == STOPPED
    assert not any(is_alive(rank) for rank in ranks)


@pytest.mark.parametrize(("manner", "words"), [("deaf", "waits,waits"), ("passes", "deaf,deaf")])
def test_what_ignores_sigterm_is_killed_when_its_time_is_over(tmp_path, manner, words):
    command = [sys.executable, LAUNCHER, manner, str(tmp_path), words]
    began = time.monotonic()
    assert signalled(tmp_path, *command, grace_s=1) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 20
    assert not any(is_alive(rank) for rank in ready(tmp_path, 2))


def test_ctrl_c_three_times_ends_at_once_what_does_not_end(tmp_path):
    command = [sys.executable, LAUNCHER, "deaf", str(tmp_path), "deaf,deaf"]
    assert signalled(tmp_path, *command, send=("SIGINT",) * 3, grace_s=50) == 128 + signal.SIGKILL


def test_ctrl_backslash_ends_everything_at_once(tmp_path):
    command = [sys.executable, LAUNCHER, "passes", str(tmp_path), "waits_long,waits_long"]
    assert signalled(tmp_path, *command, send=("SIGQUIT",), grace_s=50) == 128 + signal.SIGKILL
    assert not any(is_alive(rank) for rank in ready(tmp_path, 2))


def test_sigterm_as_often_as_machines_send_it_is_one_stop(tmp_path):
    command = [sys.executable, LAUNCHER, "passes", str(tmp_path), "waits_long,waits_long"]
    assert signalled(tmp_path, *command, send=("SIGTERM",) * 4) == STOPPED


def test_a_wrapper_in_a_wrapper_passes_signal_and_status_on(tmp_path):
    command = [*WRAPPER, "--grace_s", "15", sys.executable, LAUNCHER, "passes", str(tmp_path), "waits,waits"]
    assert signalled(tmp_path, *command) == STOPPED


def test_what_an_earlier_start_left_counts_for_nothing(tmp_path):
    note = '{"status": 75, "attempt": 0, "ranks": 1, "time": 0.0}'
    (tmp_path / "0-0").write_text(note)
    assert status_of("sh", "-c", "exit 1", HF_EXT_STATUS_FOLDER=str(tmp_path)) == 1
    assert (tmp_path / "0-0").read_text() == note


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (["no_such_launcher"], 127, "no_such_launcher: No such file"),
        ([str(ROOT / "README.md")], 126, "Permission denied"),
        (["sh", "-c", "exit 3"], 3, ""),
        (["sh", "-c", "kill -KILL $$"], 137, ""),
        (["true"], 0, ""),
    ],
)
def test_a_command_that_is_no_training_ends_as_in_a_shell(command, status, words, capfd):
    assert main(command) == status
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "no command"),
        (["srun", "accelerate", "launch"], "srun hf-ext launch accelerate"),
        (["--grace_s", "-5", "true"], "'-5' is no whole number of seconds"),
        (["train", "--max_steps", "3"], "hf-ext launch accelerate launch -m hf_ext train --max_steps 3"),
    ],
)
def test_a_command_that_cannot_work_is_refused_with_the_one_that_can(command, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert words in capsys.readouterr().err


def test_signal_handlers_are_back_when_the_wrapper_has_ended():
    before = [signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]
    main(["true"])
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]

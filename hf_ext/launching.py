"""Runs a launcher so that ranks can save and stop, and ends with the training's own exit status.

    hf-ext launch accelerate launch --config_file accelerate_configs/4gpu_ddp.yaml recipes/max_speed.py
    hf-ext launch torchrun --nproc_per_node 4 recipes/mlm.py
    srun hf-ext launch accelerate launch ...        # on each node: before the launcher, after srun

What launchers do by themselves, and a scheduler cannot work with (accelerate 1.15, torch 2.13):

- Both end with 1, whatever their processes ended with. Torch's error file does not help: accelerate never copies it,
  and where torchrun was signalled it holds the signal. So each rank leaves its status in a folder
  (`errors.exit_on_errors`) that is new for each start, so that nothing of an earlier one is in it, and that processes
  of a rank are not told of.
- `accelerate launch` of one process dies of SIGTERM and leaves the process training. The kernel hands such orphans to
  this process (Linux), which asks them to stop, and waits.
- torch elastic dies of SIGUSR1, the signal that `srun` passes on (of SIGTERM srun kills its tasks): it becomes SIGTERM.
- Whoever is killed with -9 tells nobody: launcher and ranks get SIGTERM when their parent ends (Linux), and save.
- torch elastic kills ranks 30 s after a signal (accelerate has no flag for it, but its environment does): `--grace_s`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from .commands import COMMANDS
from .errors import STATUS_FOLDER, TrainingStopped
from .orphans import adopting_orphans, stop_with_parent
from .output import show_text

_PASSED_ON = {"SIGTERM": "SIGTERM", "SIGINT": "SIGINT", "SIGHUP": "SIGHUP", "SIGUSR1": "SIGTERM"}
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as of a shell
_SLACK_S = 10.0  # for a launcher to kill its ranks itself, and say so


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status that the training ended with.

    75 (saved and stopped: run the same command again) only where every rank of this machine said 75, or finished; the
    first other status that a rank gave; else the launcher's own, 128 + N where it died of signal N, 127 where there is
    no such command, and 126 where it cannot be executed.
    """
    parser = argparse.ArgumentParser(prog="hf-ext launch", description=__doc__.split("\n")[0])
    parser.add_argument("--grace_s", type=_seconds, default=110, help="seconds to save after a signal (110)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="accelerate launch ..., torchrun ..., python ...")
    args = parser.parse_args(argv)
    command = args.command[args.command[:1] == ["--"] :]
    if not command:
        parser.error("no command: hf-ext launch accelerate launch ... or hf-ext launch torchrun ...")
    if command[0] in COMMANDS:
        parser.error(f"{command[0]} is no launcher: hf-ext launch accelerate launch -m hf_ext {' '.join(command)}")
    if Path(command[0]).name == "srun":  # whose nodes see neither the folder of statuses nor SIGTERM
        parser.error("srun goes before, so that each node has its own: srun hf-ext launch accelerate launch ...")
    with tempfile.TemporaryDirectory(prefix="hf_ext-status-") as folder, adopting_orphans():
        try:
            status = _run(command, folder, args.grace_s)
        except OSError as error:
            print(show_text(f"hf-ext launch: {command[0]}: {error.strerror}"), file=sys.stderr)
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        return _choose(status if status >= 0 else 128 - status, Path(folder))


def _seconds(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of seconds, 0 or more")
    return int(text)


def _run(command: list[str], folder: str, grace_s: int) -> int:
    """Runs the launcher to its end and that of its ranks; returns its status, negative for a signal."""
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_s), **os.environ, STATUS_FOLDER: folder}
    ends = float("inf")
    with _Signals() as signals:
        # In a session of its own: Ctrl-C in a terminal then comes once, from here.
        launcher = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=stop_with_parent)
        while launcher.poll() is None:
            if signals.received and ends == float("inf"):
                launcher.send_signal(getattr(signal, _PASSED_ON.get(signals.received[0], "SIGTERM")))
                ends = time.monotonic() + grace_s + min(grace_s, _SLACK_S)
            if time.monotonic() > ends or signals.is_impatient():
                _kill(psutil.Process().children(recursive=True))  # not waited for: Popen would read 0 then
            time.sleep(0.05)
        orphans = _left_behind(folder) if launcher.returncode else []
        for orphan in orphans:
            orphan.terminate()
        ends = min(ends, time.monotonic() + grace_s)
        while orphans and time.monotonic() < ends and not signals.is_impatient():
            _, orphans = psutil.wait_procs(orphans, timeout=0.05)
        _kill(orphans)
    return launcher.returncode


def _left_behind(folder: str) -> list[psutil.Process]:
    """Ranks that outlived their launcher: of the orphans, those that it started, not what a rank did."""
    left = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if process.environ().get(STATUS_FOLDER) == folder:
                left.append(process)
    return left


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _choose(launcher: int, folder: Path) -> int:
    """The training's status: the launcher's, or what ranks said in the last of its attempts (--max_restarts)."""
    said: list[dict[str, Any]] = []
    for path in folder.iterdir():
        with suppress(ValueError):  # half written: as if that rank had said nothing
            said.append(json.loads(path.read_text()))
    said = [one for one in said if one["attempt"] == max(other["attempt"] for other in said)]
    stopped = TrainingStopped.exit_code
    failures = [one for one in said if one["status"] not in (0, stopped, None)]
    if launcher == 0 or not said:
        return launcher
    if failures:  # the first is the cause; the others lost their partner, or were stopped because of it
        return int(min(failures, key=lambda one: one["time"])["status"])
    ended = [one for one in said if one["status"] is not None]  # who was killed has said at most that it began
    is_complete = len(ended) >= max(one["ranks"] for one in said)
    return stopped if is_complete and any(one["status"] == stopped for one in said) else launcher


class _Signals:
    """Notes signals instead of dying of them, while entered; those that this process ignores stay ignored (nohup)."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (getattr(signal, name) for name in (*_PASSED_ON, "SIGQUIT") if hasattr(signal, name)):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)

    def is_impatient(self) -> bool:
        """Whether somebody pressed Ctrl-C a third time, or Ctrl-\\. SIGTERM comes from machines, and more than once."""
        return self.received.count("SIGINT") >= 3 or "SIGQUIT" in self.received


if __name__ == "__main__":
    sys.exit(main())

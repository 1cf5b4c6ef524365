"""Trains in processes of their own that are killed with SIGKILL before a chosen file operation or after a step.

Processes are forked from one that has everything imported, so that an attempt costs no imports.
"""

import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from families import FAMILIES, WITH_WORKERS, make_trainer
from ranks import become_rank, fork_ranks
from transformers import TrainerCallback

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
LIMIT_S = 120


@dataclass(frozen=True)
class Kill:
    """When a process is killed, and the others with it.

    Attributes:
        operation: before which file operation in the output folder: counted from 1, over the process, or over what
            follows step `after_step` until the end of the next, in which a save is finished.
        at_step: after which optimizer step.
        rank: which process.
    """

    operation: int | None = None
    after_step: int | None = None
    at_step: int | None = None
    rank: int = 0


@dataclass(frozen=True)
class Job:
    """A command: what is trained where. The same job again is the same command again."""

    family: str
    encoders: Path
    folder: Path  # of the case; `folder / "run"` is the output folder
    resume: str = "auto"
    seed: int = 3

    @property
    def output_dir(self) -> Path:
        return self.folder / "run"

    @property
    def num_ranks(self) -> int:
        return {**FAMILIES, **WITH_WORKERS}[self.family].num_ranks


@dataclass(frozen=True)
class Attempt:
    """What became of one execution of a job.

    Attributes:
        end: "killed", "ended", "spared" (nothing was left to be killed at) or the last line of an error.
        began_at: the step that training began with; None if it did not come to that.
        last_step: optimizer steps done at the end, by any process.
        num_operations: of each process in the output folder; 0 where it was killed.
    """

    end: str
    began_at: int | None
    last_step: int
    num_operations: tuple[int, ...]


class Observer(TrainerCallback):
    """Notes where training is, outside the output folder, and kills the process when its time has come."""

    def __init__(self, job: Job, kill: Kill | None, log: int):
        self.job, self.kill, self.log = job, kill, log
        self.is_armed = job.resume == "auto" and (kill is None or kill.after_step is None)
        self.operations = itertools.count(1)
        self.num_operations = 0

    def watch_files(self) -> None:
        """Counts what changes or reads files of the output folder from now on. A kill loses no write: fsync is free."""
        sys.addaudithook(self.see)
        os.fsync = lambda descriptor: self.see("open", (self.job.output_dir,))  # type: ignore[assignment]

    def see(self, event: str, args: Any) -> None:
        if event not in OPERATIONS or not self.is_armed:
            return
        by_descriptor = event in ("os.remove", "os.rmdir") and args[1] != -1  # as in shutil.rmtree
        if by_descriptor or str(args[0]).startswith(str(self.job.output_dir)):
            self.num_operations = next(self.operations)
            if self.kill and self.num_operations == self.kill.operation:
                os.kill(os.getpid(), signal.SIGKILL)

    def note(self, what: str, number: int) -> None:
        os.write(self.log, f"{what} {number}\n".encode())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("begin", state.global_step)
        self.is_armed = self.kill is None or self.kill.after_step is None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.kill and self.kill.after_step is not None and state.global_step == self.kill.after_step + 1:
            self.note("spared", self.num_operations)
            os._exit(1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("step", state.global_step)
        if self.kill and state.global_step == self.kill.at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        self.is_armed = self.is_armed or bool(self.kill and self.kill.after_step == state.global_step)


def train(job: Job, kill: Kill | None, rank: int, port: int) -> None:
    """Body of a process: as a recipe's, with the model saved at the end."""
    become_rank(rank, port, job.num_ranks, job.folder / f"output-{rank}.txt")
    log = os.open(_log(job, rank), os.O_CREAT | os.O_WRONLY)
    observer = Observer(job, kill if kill and kill.rank == rank else None, log)
    observer.watch_files()
    trainer = make_trainer(job.family, job.encoders, job.output_dir, seed=job.seed, resume=job.resume)
    trainer.add_callback(observer)
    trainer.train()
    trainer.save_model()
    for loader in trainer.accelerator._dataloaders:  # torch waits 5 s for each worker that is left to it
        getattr(loader, "base_dataloader", loader)._iterator = None
    observer.note("operations", observer.num_operations)


def attempt(job: Job, kill: Kill | None = None) -> Attempt:
    """Executes a job once."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for rank in range(job.num_ranks):
        _log(job, rank).unlink(missing_ok=True)
    processes = fork_ranks(train, job.num_ranks, job, kill)
    deadline = time.monotonic() + LIMIT_S
    try:
        while _running(processes) and not _dead(processes):
            assert time.monotonic() < deadline, f"{job} took more than {LIMIT_S} s"
            wait([process.sentinel for process in _running(processes)], LIMIT_S)
        ends = {process.exitcode for process in _dead(processes)}
    finally:
        for process in processes:  # as a launcher does when one is dead
            process.kill()
            process.join()
    end = "killed" if -signal.SIGKILL in ends else "failed" if ends else "ended"  # of the others, one may have failed
    return _describe(job, kill, end)


def _log(job: Job, rank: int) -> Path:
    return job.folder / f"steps-{rank}.txt"


def _running(processes: list[Any]) -> list[Any]:
    return [process for process in processes if process.exitcode is None]


def _dead(processes: list[Any]) -> list[Any]:
    return [process for process in processes if process.exitcode]


def _describe(job: Job, kill: Kill | None, end: str) -> Attempt:
    noted = []
    for rank in range(job.num_ranks):
        path = _log(job, rank)  # not there yet where the process was killed at once
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        noted.append({what: int(number) for what, number in lines})
    own = noted[kill.rank if kill else 0]
    if "spared" in own:
        end = "spared"
    elif end == "failed":
        end = (job.folder / "output-0.txt").read_text().strip().splitlines()[-1]
    operations = tuple(rank.get("operations", rank.get("spared", 0)) for rank in noted)
    return Attempt(end, own.get("begin"), max(rank.get("step", 0) for rank in noted), operations)

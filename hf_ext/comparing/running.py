"""Running the sides: fresh processes, taking turns, and what each left behind."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ..checkpoints import find_other_run
from ..errors import ArgumentError, HfExtError
from ..files import Facts, Json
from ..reporting import PlanRecord, RunRecord, Throughput, from_json, read_object, read_record
from ..text import write_json
from .sides import Side

logger = logging.getLogger(__name__)

TAIL_LINES = 30
GRACE_S = 5.0  # between asking processes to end and ending them


class ChildFailed(HfExtError):
    """A run of a side ended with an error; the message ends with the last lines of its log."""


@dataclass
class SideRun:
    """One run of one side. `error` says why there is nothing else, for an ablation that cannot run."""

    side: Side
    round: int
    wall_seconds: float = 0.0
    throughput: Throughput = field(default_factory=Throughput)
    results: Facts = field(default_factory=dict)  # as JSON has them
    plan: PlanRecord = field(default_factory=PlanRecord)
    error: str = ""
    cpu_seconds: float = 0.0  # 0 on Windows, where those of children are not counted
    folder: Path = Path()

    @property
    def record(self) -> RunRecord:
        """The same as `results`."""
        return from_json(RunRecord, self.results)


def run_all(
    sides: Sequence[Side],
    rounds: int,
    run_one: Callable[[Side, int], SideRun],
    find_ablations: Callable[[SideRun], list[Side]] | None,
) -> list[SideRun]:
    """Runs A B C A B C ...: every side once per round, so that drift of the machine meets all of them.

    Args:
        sides: baselines and the optimized side.
        rounds: how often each runs.
        run_one: runs a side in a round.
        find_ablations: more sides, from the first run of the optimized one; where one of these fails, its run says so
            and the comparison goes on.
    """
    runs: list[SideRun] = []
    ablations: list[Side] = []
    for round_ in range(rounds):
        runs += [run_one(side, round_) for side in sides]
        if find_ablations and not round_:
            ablations = find_ablations(next(run for run in runs if run.side.role == "optimized"))
        for side in ablations:
            try:
                runs.append(run_one(side, round_))
            except ChildFailed as error:
                runs.append(SideRun(side, round_, error=str(error)))
    return runs


def run_child(command: Sequence[str], side: Side, round_: int, folder: Path, is_timed: bool = True) -> SideRun:
    """Runs one side in a fresh process and reads what it wrote; output goes to `<folder>.log`.

    A run that ended well in the same folder by the same command, before the comparison was started again, is kept.
    `is_timed`: steps after the warm-up are needed.

    Raises:
        ArgumentError: the folder holds a run of another command already.
        ChildFailed: the process failed, or left no throughput.
    """
    kept = find_finished(folder, command)
    if kept is not None:
        logger.info("%s, round %d: measured before, kept", side.name, round_)
        return _read_run(side, round_, kept, folder)
    log = Path(f"{folder}.log")
    began = time.perf_counter()
    before = os.times()
    with log.open("w", encoding="utf-8") as file:
        status = _run(command, file)
    wall_seconds = time.perf_counter() - began
    spent = [end - start for start, end in zip(before, os.times())]
    shutil.rmtree(folder / "embeddings", ignore_errors=True)
    if status:
        raise ChildFailed(f"{side.name}, round {round_}: exit status {status}.\n{_tail(log)}")
    if is_timed:
        measured = read_record(Throughput, folder / "throughput.json")
        if not measured:
            raise ChildFailed(
                f"{side.name}, round {round_}: {command[1:2]} wrote no throughput.json. A recipe with another Trainer "
                f"than FastTrainer needs trainer.add_callback(ThroughputCallback(model)).\n{_tail(log)}"
            )
        if not measured.measured_steps:
            raise ChildFailed(
                f"{side.name}, round {round_}: all {measured.warmup_steps} steps were warm-up. Train for more steps."
            )
    seconds = {"wall_seconds": wall_seconds, "cpu_seconds": spent[2] + spent[3]}  # of children: user and system
    _write_record(folder, command, seconds)
    return _read_run(side, round_, seconds, folder)


def _run(command: Sequence[str], output: Any) -> int:
    """Runs a command; returns its exit status. Where it is interrupted, nothing that was started goes on."""
    process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        return int(process.wait())
    except BaseException:
        end_processes([*process.children(recursive=True), process])
        raise


def end_processes(started: Iterable[psutil.Process]) -> None:
    """Asks processes to end, and ends those that do not; launchers give ranks sessions of their own."""
    left = [*started]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                end(process)
        left = psutil.wait_procs(left, GRACE_S)[1]


def _read_run(side: Side, round_: int, seconds: Facts, folder: Path) -> SideRun:
    return SideRun(
        side,
        round_,
        throughput=read_record(Throughput, folder / "throughput.json"),
        results=read_object(folder / "all_results.json"),
        plan=read_record(PlanRecord, folder / "plan.json"),
        folder=folder,
        **seconds,
    )


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return f"The last lines of {log}:\n" + "\n".join(lines)


def find_finished(folder: Path, command: Sequence[str]) -> dict[str, float] | None:
    """Returns the seconds of a run that ended well in `folder`, or makes `folder` new and empty for one to begin.

    Beside the folder stands `<folder>.run.json`: the command, what its files held, and how long it took. The code that
    the command runs is not part of it.

    Raises:
        ArgumentError: what is in the folder came from another command, or a run still writes there.
        DataError: the file beside it is damaged.
    """
    found = read_object(Path(f"{folder}.run.json"))
    if folder.exists():
        if found.get("run") != _describe(command):
            raise ArgumentError(
                f"{folder} is there already, from another command or other files: choose another --output_dir, or "
                "remove it."
            )
        if found["seconds"] is not None:
            return dict(found["seconds"])
        if (other := find_other_run(folder)) is not None:  # a comparison that was killed leaves its child at work
            raise ArgumentError(f"{other} (Left at work by a comparison that was killed.)")
        shutil.rmtree(folder)  # killed half-way: what it measured is no run
    folder.mkdir(parents=True)
    _write_record(folder, command, None)
    return None


def _write_record(folder: Path, command: Sequence[str], seconds: Mapping[str, float] | None) -> None:
    write_json(f"{folder}.run.json", {"run": _describe(command), "seconds": seconds})


def _describe(command: Sequence[str]) -> Json:
    """Describes the command, with size and time of its files: a YAML that was edited makes another run."""
    files = [Path(word) for word in command[1:] if len(word) < 1024 and Path(word).is_file()]
    found = {str(path): [path.stat().st_size, path.stat().st_mtime] for path in files}
    return {"command": [*command], "files": found}

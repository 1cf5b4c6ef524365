"""Running the sides: fresh processes, taking turns, and what each left behind."""

from __future__ import annotations

import hashlib
import json
import logging
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ..checkpoints.run_lock import find_other_run
from ..errors import ArgumentError, HfExtError
from ..files import write_text
from .sides import Side

logger = logging.getLogger(__name__)

TAIL_LINES = 30
MAX_HASHED_BYTES = 2**20  # larger files, which are data, are known by size and time
GRACE_S = 5.0  # between asking processes to end and ending them


class ChildFailed(HfExtError):
    """A run of a side ended with an error; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Cost:
    """Of one run.

    Attributes:
        seconds: of the clock.
        cpu_seconds: of the processor, of the process and all that it waited for; None where it was not recorded.
        stolen_share: of the machine's core time, what a hypervisor gave to others meanwhile; None where the system
            does not say.
    """

    seconds: float
    cpu_seconds: float | None = None
    stolen_share: float | None = None


def start_costs() -> Callable[[], Cost]:
    """Begins to count; what is returned ends it. Counts child processes that ended in between, and no others."""
    began, used, before = time.perf_counter(), _children_seconds(), psutil.cpu_times()

    def end() -> Cost:
        times, passed = psutil.cpu_times(), time.perf_counter() - began
        stolen = getattr(times, "steal", None)  # Linux alone says it
        if stolen is not None:
            stolen = round((stolen - before.steal) / max(sum(times[:8]) - sum(before[:8]), 1e-9), 4)
        return Cost(passed, _children_seconds() - used, stolen)

    return end


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass
class SideRun:
    """One run of one side. `error` says why there is nothing else, for an ablation that cannot run."""

    side: Side
    round: int
    wall_seconds: float = 0.0
    throughput: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    cpu_seconds: float | None = None
    stolen_share: float | None = None


def run_all(
    sides: Sequence[Side],
    rounds: int,
    run_one: Callable[[Side, int], SideRun],
    find_ablations: Callable[[SideRun], list[Side]] | None = None,
    done: Sequence[SideRun] = (),
) -> list[SideRun]:
    """Runs A B C A B C ...: every side once per round, so that drift of the machine meets all of them.

    Args:
        sides: baselines and the optimized side.
        rounds: how often each runs.
        run_one: runs a side in a round.
        find_ablations: more sides, from the first run of the optimized one; where one of these fails, its run says so
            and the comparison goes on.
        done: what an earlier call for fewer rounds returned; only the rounds after it are run.
    """
    runs = [*done] or [run_one(side, 0) for side in sides]
    optimized = next(run for run in runs if run.side.role == "optimized")
    ablations = find_ablations(optimized) if find_ablations else []
    for round_ in range(1 + max(run.round for run in done) if done else 0, rounds):
        if round_:
            runs += [run_one(side, round_) for side in sides]
        for side in ablations:
            try:
                runs.append(run_one(side, round_))
            except ChildFailed as error:
                runs.append(SideRun(side, round_, error=str(error)))
    return runs


def run_child(command: Sequence[str], side: Side, round_: int, folder: Path) -> SideRun:
    """Runs one side in a fresh process and reads what it wrote; output goes to `<folder>.log`.

    A run that ended well in the same folder by the same command, before the comparison was started again, is kept.

    Raises:
        ArgumentError: the folder holds a run of another command already.
        ChildFailed: the process failed, or left no throughput.
    """
    kept = find_finished(folder, command)
    if kept is not None:
        logger.info("%s, round %d: measured before, kept", side.name, round_)
        return _read_run(side, round_, kept, folder)
    log = Path(f"{folder}.log")
    end = start_costs()
    with log.open("w", encoding="utf-8") as file:
        status = _run(command, file)
    cost = end()
    shutil.rmtree(folder / "embeddings", ignore_errors=True)
    if status:
        raise ChildFailed(f"{side.name}, round {round_}: exit status {status}.\n{_tail(log)}")
    _check_throughput(_read_json(folder / "throughput.json"), command, side, round_, log)
    _write_record(folder, command, cost)
    return _read_run(side, round_, cost, folder)


def _run(command: Sequence[str], output: Any) -> int:
    """Exit status; where this process is interrupted meanwhile, nothing that was started goes on."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait()
    except BaseException:
        end_processes(process, psutil.Process(process.pid).children(recursive=True))
        raise


def end_processes(process: subprocess.Popen[Any], started: Iterable[psutil.Process]) -> None:
    """Asks a process and what it started to end, and ends what does not; launchers give ranks sessions of their own."""
    left = [*started]
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        left = psutil.wait_procs(left, GRACE_S)[1]
    process.wait()


def _check_throughput(
    throughput: dict[str, Any] | None, command: Sequence[str], side: Side, round_: int, log: Path
) -> None:
    if throughput is None:
        raise ChildFailed(
            f"{side.name}, round {round_}: {command[1:2]} wrote no throughput.json. A recipe with another Trainer than "
            f"FastTrainer needs trainer.add_callback(ThroughputCallback(model)).\n{_tail(log)}"
        )
    if not throughput["measured_steps"]:
        raise ChildFailed(
            f"{side.name}, round {round_}: all {throughput['warmup_steps']} steps were warm-up. Train for more steps."
        )
    if side.launch is not None and throughput["num_processes"] != side.launch.num_processes:
        raise ChildFailed(
            f"{side.name}, round {round_}: {side.launch} is for {side.launch.num_processes} processes, and "
            f"{throughput['num_processes']} trained together. A recipe's script must make FastTrainingArguments."
        )


def _read_run(side: Side, round_: int, cost: Cost, folder: Path) -> SideRun:
    throughput, results, plan, settings = (
        _read_json(folder / f"{name}.json") or {} for name in ("throughput", "all_results", "plan", "training_args")
    )
    files: dict[str, Any] = {"throughput": throughput, "results": results, "plan": plan, "settings": settings}
    return SideRun(side, round_, cost.seconds, **files, cpu_seconds=cost.cpu_seconds, stolen_share=cost.stolen_share)


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return f"The last lines of {log}:\n" + "\n".join(lines)


def find_finished(folder: Path, command: Sequence[str]) -> Cost | None:
    """Returns the cost of a run that ended well in `folder`, or makes `folder` new and empty for one to begin.

    Beside the folder stands `<folder>.run.json`: the command, what its files held, and how long it took. The code that
    the command runs is not part of it.

    Raises:
        ArgumentError: what is in the folder came from another command, or a run still writes there.
    """
    record = _record_of(folder)
    found = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
    if folder.exists():
        if found is None or found["run"] != _describe(command):
            raise ArgumentError(
                f"{folder} is there already, from another command or other files: choose another --output_dir, or "
                "remove it."
            )
        if found["cost"] is not None:
            return Cost(**found["cost"])
        if (other := find_other_run(folder)) is not None:  # a comparison that was killed leaves its child at work
            raise ArgumentError(f"{other} (Left at work by a comparison that was killed.)")
        shutil.rmtree(folder)  # killed half-way: what it measured is no run
    folder.mkdir(parents=True)
    _write_record(folder, command, None)
    return None


def _record_of(folder: Path) -> Path:
    return Path(f"{folder}.run.json")


def _write_record(folder: Path, command: Sequence[str], cost: Cost | None) -> None:
    record = {"run": _describe(command), "cost": asdict(cost) if cost else None}
    write_text(_record_of(folder), json.dumps(record, indent=1) + "\n")


def _describe(command: Sequence[str]) -> dict[str, Any]:
    """The command, and what the files among its words hold: a YAML that was edited makes another run."""
    files = {word: _fingerprint(Path(word)) for word in command[1:] if len(word) < 1024 and Path(word).is_file()}
    return {"command": [*command], "files": files}


def _fingerprint(path: Path) -> str:
    status = path.stat()
    if status.st_size > MAX_HASHED_BYTES:
        return f"{status.st_size} bytes, {status.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()

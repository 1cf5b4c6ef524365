"""As many threads as this CPU's cores hold steadily, where nobody said how many.

Class N. Effect: products of matrices run on several cores. `accelerate launch` gives a process one thread where no
configuration names a CPU (`accelerate/commands/launch.py`, 1.15), torch alone one per core; on shared machines a core
that is taken away stalls the others at the end of each product, and two threads may be slower than one.
Hardware: CPUs with two cores or more, a run of one process. OMP_NUM_THREADS or MKL_NUM_THREADS that you set are met;
`--without cpu_threads` keeps what the process has.
Evidence: rates of products in the run's precision on 1, 2, 4, ... threads, in turn: the slowest quarter of rounds, by
which it is decided, and the median. More threads must be 1.2 times as fast. Where they fall behind one thread later,
the live line says so; they are not changed then, since sums over several threads may differ in their last bits and a
run continues as it began: the number is kept with it.
Cost: a quarter of a second on two cores.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from ..held import Held
from .base import Context, Decision, Kind, Run, off
from .measured_once import measure_once

NAME = "cpu_threads"
KIND: Kind = "N"
MIN_GAIN = 1.2  # of the slowest quarter of rounds; below it, others may have the cores
ROUNDS = 12
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_KEY = "threads"
_HELD = Held(torch.get_num_threads, torch.set_num_threads)
_SHAPE = (1024, 512, 1024)  # tokens, width in, width out: of a small encoder's feed-forward layer


def decide(context: Context) -> Decision:
    """On where one process has several cores, and the user has not said how many threads."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    problem = _problem(context)
    if problem:
        return Decision(NAME, KIND, "skipped", problem)
    reason = f"at most one for each of {context.cpu_cores} cores"
    return Decision(NAME, KIND, "applied", reason, {"most": context.cpu_cores})


def _problem(context: Context) -> str | None:
    if context.hardware.kind != "cpu":
        return f"{context.hardware.name} is not a CPU"
    if context.world_size > 1:
        return f"{context.world_size} processes share the cores: the launcher says how many each has"
    if context.cpu_cores < 2:
        return "one core"
    name = chosen_by_user()
    return name and f"{name}={os.environ[name]} is set"


def chosen_by_user(launcher: Path | None = None) -> str | None:
    """The variable by which the user chose a number of threads; None where none is set, or by accelerate alone.

    accelerate's launcher sets OMP_NUM_THREADS for what it starts; whether it was set before, its own environment tells
    (`launcher`, by default that of the parent process; Linux only, elsewhere what is set counts as the user's).
    """
    found = next((name for name in VARIABLES if os.environ.get(name)), None)
    if found is None or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return found
    try:
        given = (launcher or Path(f"/proc/{os.getppid()}/environ")).read_bytes().split(b"\0")
    except OSError:
        return found
    set_by_user = {line.partition(b"=")[0].decode(errors="replace") for line in given if not line.endswith(b"=")}
    return next((name for name in VARIABLES if name in set_by_user), None)


def apply(decision: Decision, run: Run) -> Decision:
    """Measures, unless this run was begun with a number or one before it has, and sets it until the run is over."""
    most = decision.settings["most"]
    dtype = torch.bfloat16 if run.args.bf16 else torch.float32
    rates: dict[int, list[float]] = {}

    def measure() -> float:
        rates.update(measure_rates(counts_to_try(most), dtype))
        return choose(rates)

    # A run that was begun on threads that nobody wrote down began on those of the environment.
    tried = {"threads": counts_to_try(most), "dtype": dtype}
    threads = min(most, max(1, int(measure_once(run.args, NAME, _KEY, measure, _HELD.read_before(), **tried))))
    run.hold(_HELD, threads)
    measured = {f"gflops_on_{count}": describe(found) for count, found in rates.items()}
    decision = replace(decision, settings={**decision.settings, _KEY: threads})  # compared by a run that goes on
    return decision.with_evidence(**{_KEY: threads}, **measured)


def counts_to_try(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *(1 << i for i in range(most.bit_length()))})


def measure_rates(counts: list[int], dtype: torch.dtype) -> dict[int, list[float]]:
    """GFLOP/s of matrix products by the clock, per number of threads and round, in turn; the number is put back."""
    tokens, width, out = _SHAPE
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for shape in ((tokens, width), (width, out)))
    before = torch.get_num_threads()
    rates: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for _ in range(ROUNDS + 1):
            for count, found in rates.items():
                torch.set_num_threads(count)
                torch.mm(left[:64], right)  # threads start in it
                start = time.perf_counter()
                torch.mm(left, right)
                found.append(2e-9 * tokens * width * out / (time.perf_counter() - start))
    finally:
        torch.set_num_threads(before)
    return {count: found[1:] for count, found in rates.items()}  # libraries start in the first


def choose(rates: dict[int, list[float]]) -> int:
    """The fewest threads that no larger number beats by `MIN_GAIN`, by the slowest quarter of their rounds."""
    best = min(rates)
    for count in sorted(rates):
        if slowest_quarter(rates[count]) >= MIN_GAIN * slowest_quarter(rates[best]):
            best = count
    return best


def slowest_quarter(rates: list[float]) -> float:
    """What three of four rounds reached."""
    return statistics.quantiles(rates, n=4, method="inclusive")[0]


def describe(rates: list[float]) -> list[float]:
    """Slowest quarter and median, GFLOP/s."""
    return [round(slowest_quarter(rates), 1), round(statistics.median(rates), 1)]


def find_stall(threads: int, dtype: torch.dtype) -> str:
    """That products now run faster on one thread than on `threads`, with the rates; empty where they do not."""
    rates = measure_rates([1, threads], dtype)
    one, all_of_them = (slowest_quarter(rates[count]) for count in (1, threads))
    if one < MIN_GAIN * all_of_them:
        return ""
    return f"{threads} threads multiply {all_of_them:.0f} GFLOP/s, one {one:.0f}: something else has their cores"

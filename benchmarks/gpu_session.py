r"""The first 20 minutes on a card that nobody has measured: one command, numbers after each of its parts.

    python benchmarks/gpu_session.py              # writes benchmarks/results/gpu_session.json
    python benchmarks/gpu_session.py --parts speed memory --minutes 10
    python benchmarks/gpu_session.py --size toy --output /tmp/toy.json    # tiny shapes, also on a CPU: does it run?

Parts, in order of worth, each in a process of its own with a time limit (docs/gpu.md says what each measures): tests,
speed, memory, processes. One that fails, crashes, hangs or is out of memory is written down
with the end of its log, and the next begins. Started again, parts that finished on the same sources and device are
kept. The exit code is 1 where a part did not finish, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import time
from pathlib import Path

import psutil
from gpu.machine import describe_machine, find_device, identify_code
from gpu.session import ROOT, Part, Session, run_session
from gpu.work import Work

from hf_ext.cli import quick_imports
from hf_ext.errors import ArgumentError, exit_on_errors

PARTS = {"tests": 2.0, "speed": 12.0, "memory": 3.0, "processes": 3.0}  # minutes of 20
MEASURED = ("speed", "memory")  # by the modules of `gpu`; the others are commands of their own
TOY_LAUNCHES = ("--model_size", "tiny", "--steps", "2", "--rows", "4", "--length", "12")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Of a session, and of a part's own process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "toy"), default="full", help="toy: tiny shapes, no numbers.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="All by default, in this order.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_session.json")
    parser.add_argument("--minutes", type=float, default=20.0, help="Of the whole session.")
    parser.add_argument("--part", choices=MEASURED, help=argparse.SUPPRESS)
    parser.add_argument("--part_seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes {args.minutes:g}: must be above 0, and an end")
    if args.output.is_dir():
        parser.error(f"--output {args.output}: is a folder; name a file, which need not be there")
    return args


def measure(args: argparse.Namespace) -> None:
    """One part, in this process; `--output` is its result."""
    # The first GPU alone: Trainer would split batches over all of them.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    spent_s = time.time() - psutil.Process().create_time()  # importing, which counts
    work = Work(args.size, find_device(), args.output, time.monotonic() + args.part_seconds - spent_s)
    with quick_imports():
        part = importlib.import_module(f"gpu.{args.part}")
    part.measure(work)


def list_parts(args: argparse.Namespace, has_gpu: bool) -> list[Part]:
    """Those that were asked for, in order of worth. Without a GPU tests are collected only, and DDP is launched."""
    script = str(Path(__file__).resolve())
    shared = ("--size", args.size, "--output", "{result}", "--part_seconds", "{seconds}")
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    smoke = (str(ROOT / "benchmarks" / "distributed_smoke.py"), "--output_json", "{result}")
    commands = {
        "tests": ("-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", *map(str, marked)),
        **{name: (script, "--part", name, *shared) for name in MEASURED},
        "processes": (*smoke, *(TOY_LAUNCHES if args.size == "toy" else ())),
    }
    if not has_gpu:
        commands["tests"] += ("--collect-only",)
        commands["processes"] += ("--device", "cpu", "--files", "ddp")
    return [
        Part(name, (sys.executable, *commands[name]), minutes) for name, minutes in PARTS.items() if name in args.parts
    ]


def main(words: list[str] | None = None) -> int:
    """A session, or one of its parts; see the module."""
    args = parse_arguments(words)
    if args.part:
        measure(args)
        return 0
    device = find_device()
    if device.type != "cuda" and args.size == "full":
        raise ArgumentError("No GPU: torch sees no CUDA device. --size toy says whether the session runs, on a CPU.")
    session = Session(args.output, describe_machine(device), identify_code(), args.size)
    print(f"{session.machine['device']} ({session.machine['name']}), {session.code['commit']} -> {args.output}")
    try:
        done = run_session(session, list_parts(args, device.type == "cuda"), args.minutes)
    except KeyboardInterrupt:
        print(f"Interrupted; what was measured is in {args.output}. The same command goes on.")
        return 130
    return 0 if done else 1


if __name__ == "__main__":
    with exit_on_errors():
        sys.exit(main())

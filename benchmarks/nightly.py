"""Runs the suites of minutes (`pytest -m nightly`) in parts of at most 25 minutes, and goes on where it was ended.

    python benchmarks/nightly.py                 what has not passed on this commit yet
    python benchmarks/nightly.py tests/faults    these parts, again
    python benchmarks/nightly.py --list          the parts, with their last results
    python benchmarks/nightly.py --default 3     instead, the default suite three times, into `default_suite.json`

A part is a folder of `tests/`, the tests of an example, or a file where a folder would take longer. The last result of
each stands in `benchmarks/results/nightly.json`: commit, counts, seconds of the clock and of processors, and why tests
were skipped. A part of which no test ran has not passed. The ZeRO tests need DeepSpeed, as `.ci/nightly` installs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NIGHTLY, DEFAULT = RESULTS / "nightly.json", RESULTS / "default_suite.json"
LIMIT_S = 25 * 60
BY_FILE = ("distributed", "faults", "launch", "training", "checkpoints")  # folders of which each file is a part


def part_of(file: str) -> str:
    """The part that a test file belongs to: `tests/FOLDER`, the tests of an example, or the file itself."""
    if file.startswith("recipes/"):
        return str(Path(file).parent)
    folder = Path(file).parts[1:-1]
    return file if not folder or folder[0] in BY_FILE else f"tests/{folder[0]}"


def find_parts() -> dict[str, list[str]]:
    """Part -> its files that have nightly tests, as pytest collects them."""
    found = subprocess.run(
        pytest("-m", "nightly", "-n", "0", "--collect-only"), cwd=ROOT, capture_output=True, text=True
    )
    files = sorted({line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line})
    if not files:
        raise SystemExit(f"Nothing was collected:\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    parts: dict[str, list[str]] = {}
    for file in files:
        parts.setdefault(part_of(file), []).append(file)
    return parts


def pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *words]


def run(*words: str) -> dict[str, object]:
    """Counts, seconds, what failed and what was skipped, of one run of pytest; what it started is ended with it."""
    began, used = time.monotonic(), processor_s()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(pytest("-rfEs", *words), cwd=ROOT, **pipes) as process:
        try:
            output, outcome = process.communicate(timeout=LIMIT_S)[0], "ended"
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(end, KeyboardInterrupt):
                raise
            output, outcome = process.communicate()[0], f"took more than {LIMIT_S // 60} minutes"
    last = output.strip().splitlines()[-1] if output.strip() else ""
    counts = Counter(
        {name.rstrip("s"): int(num) for num, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}
    )
    is_green = process.returncode == 0 and outcome == "ended" and counts["passed"] > 0
    failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    seconds = {"seconds": round(time.monotonic() - began), "cpu_seconds": round(processor_s() - used)}
    found = {"passes": is_green, **seconds, **counts}
    if skips := [line for line in output.splitlines() if line.startswith("SKIPPED ")]:
        found["skips"] = skips
    return found if is_green else found | {"failures": failures or [outcome, last]}


def processor_s() -> float:
    """Seconds of processors that ended children took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_default(times: int, commit: str) -> None:
    """Runs the default suite so often, one after the other, and keeps what each took."""
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "pytest-xdist")}
    facts = {"commit": commit, "cores": len(os.sched_getaffinity(0)), "versions": versions}
    runs = []
    for _ in range(times):
        runs.append(run())
        print(runs[-1], flush=True)
        DEFAULT.write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n")
    if not all(one["passes"] for one in runs):
        raise SystemExit("Not green.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="run these, also where they have passed")
    parser.add_argument("--list", action="store_true", help="show the parts and run nothing")
    parser.add_argument("--default", type=int, metavar="TIMES", help="run the default suite so often instead")
    given = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()[:12]
    if given.default:
        return run_default(given.default, commit)
    results = json.loads(NIGHTLY.read_text()) if NIGHTLY.exists() else {}
    parts = find_parts()
    if unknown := set(given.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}. Parts: {', '.join(parts)}")
    for name in given.parts or parts:
        last = results.get(name, {})
        if given.list or (not given.parts and last.get("passes") and last.get("commit") == commit):
            print(f"{name}: {last or 'never run'}")
            continue
        print(f"{name}: {len(parts[name])} files", flush=True)
        results[name] = {"commit": commit, **run("-m", "nightly", *parts[name])}
        print(f"  {results[name]}", flush=True)
        kept = {part: results[part] for part in sorted(results) if part in parts}
        NIGHTLY.write_text(json.dumps(kept, indent=1) + "\n")
    failed = [name for name in parts if not results.get(name, {}).get("passes")]
    if failed and not given.list:
        raise SystemExit(f"Not green: {', '.join(failed)}")


if __name__ == "__main__":
    main()

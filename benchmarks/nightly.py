"""Runs the suites of minutes (`pytest -m nightly`) in parts of at most 25 minutes, and goes on where it was ended.

    python benchmarks/nightly.py                 what has not passed on this commit yet
    python benchmarks/nightly.py tests/faults    these parts, again
    python benchmarks/nightly.py --list          the parts, with their last results

A part is a folder of `tests/`, a file where a folder would take longer, or the files of `tests/` itself. The last
result of each stands in `benchmarks/results/nightly.json`: commit, counts, seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nightly.json"
LIMIT_S = 25 * 60
BY_FILE = ("distributed", "faults", "launch", "training", "checkpoints")  # folders of which each file is a part


def part_of(file: str) -> str:
    """The part that a test file belongs to: `tests`, `tests/FOLDER` or the file itself."""
    folder = Path(file).parts[1:-1]
    return file if folder and folder[0] in BY_FILE else "/".join(["tests", *folder[:1]])


def find_parts() -> dict[str, list[str]]:
    """Part -> its files that have nightly tests, as pytest collects them."""
    found = subprocess.run([*pytest("-n", "0", "--collect-only")], cwd=ROOT, capture_output=True, text=True)
    files = sorted({line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line})
    if not files:
        raise SystemExit(f"Nothing was collected:\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    parts: dict[str, list[str]] = {}
    for file in files:
        parts.setdefault(part_of(file), []).append(file)
    return parts


def pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "nightly", *words]


def run(files: list[str]) -> dict[str, object]:
    """Counts, seconds, and the end of what failed, of one part; what it started is ended with it."""
    began = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(pytest("-rfE", *files), cwd=ROOT, **pipes) as process:
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
    is_green = process.returncode == 0 and outcome == "ended"
    failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {"passes": is_green, "seconds": round(time.monotonic() - began), **counts} | (
        {} if is_green else {"failures": failures or [outcome, last]}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="run these, also where they have passed")
    parser.add_argument("--list", action="store_true", help="show the parts and run nothing")
    given = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()[:12]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parts = find_parts()
    if unknown := set(given.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}. Parts: {', '.join(parts)}")
    for name in given.parts or parts:
        last = results.get(name, {})
        if given.list or (not given.parts and last.get("passes") and last.get("commit") == commit):
            print(f"{name}: {last or 'never run'}")
            continue
        print(f"{name}: {len(parts[name])} files", flush=True)
        results[name] = {"commit": commit, **run(parts[name])}
        print(f"  {results[name]}", flush=True)
        kept = {part: results[part] for part in sorted(results) if part in parts}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    failed = [name for name in parts if not results.get(name, {}).get("passes")]
    if failed and not given.list:
        raise SystemExit(f"Not green: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Seconds of the processor until a run on frozen encoders has made its first step, beside those of imports alone.

The demo of `recipes/max_speed.py` with `--head mlp`, since the search for a head is training too; fresh processes that
take turns, children included. bitsandbytes is hidden: it is optional, and PEFT imports it where it is installed.

python benchmarks/start_time.py --against ../before --output benchmarks/results/start_time_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HIDE = "import sys\nsys.modules['bitsandbytes'] = None\n"
FIRST_STEP = """
import os, sys, tempfile
sys.path.insert(0, "recipes")
import max_speed
step = max_speed.FastTrainer.training_step
def step_and_leave(self, *given, **named):
    step(self, *given, **named)
    print("first step", flush=True)
    os._exit(0)
max_speed.FastTrainer.training_step = step_and_leave
if __name__ == "__main__":
    max_speed.main(["--output_dir", tempfile.mkdtemp(), "--head", "mlp"])
"""
PROGRAMS = {
    "import torch": "import torch",
    "import transformers.Trainer": "from transformers import Trainer, TrainingArguments",
    "import hf_ext.trainer": "import hf_ext.trainer",
    "first step": FIRST_STEP,
    "first step, accelerate launch": FIRST_STEP,
}


def spend(name: str, root: Path, folder: Path) -> float:
    """Runs a program on the sources of a checkout; seconds of the processor.

    Raises:
        RuntimeError: it failed, or made no step where it should.
    """
    script = folder / "program.py"
    script.write_text(HIDE + PROGRAMS[name])
    launcher = ["-m", "accelerate.commands.launch", "--quiet", "--cpu"] if "launch" in name else []
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, *launcher, str(script)], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode or ("step" in name and "first step" not in run.stdout):
        raise RuntimeError(f"{name}: exit status {run.returncode}\n{run.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(roots: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Per program and checkout the seconds of each round, one before them not counted, in which caches fill."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds + 1):
            for name in PROGRAMS:
                for side, root in roots.items():
                    spent = spend(name, root, Path(folder))
                    seconds.setdefault((name, side), []).append(spent)
                    print(f"{name}, {side}: {spent:.2f} s", flush=True)
    rows = []
    for (name, side), found in seconds.items():
        quartiles = statistics.quantiles(found[1:], n=4, method="inclusive")
        rows.append({"what": name, "side": side, "cpu_seconds": [round(x, 2) for x in quartiles], "rounds": rounds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=5, help="at least 3")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error(f"--rounds {args.rounds}: at least 3, so that there is a spread.")
    roots = {"now": ROOT, **({"before": args.against.resolve()} if args.against else {})}
    rows = measure(roots, args.rounds)
    args.output.write_text(json.dumps({"python": sys.version.split()[0], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How far 20 steps on several processes end from those of one, at equal effective batch: DDP, FSDP2, HSDP, ZeRO.

    pip install -e ".[dev,deepspeed]" && python benchmarks/same_numbers.py

Runs the tests that hold these differences against 1e-4 (float32, gloo on the CPU), and writes what they saw to
benchmarks/results/same_numbers.json: the largest difference of a logged loss and of a final weight per case. About ten
minutes on two cores.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILES = [f"tests/distributed/test_{kind}_equals_one_process.py" for kind in ("ddp", "fsdp2", "zero")]
CHOICE = "the_losses_and_weights_of_one or losses_and_weights_are_those_of_one_process"


def read_report(path: Path) -> list[dict[str, Any]]:
    """The differences that tests recorded in pytest's XML report."""
    found = [ast.literal_eval(entry.get("value", "")) for entry in ElementTree.parse(path).iter("property")]
    return [dict(zip(("processes", "case", "loss", "weights"), values)) for values in found]


def main() -> None:
    """Runs the tests and writes the JSON; ends with their status if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "nightly", "-k", CHOICE, f"--junitxml={report}", *FILES]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            sys.exit(status)
        rows = read_report(report)
    path = ROOT / "benchmarks" / "results" / "same_numbers.json"
    path.write_text(json.dumps({"steps": 20, "bound": 1e-4, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

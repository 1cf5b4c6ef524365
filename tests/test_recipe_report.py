"""recipes/report.py as users run it: the report and the card of a finished run, written anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "report.py"
VERDICT = "No better than a constant: RMSE 2.1025 against 2.1001."


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(RECIPE), *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ}, capture_output=True, text=True, timeout=300)


def write_record(folder: Path) -> None:
    folder.mkdir(parents=True)
    record = {"format": 1, "task": "affinity", "verdict": {"text": VERDICT, "is_better": False}}
    (folder / "all_results.json").write_text(json.dumps(record))


def test_report_and_card_of_two_runs_begin_with_their_verdicts(tmp_path) -> None:
    write_record(tmp_path / "outputs" / "one")
    write_record(tmp_path / "outputs" / "two")
    done = run(tmp_path, "--run", "outputs/one", "outputs/two")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        f"Wrote outputs/{folder}/{name}"
        for folder in ("one", "two")
        for name in ("report.html", "report.md", "README.md")
    ]
    for name in ("report.html", "report.md", "README.md"):
        assert VERDICT in (tmp_path / "outputs" / "two" / name).read_text()


@pytest.mark.nightly
def test_a_folder_without_a_finished_run_is_named(tmp_path) -> None:
    done = run(tmp_path, "--run", "outputs/nothing")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]  # bitsandbytes, where it is installed, may complain of a kernel before
    assert said.startswith("DataError: outputs/nothing: holds no all_results.json")
    assert "Traceback" not in done.stderr

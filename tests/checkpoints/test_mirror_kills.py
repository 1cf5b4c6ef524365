"""kill -9 at operations on the target: what is there is whole, and the next process goes on from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from locations import HELPERS


def run_kills(folder: Path, every: int, kind: str) -> subprocess.CompletedProcess:
    script = HELPERS / "mirror_run.py"
    command = [sys.executable, str(script), str(folder), str(every), kind]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.nightly
@pytest.mark.parametrize("every", [pytest.param(1, id="all")])
def test_a_run_killed_at_any_operation_on_the_target_is_continued_from_what_is_there(tmp_path, every, capsys):
    done = run_kills(tmp_path, every, "staged")
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert all(count >= 120 // every for count in counts.values()), counts
    with capsys.disabled():
        print(f"\nmirror: {sum(counts.values())} kills -9 at operations on the target, all continued, none damaged")


@pytest.mark.nightly
def test_the_kills_find_a_mirror_that_writes_in_place(tmp_path):
    done = run_kills(tmp_path, 1, "in_place")
    assert done.returncode == 1
    assert "is no checkpoint" in done.stderr or "does not verify" in done.stderr

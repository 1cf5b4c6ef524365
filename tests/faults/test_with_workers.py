"""The suites of faults once more, with data workers that live on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = ("damage", "disk_full", "loss_scale", "no_pickle", "not_finite", "stale_folders")


@pytest.mark.nightly
@pytest.mark.parametrize("suite", SUITES)
def test_every_fault_ends_as_it_does_without_workers(suite):
    command = [sys.executable, "-m", "pytest", "-n", "0", f"test_{suite}.py"]
    environment = {**os.environ, "HF_EXT_WORKERS": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout

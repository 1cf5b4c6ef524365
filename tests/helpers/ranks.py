"""Runs a script in two processes, or more, that torchrun starts."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from locations import HELPERS, TESTS

import hf_ext


def run_on_ranks(
    script: Path, folder: Path, *arguments: str, limit_s: float = 240, num_ranks: int = 2, is_killed: bool = False
) -> None:
    """`python script FOLDER ARGUMENTS` on two ranks or more; fails with the end of what they printed.

    `is_killed`: the script kills itself, and fails where it does not.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    command = [sys.executable, *launcher, str(script), str(folder), *arguments]
    paths = [Path(hf_ext.__file__).parents[1], HELPERS, TESTS]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    ) as process:
        try:
            _, errors = process.communicate(timeout=limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks too
    assert (process.returncode == 0) != is_killed, errors[-3000:]
    assert not is_killed or "SIGKILL" in errors, errors[-3000:]


def leave(trainer: Any) -> None:
    """Ends a rank that has written its report."""
    trainer.end()

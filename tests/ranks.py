"""Runs a script in two processes that torchrun starts."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_ext


def run_on_ranks(script: Path, folder: Path, limit_s: float = 240) -> None:
    """`python script FOLDER` on two ranks; fails with the end of what they printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(script), str(folder)]
    paths = [Path(hf_ext.__file__).parents[1], Path(__file__).parent]
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
    assert process.returncode == 0, errors[-3000:]


def leave(trainer: Any) -> None:
    """Ends a rank that has written its report."""
    trainer.end()

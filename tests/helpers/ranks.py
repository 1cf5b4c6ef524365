"""Processes that train: a script in two or more that torchrun starts, or functions in forked ones."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver, get_context, set_start_method
from pathlib import Path
from typing import Any

import pytest
import torch
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


def fork_ranks(target: Callable[..., None], num_ranks: int, *arguments: Any) -> list[Any]:
    """Starts `target(*arguments, rank, port)` in processes forked from one that has its module and all imports."""
    context = get_context("forkserver")
    context.set_forkserver_preload([target.__module__])
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11's fork server looks for it on no other path
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), str(Path(hf_ext.__file__).parents[1])]))
        forkserver.ensure_running()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=target, args=(*arguments, rank, port)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    return processes


def become_rank(rank: int, port: int, num_ranks: int, output: Path | None) -> None:
    """Makes a forked process one that trains, alone or as one of several; what it prints goes to `output`, if any."""
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # of data workers, as in a process that nobody forked
    if num_ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
        os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank))
    for descriptor in (1, 2) if output else ():
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)

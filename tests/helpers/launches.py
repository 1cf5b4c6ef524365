"""Launches files of accelerate_configs with what this machine lacks left out, and reads what each process wrote."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launcher_files import FOLDER
from locations import CPU_AS_GPUS, HELPERS

RECIPES = FOLDER.parent / "recipes"


@dataclass(frozen=True)
class Launch:
    """How a file is launched here: what accelerate makes of it, how many processes, and what differs from the file."""

    name: str
    kind: str
    processes: int
    flags: tuple[str, ...] = ()
    case: str = "masked_lm"
    machines: int = 1

    def commands(self, script: list[str]) -> list[list[str]]:
        """One command per machine; "torchrun" has no file, and its flags are the recipe's."""
        if self.name == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(self.processes)]
            return [[sys.executable, *torchrun, *script, *self.flags]]
        launcher = [sys.executable, "-m", "accelerate.commands.launch"]
        base = [*launcher, "--config_file", str(FOLDER / f"{self.name}.yaml"), *self.flags]
        if self.machines == 1:
            return [[*base, *script]]
        meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
        return [[*base, *meeting, "--machine_rank", str(rank), *script] for rank in range(self.machines)]


ONE_CPU = Launch("cpu", "NO", 1)
TWO_CPUS = Launch("cpu", "MULTI_CPU", 2, ("--multi_gpu", "--num_processes", "2"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_recipe(launch: Launch, folder: Path, recipe: str, *arguments: str, limit_s: float = 600) -> list[dict]:
    """Runs `recipe` into folder/output, and returns the facts of each process, in order of rank."""
    facts = folder / "facts"
    facts.mkdir(parents=True)
    output = ["--output_dir", str(folder / "output"), "--disable_tqdm", "true"]
    script = [str(HELPERS / "launched_recipe.py"), str(facts), str(RECIPES / recipe), *output, *arguments]
    shim = [CPU_AS_GPUS] if launch.kind == "FSDP" else []  # without it accelerate has no FSDP on a CPU
    environment = {**clean_environment(*shim), "WORLD": str(launch.processes)}
    run_together(launch.commands(script), environment, folder, limit_s)
    return [json.loads(path.read_text()) for path in sorted(facts.glob("facts-*.json"))]


def clean_environment(*paths: Path) -> dict[str, str]:
    """This process's environment without what an earlier launch may have left, with `paths` before other modules."""
    left = ("ACCELERATE_", "CUDA_", "FSDP_", "PARALLELISM_", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, [FOLDER.parent, *paths]))}


def run_together(commands: list[list[str]], environment: dict[str, str], folder: Path, limit_s: float) -> None:
    """Runs all commands at once; fails with the end of what they printed, and leaves no process behind."""
    logs = [folder / f"machine-{rank}.log" for rank in range(len(commands))]
    started = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as output:
            new = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        started.append(new)
    ends = time.monotonic() + limit_s
    try:
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, ends - time.monotonic()))
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            process.wait()
    printed = "\n".join(log.read_text()[-6000:] for log in logs)
    assert [process.returncode for process in started] == [0] * len(started), printed

"""Submits launch/slurm.sbatch to the programs of `fake_slurm`, which run it here."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from locations import HELPERS, ROOT

FAKES = HELPERS / "fake_slurm"


@dataclass(frozen=True)
class Job:
    """What became of a job: the status of each of its starts, the options that SLURM read, what was printed, and the
    files of its number that it left in the project's folder."""

    statuses: list[int]
    options: dict[str, str]
    output: str
    left: list[Path]


def submit(folder: Path, *given: str, limit_s: float = 120, path: Path | None = None, **environment: str) -> Job:
    """`sbatch GIVEN`, run to its end.

    Args:
        path: a folder whose programs come before all others.
        environment: values for the top of the script, and of `fake_slurm/sbatch`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    programs = [*([str(path)] if path else []), str(FAKES), str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {"FAKE_SLURM": str(folder), "ENVIRONMENT": "", "PATH": os.pathsep.join(programs), **environment}
    paths = os.pathsep.join([str(ROOT), str(HELPERS)])
    with subprocess.Popen(
        ["sbatch", *given],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as done:
        try:
            output = done.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            done.kill()
            raise
    statuses = [int(line) for line in (folder / "statuses").read_text().split()]
    options = dict(line.split("=", 1) for line in (folder / "options").read_text().splitlines())
    assert done.returncode == statuses[-1], output
    return Job(statuses, options, output, [*ROOT.glob(f"*-{done.pid}.*")])  # its number is that of its process

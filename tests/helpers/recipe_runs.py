"""Recipes as users run them: in a process of their own, in an empty folder, offline, through accelerate or alone."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from closeness import largest
from locations import ROOT
from safetensors.torch import load_file

RECIPES = ROOT / "recipes"
ALONE = ()
LAUNCHED = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "no")


@dataclass(frozen=True)
class Finished:
    """A recipe that has ended: its exit status, what it printed, and where it wrote."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    def read(self, name: str = "all_results.json") -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())

    @property
    def results(self) -> dict[str, Any]:
        return self.read()

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    @property
    def losses(self) -> list[float]:
        """Of training and of evaluations, in the order of the log."""
        log = self.read("trainer_state.json")["log_history"]
        return [entry.get("loss", entry.get("eval_loss")) for entry in log if entry.keys() & {"loss", "eval_loss"}]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")

    def difference(self, other: "Finished") -> float:
        """The largest between the weights of two."""
        ours, theirs = self.weights, other.weights
        assert ours.keys() == theirs.keys()
        return largest((ours[name].float() - theirs[name].float()).abs().max() for name in ours)

    def decision(self, name: str) -> dict[str, Any]:
        """A line of its plan."""
        return next(entry for entry in self.read("plan.json")["decisions"] if entry["name"] == name)


def command(recipe: str, *words: str, launcher: tuple[str, ...] = LAUNCHED) -> list[str]:
    """Of a script of recipes/, or of a command of hf-ext that has none."""
    script = RECIPES / f"{recipe}.py"
    program = [str(script)] if script.is_file() else ["-m", "hf_ext", recipe]
    return [sys.executable, *launcher, *program, *words]


def environment(cwd: Path) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hf_home"), "PYTHONPATH": str(ROOT)}


def run(
    recipe: str,
    cwd: Path,
    *words: str,
    launcher: tuple[str, ...] = LAUNCHED,
    status: int | None = 0,
    output: str | None = None,
) -> Finished:
    """Runs a recipe or command in `cwd`; `output`: the folder it writes to; `status`: how it has to end, or None."""
    words = (*words, *(("--output_dir", output) if output else ()))
    done = subprocess.run(
        command(recipe, *words, launcher=launcher),
        cwd=cwd,
        env=environment(cwd),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert status is None or done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    folders = sorted((cwd / "outputs").glob("*")) if output is None else [cwd / output]
    return Finished(done.returncode, done.stdout, done.stderr, folders[0] if folders else cwd)


def kill_at(there: str, recipe: str, cwd: Path, *words: str, output: str, limit_s: float = 200) -> None:
    """Runs a recipe and kills it, with all its processes, once its output folder holds a path that fits `there`."""
    with subprocess.Popen(
        command(recipe, *words, "--output_dir", output),
        cwd=cwd,
        env=environment(cwd),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        ends = time.monotonic() + limit_s
        while not list((cwd / output).glob(there)) and process.poll() is None and time.monotonic() < ends:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (cwd / output / "all_results.json").exists()

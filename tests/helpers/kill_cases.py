"""Cases of runs that are killed and restarted, and what is looked at when they end."""

import json
import random
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from families import SAVE_STEPS, write_encoders
from inside import MANIFEST, Manifest
from killing import Attempt, Job, Kill, attempt


@dataclass
class Bench:
    """Uninterrupted runs, trained once, and folders of an earlier run with another seed."""

    folder: Path
    known: dict[str, tuple[Job, Attempt]] = field(default_factory=dict)
    num_jobs: int = 0

    @property
    def encoders(self) -> Path:
        if not (self.folder / "encoders").is_dir():
            write_encoders(self.folder / "encoders")
        return self.folder / "encoders"

    def job(self, family: str, **given) -> Job:
        self.num_jobs += 1
        return Job(family, self.encoders, self.folder / str(self.num_jobs), **given)

    def copy(self, job: Job, **given) -> Job:
        """The same command in a copy of its folder."""
        self.num_jobs += 1
        new = replace(job, folder=self.folder / str(self.num_jobs), **given)
        shutil.copytree(job.folder, new.folder)
        return new

    def whole(self, family: str) -> tuple[Job, Attempt]:
        """The uninterrupted run."""
        return self._once(f"whole {family}", family, None, "ended")

    def earlier(self, family: str) -> Job:
        """What another run, with another seed, left behind: checkpoints of the steps 4 and 8."""
        return self._once(f"earlier {family}", family, Kill(at_step=2 * SAVE_STEPS + 2), "killed", seed=4)[0]

    def begun(self, family: str) -> Job:
        """The run itself, killed in step 11: checkpoints of the steps 4 and 8."""
        return self._once(f"begun {family}", family, Kill(at_step=3 * SAVE_STEPS - 1), "killed")[0]

    def _once(self, name: str, family: str, kill: Kill | None, end: str, **given) -> tuple[Job, Attempt]:
        if name not in self.known:
            job = self.job(family, **given)
            self.known[name] = job, attempt(job, kill)
        assert self.known[name][1].end == end, self.known[name]
        return self.known[name]


def run_with_kills(bench: Bench, job: Job, kills: list[Kill]) -> tuple[int, list[str]]:
    """Executes a command until it ends, killed as often as `kills` says; how often it was, and what is wrong then.

    A job that does not say "auto" saves steps again that are in its folder; once it has begun to train, it says "auto".
    """
    problems: list[str] = []
    num_kills = furthest = 0
    while True:
        committed = max(steps_of(job), default=0) if job.resume == "auto" else 0
        result = attempt(job, kills[num_kills] if num_kills < len(kills) else None)
        if result.end not in ("killed", "ended"):
            problems.append(f"not resumed: {result.end}")
            break
        if result.began_at is not None:
            lost = furthest - result.began_at
            if result.began_at < committed or lost > SAVE_STEPS + 1:  # a checkpoint has its name after the next step
                problems.append(f"began at {result.began_at}, after step {furthest} and checkpoint-{committed}")
            job = replace(job, resume="auto")
        furthest = max(furthest, result.last_step)
        if result.end == "ended":
            problems += differences(job, bench.whole(job.family)[0])
            break
        num_kills += 1
    shutil.rmtree(job.folder)
    return num_kills, [f"{job.family}, {kills}: {problem}" for problem in problems]


def draw_kills(rng: random.Random, whole: Attempt, num: int) -> list[Kill]:
    """Kills before random file operations of a run like `whole`."""
    ranks = [rng.randrange(len(whole.num_operations)) for _ in range(num)]
    return [Kill(operation=rng.randint(1, whole.num_operations[rank]), rank=rank) for rank in ranks]


def steps_of(job: Job) -> list[int]:
    """Of the checkpoints under their final names."""
    found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in job.output_dir.glob("checkpoint-*"))
    return sorted(int(name[1]) for name in found if name)


def differences(job: Job, whole: Job) -> list[str]:
    """What in the output folder is not as in that of the uninterrupted run, or should not be there."""
    ours, theirs = tensors_of(job), tensors_of(whole)
    found = [f"other {name}" for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if logged(job) != logged(whole):
        found.append("other losses were logged")
    found += [f"{path.name} is left" for path in job.output_dir.iterdir() if path.name.startswith((".", "damaged"))]
    for step in steps_of(job):
        folder = job.output_dir / f"checkpoint-{step}"
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        found += [f"{folder.name}: {name}" for name in files ^ {*Manifest.read(folder).files, MANIFEST}]
    return found


def tensors_of(job: Job) -> dict[str, bytes]:
    """Weights of the final model and of the checkpoints, and all states of optimizer, schedule and random numbers."""
    kinds = ("*.safetensors", *(f"checkpoint-*/{name}" for name in ("*.safetensors", "*.pt", "*.pth")))
    files = [path for kind in kinds for path in job.output_dir.glob(kind)]
    return {path.relative_to(job.output_dir).as_posix(): path.read_bytes() for path in files}


def logged(job: Job) -> list[float]:
    """The losses of training and evaluation up to the newest checkpoint."""
    newest = job.output_dir / f"checkpoint-{max(steps_of(job), default=0)}"
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry]

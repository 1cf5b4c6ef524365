"""A run that saves, mirrors and rotates, killed -9 at operations on the target, each time continued by another.

Run as `mirror_run.py EMPTY_FOLDER EVERY staged|in_place`; kills at every EVERY-th operation; prints the
number of kills as JSON, or fails with what was wrong.
A process is forked for each kill, from one that has imported little and has no threads.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from hf_ext.checkpoints.mirror import Mirror
from hf_ext.checkpoints.store import CheckpointStore

STEPS = (10, 20, 30)
FILES = ("adapter/config.json", "model.safetensors", "optimizer.pt")
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"}


def content(step: int, name: str) -> bytes:
    return f"{step} {name} ".encode() * 20


def copy_in_halves(source: Path, target: Path, report: Callable[[int], None]) -> None:
    """Opens the target twice, so that a kill in between leaves half a file."""
    data = source.read_bytes()
    target.write_bytes(data[: len(data) // 2])
    with target.open("ab") as file:
        file.write(data[len(data) // 2 :])


class InPlace(Mirror):
    """The broken twin: writes under the final name, file by file, as stock Trainer saves."""

    def _copy(self, step: int) -> None:
        name = f"checkpoint-{step}"
        shutil.copytree(self.local.folder / name, self.target.folder / name, dirs_exist_ok=True)


MIRRORS = {"staged": Mirror, "in_place": InPlace}


def train(folder: Path) -> None:
    """Continues from the newest checkpoint of either place to the last step, keeping two; notes what is vouched for."""
    local = CheckpointStore(folder / "local")
    mirror = MIRRORS[sys.argv[3]](local, folder / "drive", copy_in_halves)
    local.sweep()
    mirror.target.sweep()
    newest = mirror.find_newest()
    done = 0
    if newest is not None:
        local.adopt(newest.run_id)
        mirror.target.adopt(newest.run_id)
        done = newest.step
        if newest.path.parent == local.folder:
            mirror.copy(done)
        rotate(local, mirror)
        here = {stored.step for stored in local.checkpoints()}
        for stored in mirror.target.checkpoints():  # of which local rotation will not speak any more
            if stored.step not in here:
                mirror.delete(stored.step)
        vouch(folder, mirror, done)
    for step in [step for step in STEPS if step > done]:
        staging = local.stage(step)
        (staging.path / "adapter").mkdir()
        for name in FILES:
            (staging.path / name).write_bytes(content(step, name))
        staging.commit(step / 10, {})
        mirror.copy(step)
        rotate(local, mirror)
        vouch(folder, mirror, step)


def rotate(local: CheckpointStore, mirror: Mirror) -> None:
    for stored in local.checkpoints()[:-2]:
        local.delete(stored.step)
        mirror.delete(stored.step)


def vouch(folder: Path, mirror: Mirror, step: int) -> None:
    assert mirror.wait(), mirror.last_failure
    (folder / "vouched").write_text(str(step))


def kill_at(event_number: int, place: Path) -> None:
    """kill -9 of this process before its event number `event_number` on a path below `place`."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in EVENTS and arguments and str(place) in os.fsdecode(str(arguments[0])):
            count += 1
            if count == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(action: Callable[[], None]) -> bool:
    """Runs `action` in a forked process; False where that was killed. An exception in it is one here."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code) if code == 0 else sys.excepthook(*sys.exc_info())
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the run failed"
    return True


def check_drive(folder: Path) -> None:
    """A machine that has only the target: all there is whole, and the newest not older than what was vouched for."""
    store = CheckpointStore(folder / "drive")
    vouched = int((folder / "vouched").read_text()) if (folder / "vouched").exists() else 0
    newest = 0
    for name in sorted(os.listdir(folder / "drive")):
        assert name.startswith(("checkpoint-", ".staging", ".trash-")), name  # nothing had to be set aside
        if name.startswith("checkpoint-"):
            stored = store.open(folder / "drive" / name)
            assert stored is not None, f"{name} is no checkpoint"
            assert all((stored.path / file).read_bytes() == content(stored.step, file) for file in FILES)
            newest = max(newest, stored.step)
    assert newest >= vouched


def main(folder: Path, local_is_lost: bool, every: int) -> int:
    """Kills at every `every`-th event until the run gets through, continues after each; returns how many kills."""
    for kills, number in enumerate(range(1, 10_000, every)):
        place = folder / str(number)
        (place / "drive").mkdir(parents=True)

        def killed(number: int = number, place: Path = place) -> None:
            kill_at(number, place / "drive")
            train(place)

        if run(killed):
            return kills
        check_drive(place)
        if local_is_lost:
            shutil.rmtree(place / "local", ignore_errors=True)
        assert run(lambda place=place: train(place))
        check_drive(place)
        left = sorted(os.listdir(place / "drive"))
        # A lost local disk no longer knows of checkpoint-20, so that may be gone as soon as 30 is there.
        assert left == ["checkpoint-20", "checkpoint-30"] or (local_is_lost and left == ["checkpoint-30"]), left
        shutil.rmtree(place)
    raise AssertionError("the run never got through")


if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # a kill loses nothing that was written; with it, 10 times slower
    counts = {}
    for name in ("local_kept", "local_lost"):
        (Path(sys.argv[1]) / name).mkdir()
        counts[name] = main(Path(sys.argv[1]) / name, name == "local_lost", every=int(sys.argv[2]))
    print(json.dumps(counts))

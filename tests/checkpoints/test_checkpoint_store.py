"""The store: whole or absent, verified before use, in order of steps, and deleting nothing that is not its run's."""

import os

import pytest

from hf_ext.checkpoints.manifest import MANIFEST
from hf_ext.checkpoints.store import CheckpointStore


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "out put é", "run")


def save(store, step, epoch=0.5, weights=b"weights", facts=None):
    staging = store.stage(step)
    (staging / "model.safetensors").write_bytes(weights)
    (staging / "optimizer.json").write_text("[1]")
    (staging / "progress.json").write_text(f'{{"step": {step}}}')
    return store.commit(step, epoch, facts or {})


def make_stock(store, step):
    """What stock Trainer leaves."""
    folder = store.path(step)
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (folder / name).write_bytes(b"stock")
    return folder


def names(store) -> list[str]:
    return sorted(os.listdir(store.folder))


def steps(store) -> list[int]:
    return [stored.step for stored in store.checkpoints()]


# --- writing ------------------------------------------------------------------------------------------------------


def test_everything_is_on_the_disk_before_the_one_rename_and_the_folder_after_it(store, monkeypatch):
    events = []
    for name in ("fsync", "rename", "replace"):
        real = getattr(os, name)

        def record(*args, name=name, real=real):
            path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[0])
            events.append((name, os.path.relpath(path, store.folder)))
            return real(*args)

        monkeypatch.setattr(os, name, record)
    staging = store.stage(20)
    (staging / "sub").mkdir()
    (staging / "sub" / "a").write_text("a")
    (staging / "b").write_text("b")
    store.commit(20, 0.5, {})
    staged = ".staging/checkpoint-20"
    at = events.index(("rename", staged))
    assert {path for name, path in events[:at] if name == "fsync"} == {
        f"{staged}/sub/a",
        f"{staged}/b",
        f"{staged}/sub",
        f"{staged}/manifest.json.tmp",
        staged,
    }
    assert events[at - 1] == ("fsync", staged)
    assert events[at + 1 :] == [("fsync", ".")]
    assert [event for event in events if event[0] != "fsync"] == [
        ("replace", f"{staged}/manifest.json.tmp"),
        ("rename", staged),
    ]


# --- deleting -----------------------------------------------------------------------------------------------------


def test_only_this_runs_checkpoints_are_deleted(store):
    save(store, 10)
    save(CheckpointStore(store.folder, "other"), 20)
    make_stock(store, 30)
    save(store, 40)
    (store.path(40) / MANIFEST).unlink()
    store.path(50).symlink_to(store.path(10))
    assert [store.delete(step) for step in (10, 20, 30, 40, 50, 60)] == [True] + [False] * 5
    assert names(store) == [f"checkpoint-{step}" for step in (20, 30, 40, 50)]

"""Checkpoints on disk: whole or absent, verified before use, kept within limit and budget, of this run alone."""

import hashlib
import json
import os
import random
import re
from dataclasses import replace

import pytest
from inside import MANIFEST, Manifest

from hf_ext.checkpoints import (
    CheckpointStore,
    Entry,
    Sizes,
    check_budget,
    hash_file,
    needed_bytes,
    steps_beyond_limit,
    steps_for_room,
)
from hf_ext.checkpoints.manifest import FileRecord
from hf_ext.checkpoints.retention import Policy
from hf_ext.errors import ArgumentError, CheckpointError

pytestmark = pytest.mark.internals


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


def test_only_this_runs_checkpoints_are_deleted(store):
    save(store, 10)
    save(CheckpointStore(store.folder, "other"), 20)
    make_stock(store, 30)
    save(store, 40)
    (store.path(40) / MANIFEST).unlink()
    store.path(50).symlink_to(store.path(10))
    assert [store.delete(step) for step in (10, 20, 30, 40, 50, 60)] == [True] + [False] * 5
    assert names(store) == [f"checkpoint-{step}" for step in (20, 30, 40, 50)]


FILES = {"model.safetensors": b"weights" * 100, "config.json": b"{}\n", "sub/é 1.json": b"[1, 2]"}


def write_checkpoint(folder, step=20) -> Manifest:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    facts = {"learning_rate": 1e-5, "nan": [None, True, -0.0], "bins": {2: "a", 10: "b"}}
    manifest = Manifest("run", step, 1.25, facts, {name: hash_file(folder / name) for name in FILES})
    manifest.write(folder)
    return manifest


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(tmp_path):
    write_checkpoint(tmp_path)
    path = tmp_path / MANIFEST
    sound = path.read_bytes()
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            Manifest.read(tmp_path)
    path.write_bytes(sound)
    Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: path.unlink(), "found nothing"),
        (lambda path: path.write_bytes(b""), "expected JSON"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "found others"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "expected JSON"),
        (lambda path: path.write_bytes(bytes(512)), "expected JSON"),
        (lambda path: path.write_text("[" * 100_000), "expected JSON"),
        (lambda path: path.write_text("[]"), "expected a JSON object, found a list"),
        (lambda path: path.write_text('{"version": 3}'), "fields of a manifest"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 20', b'"step": 21')), "found others"),
        (lambda path: (path.rename(path.parent / "m"), path.symlink_to(path.parent / "m")), "found a link"),
        (lambda path: (path.unlink(), path.mkdir()), "found a link, folder"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "found a link, folder"),  # which would be waited for
    ],
)
def test_a_damaged_manifest_is_refused_with_what_is_wrong(tmp_path, damage, found):
    write_checkpoint(tmp_path)
    damage(tmp_path / MANIFEST)
    with pytest.raises(CheckpointError, match=found):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model", "/etc/passwd", "a/../../b", "", ".", "a//b", "./a", "a\\..\\b", "a\0", "a/"]
)
def test_names_that_may_leave_the_folder_are_refused_in_writing_and_in_reading(tmp_path, name):
    record = FileRecord(1, "0" * 64)
    with pytest.raises(CheckpointError, match="plain path"):
        Manifest("run", 1, 0.0, {}, {name: record})
    forge(tmp_path, files={name: {"size": 1, "sha256": "0" * 64}})
    with pytest.raises(CheckpointError, match="plain path"):
        Manifest.read(tmp_path)


def forge(folder, **changes) -> None:
    """Writes a manifest whose own hash is right, as a person would who means harm."""
    body = {"run_id": "run", "step": 1, "epoch": 0.5, "facts": {}, "files": {}, **changes}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n")


SIZES = Sizes(weights=4_000_000, optimizer=8_000_000, other=1_000_000)
FULL = 13_000_000


def entries(*steps: int, **given) -> list[Entry]:
    return [Entry(step, 10, **given) for step in steps]


@pytest.mark.parametrize(
    ("excess", "best", "is_new_best", "outcome"),
    [
        (0, 2, False, []),
        (1, 2, False, [1]),
        (20, 2, False, [1, 3]),
        (21, 2, False, None),
        (21, 2, True, [1, 3, 2]),  # the best until now goes last, and only for a better one
        (31, 2, True, None),
        (30, None, False, [1, 2, 3]),
    ],
)
def test_room_is_made_of_the_least_value_first_and_never_of_the_newest(excess, best, is_new_best, outcome):
    assert steps_for_room(entries(1, 2, 3, 4), excess, best, Policy(None, True), is_new_best) == outcome


def test_room_is_made_of_every_nth_epoch_after_all_others_but_before_the_best_and_beyond_no_limit():
    there = [replace(entry, is_kept=entry.step in (2, 4, 6)) for entry in entries(1, 2, 3, 4, 5, 6, 7)]
    policy = Policy(2, True)
    assert steps_for_room(there, 30, 1, policy, False) == [3, 5, 2]
    assert steps_for_room(there, 50, 1, policy, False) == [3, 5, 2, 4, 6]
    assert steps_for_room(there, 51, 1, policy, False) is None  # the best and the newest stay
    assert steps_beyond_limit(there, 1, policy) == [3, 5]
    assert steps_beyond_limit(there, 7, policy) == [1, 3, 5]


def test_random_runs_never_break_the_budget_nor_lose_the_last_checkpoint_or_the_best():
    for seed in range(300):
        draw = random.Random(seed)
        policy = Policy(draw.choice([None, 1, 2, 3]), draw.random() < 0.5)
        every = draw.choice([5, 1000])
        budget = needed_bytes(SIZES, policy, 500) + draw.choice([0, 0, FULL, 3 * FULL])
        disk: dict[int, Entry] = {}
        best = None
        for step in range(1, 25):
            is_best = draw.random() < 0.3 or best is None
            excess = 500 + FULL + sum(entry.num_bytes for entry in disk.values()) - budget
            for gone in steps_for_room([*disk.values()], excess, best, policy, is_best):
                del disk[gone]
                assert any(entry.is_resumable for entry in disk.values())  # also if it is killed here
            disk[step] = Entry(step, draw.randint(FULL - 9, FULL), is_kept=step % every == 0)
            assert 500 + sum(entry.num_bytes for entry in disk.values()) <= budget, (seed, step)
            best = step if is_best else best
            for gone in steps_beyond_limit([*disk.values()], best, policy):
                del disk[gone]
            assert disk[step].is_resumable
            assert best in disk or not policy.keep_best
            num_others = sum(not entry.is_kept for entry in disk.values())
            assert policy.limit is None or num_others <= max(policy.limit, 1 + (policy.keep_best and best != step))


def test_a_budget_one_byte_too_small_is_refused_with_the_arithmetic_and_the_one_that_works():
    policy = Policy(3, True)
    needed = 700_000 + 3 * FULL
    assert needed_bytes(SIZES, policy, 700_000) == needed
    fits = replace(policy, budget_bytes=needed)
    check_budget(SIZES, fits, 700_000)
    with pytest.raises(ArgumentError) as refusal:
        check_budget(SIZES, replace(policy, budget_bytes=needed - 1), 700_000)
    text = str(refusal.value)
    parts = [float(number) for number in re.findall(r"([\d.]+) GB$", text, re.MULTILINE)]
    assert parts == [0.0007, 0.013, 0.013, 0.013, 0.0397, 0.0397]
    assert "Smallest budget that works: --save_total_size_gb 0.0397." in text

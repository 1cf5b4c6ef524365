"""The store: whole or absent, verified before use, in order of steps, and deleting nothing that is not its run's."""

import json
import logging
import os
import shutil

import pytest
from file_limit import file_limit

from hf_ext.checkpoints.manifest import MANIFEST, Manifest
from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.disk import used_bytes
from hf_ext.errors import CheckpointError


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


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_committed_checkpoint_holds_its_files_and_a_manifest_of_them(store):
    stored = save(store, 20, epoch=2.0, facts={"world_size": 1})
    assert names(store) == ["checkpoint-20"]
    assert stored.path == store.folder / "checkpoint-20"
    assert sorted(os.listdir(stored.path)) == [MANIFEST, "model.safetensors", "optimizer.json", "progress.json"]
    assert Manifest.read(stored.path) == stored.manifest
    assert sorted(stored.manifest.files) == ["model.safetensors", "optimizer.json", "progress.json"]
    assert stored.manifest.files["model.safetensors"].size == 7
    assert (stored.step, stored.run_id, stored.manifest.facts) == (20, "run", {"world_size": 1})
    assert stored.num_bytes == used_bytes(stored.path) > 0


def test_nothing_stands_under_the_name_before_the_commit(store):
    staging = store.stage(20)
    (staging / "model.safetensors").write_bytes(b"weights")
    assert not store.path(20).exists()
    assert staging == store.staging_path(20)
    assert steps(store) == []
    assert CheckpointStore(store.folder).find_newest() is None
    store.commit(20, 0.5, {})
    assert store.find_newest().step == 20


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


def test_links_are_not_committed(store):
    staging = store.stage(20)
    (staging / "model.safetensors").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="no links"):
        store.commit(20, 0.5, {})
    store.abandon(20)
    assert names(store) == []


def test_abandoning_removes_what_was_staged_and_nothing_that_was_committed(store):
    staging = store.stage(20)
    (staging / "sub").mkdir()
    (staging / "sub" / "a").write_text("a")
    store.abandon(20)
    assert names(store) == []
    store.abandon(20)
    store.stage(20)
    store.commit(20, 0.5, {})
    store.abandon(20)
    assert names(store) == ["checkpoint-20"]


def test_a_failed_commit_leaves_the_checkpoint_before_it_and_no_bytes(store):
    save(store, 10)
    before = used_bytes(store.folder)
    staging = store.stage(20)
    (staging / "model.safetensors").write_bytes(b"weights")
    with file_limit(100), pytest.raises(OSError, match="File too large"):  # the manifest is larger
        store.commit(20, 0.5, {})
    store.abandon(20)
    assert names(store) == ["checkpoint-10"]
    assert used_bytes(store.folder) == before
    assert store.find_newest().step == 10
    assert save(store, 20).step == 20


def test_a_staging_that_was_never_abandoned_does_not_stop_the_next_save(store):
    (store.stage(20) / "model.safetensors").write_bytes(b"half")
    (store.stage(30) / "model.safetensors").write_bytes(b"half")
    again = CheckpointStore(store.folder, "run")
    save(again, 20)
    assert names(store) == [".staging", "checkpoint-20"]
    again.sweep()
    assert names(store) == ["checkpoint-20"]


def test_what_others_write_after_the_commit_becomes_part_of_the_checkpoint(store):
    save(store, 20)
    sealed = (store.path(20) / MANIFEST).read_bytes()
    store.take_in(20)
    assert (store.path(20) / MANIFEST).read_bytes() == sealed
    (store.path(20) / "extra").mkdir()
    (store.path(20) / "extra" / "notes.txt").write_text("new")
    (store.path(20) / "model.safetensors").write_bytes(b"written over")
    (store.path(20) / "optimizer.pt").write_bytes(b"where a resumed run looks first")
    (store.path(20) / "link").symlink_to("/etc/hostname")
    store.take_in(20)
    stored = store.find_newest()
    assert stored.step == 20
    new = {"extra/notes.txt", "model.safetensors"}
    assert new == {*stored.manifest.files} - {"optimizer.json", "progress.json"}


# --- which one is the newest --------------------------------------------------------------------------------------


def test_order_is_by_step_whatever_the_file_times(store):
    for step, age in ((100, 3000), (9, 1), (20, -5000)):
        path = save(store, step).path
        time = path.stat().st_mtime - age
        for file in [path, *path.iterdir()]:
            os.utime(file, (time, time))
    assert steps(store) == [9, 20, 100]
    assert store.find_newest().step == 100


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    store = CheckpointStore(tmp_path / "missing")
    store.sweep()
    assert store.find_newest() is None
    assert store.checkpoints() == []
    assert not store.folder.exists()


def test_stores_have_runs_of_their_own_until_they_adopt_one(tmp_path):
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    assert first.run_id != second.run_id
    save(first, 20)
    assert steps(second) == []
    assert second.find_newest().run_id == first.run_id  # over all runs
    second.adopt(first.run_id)
    assert steps(second) == [20]
    assert save(second, 30).run_id == first.run_id


def test_a_damaged_newest_is_set_aside_with_one_warning_and_the_one_before_it_taken(store, caplog):
    for step in (10, 20, 30):
        save(store, step)
    (store.path(30) / "model.safetensors").write_bytes(b"weighty")
    (store.path(30) / "progress.json").unlink()
    assert store.find_newest().step == 20
    assert names(store) == ["checkpoint-10", "checkpoint-20", "damaged-checkpoint-30"]
    (text,) = warnings(caplog)
    assert f"{store.path(30)} does not verify and is now damaged-checkpoint-30:" in text
    assert "model.safetensors: expected sha256 9a129038" in text
    assert "progress.json: expected 12 bytes, found nothing" in text
    save(store, 30)
    (store.path(30) / MANIFEST).write_text("{}")
    assert store.find_newest().step == 20
    assert names(store)[2:] == ["damaged-checkpoint-30", "damaged-checkpoint-30-2"]


@pytest.mark.parametrize("kept", ["progress.json", "trainable.safetensors"])
def test_a_checkpoint_without_its_manifest_is_damaged_rather_than_foreign(store, kept):
    save(store, 10)
    store.path(20).mkdir()
    (store.path(20) / kept).write_text("{}")
    assert store.find_newest().step == 10
    assert names(store) == ["checkpoint-10", "damaged-checkpoint-20"]


def test_what_hf_ext_did_not_write_is_left_alone_with_one_warning(store, caplog):
    save(store, 10)
    make_stock(store, 500)
    store.path(600).mkdir()
    store.path(700).symlink_to(store.path(10))
    store.path(800).write_text("a file")
    before = names(store)
    assert store.find_newest().step == 10
    store.sweep()
    assert names(store) == before
    (text,) = warnings(caplog)
    assert all(str(store.path(step)) in text for step in (500, 600, 700, 800))
    assert "--resume_from_checkpoint" in text


@pytest.mark.parametrize(
    "name", ["checkpoint-007", "checkpoint-٣", "checkpoint-20 (copy)", "checkpoint-", "checkpoint--5"]
)
def test_names_that_only_look_like_a_checkpoint_are_none(store, name, caplog):
    save(store, 3)
    shutil.copytree(store.path(3), store.folder / name)
    assert steps(store) == [3]
    assert store.find_newest().step == 3
    assert warnings(caplog) == []


def test_a_copy_under_another_step_is_not_believed(store):
    save(store, 10)
    shutil.copytree(store.path(10), store.path(30))
    assert steps(store) == [10]
    assert store.find_newest().step == 10
    assert names(store) == ["checkpoint-10", "damaged-checkpoint-30"]


# --- named by the user --------------------------------------------------------------------------------------------


def test_a_named_checkpoint_is_verified_and_may_have_been_renamed(store):
    save(store, 20)
    assert store.open(store.path(20)).step == 20
    store.path(20).rename(store.folder / "my best")
    assert store.open(str(store.folder / "my best")).step == 20


def test_a_stock_checkpoint_is_told_from_one_that_does_not_verify(store):
    assert store.open(make_stock(store, 500)) is None
    save(store, 20)
    (store.path(20) / "model.safetensors").write_bytes(b"")
    (store.path(20) / "optimizer.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)model.safetensors: expected 7 bytes.*optimizer.json: expected 3 bytes"
    ):
        store.open(store.path(20))
    (store.path(20) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="expected a file, found nothing"):
        store.open(store.path(20))
    with pytest.raises(CheckpointError, match="found nothing"):
        store.open(store.path(99))
    assert "checkpoint-20" in names(store)  # a named folder is not renamed


# --- out of the way -----------------------------------------------------------------------------------------------


def test_what_stands_in_the_way_is_renamed_and_never_deleted(store, caplog):
    other = CheckpointStore(store.folder, "other")
    save(other, 20, weights=b"of another run")
    make_stock(store, 30)
    store.path(40).symlink_to(store.folder)
    for step in (20, 30, 40):
        save(store, step)
    assert steps(store) == [20, 30, 40]
    previous = store.folder / "previous-checkpoint-20"
    assert (previous / "model.safetensors").read_bytes() == b"of another run"
    assert (store.folder / "previous-checkpoint-30" / "optimizer.pt").exists()
    assert (store.folder / "previous-checkpoint-40").is_symlink()
    assert len(warnings(caplog)) == 3
    save(other, 20)
    assert "previous-checkpoint-20-2" in names(store)


def test_a_run_that_goes_back_moves_every_newer_checkpoint_out_of_the_way(store, caplog):
    for step in (10, 20, 30):
        save(store, step)
    save(CheckpointStore(store.folder, "other"), 40)
    make_stock(store, 50)
    store.set_aside_after(10)
    assert [name for name in names(store) if "previous" in name] == [f"previous-checkpoint-{n}" for n in (20, 30, 40)]
    assert store.find_newest().step == 10
    assert store.path(50).exists()
    store.set_aside_after(10)
    assert len([text for text in warnings(caplog) if "goes on from step 10" in text]) == 1


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


def test_a_pinned_checkpoint_is_neither_deleted_nor_stripped(store):
    save(store, 10)
    with store.pinned(10), store.pinned(10):
        assert store.is_pinned(10)
        assert not store.delete(10)
        assert not store.strip(10, ["optimizer.json"])
    assert not store.is_pinned(10)
    assert store.find_newest().step == 10
    assert store.delete(10)
    with pytest.raises(KeyError), store.pinned(20):
        raise KeyError
    assert not store.is_pinned(20)


def test_an_interrupted_deletion_is_finished(store, caplog):
    save(store, 10)
    trash = store.folder / ".trash-checkpoint-10"
    store.path(10).rename(trash)
    (trash / "model.safetensors").unlink()
    (store.folder / ".trash-checkpoint-20").mkdir()
    (store.folder / ".trash-checkpoint-30").mkdir()
    (store.folder / ".trash-checkpoint-30" / "thesis.txt").write_text("not ours")
    CheckpointStore(store.folder).sweep()
    assert names(store) == [".trash-checkpoint-30"]
    assert ".trash-checkpoint-30" in warnings(caplog)[0]


def test_a_staged_checkpoint_that_lacked_only_its_rename_is_committed(store):
    save(store, 10)
    save(store, 20)
    store.staging_path(20).parent.mkdir()
    store.path(20).rename(store.staging_path(20))
    shutil.copytree(store.staging_path(20), store.staging_path(10))  # its step is there already
    shutil.copytree(store.staging_path(20), store.staging_path(30))  # whole, but of another step
    shutil.copytree(store.staging_path(20), store.staging_path(40))
    (store.staging_path(40) / "model.safetensors").unlink()
    store.staging_path(50).symlink_to(store.path(10))
    CheckpointStore(store.folder).sweep()
    assert names(store) == ["checkpoint-10", "checkpoint-20"]
    assert store.find_newest().step == 20


def test_a_stripped_checkpoint_verifies_but_is_not_continued_from(store, caplog):
    save(store, 10, facts={"lr": 0.1})
    save(store, 20)
    before = store.checkpoints()[1].num_bytes
    assert store.strip(20, ["optimizer.json", "optimizer.pt"])
    stored = store.open(store.path(20))
    assert sorted(stored.manifest.files) == ["model.safetensors", "progress.json"]
    assert stored.stripped == ("optimizer.json",)
    assert not (store.path(20) / "optimizer.json").exists()
    assert stored.num_bytes < before
    assert store.strip(20, ["progress.json"])
    assert store.open(store.path(20)).stripped == ("optimizer.json", "progress.json")
    assert store.strip(20, ["progress.json"])
    assert store.find_newest().step == 10
    assert "checkpoint-20" in names(store)
    assert "optimizer.json, progress.json" in warnings(caplog)[0]
    assert not store.strip(99, ["optimizer.json"])


def test_an_interrupted_strip_is_finished_and_only_inside_the_checkpoint(store, tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "kept").write_text("kept")
    save(store, 20, facts={"stripped": ["optimizer.bin", "model.safetensors", "../../kept", "link/kept", 5]})
    (store.path(20) / "optimizer.bin").write_text("left behind")
    (store.path(20) / "manifest.json.tmp").write_text("left behind")
    (store.path(20) / "link").symlink_to(tmp_path / "away")
    CheckpointStore(store.folder).sweep()
    assert not (store.path(20) / "optimizer.bin").exists()
    assert not (store.path(20) / "manifest.json.tmp").exists()
    assert (tmp_path / "kept").exists()
    assert (tmp_path / "away" / "kept").exists()
    assert store.open(store.path(20)).step == 20  # what the manifest lists is still there
    save(store, 30, facts={"stripped": 5})
    store.sweep()
    assert store.find_newest().step == 30


def test_relative_folders_stay_where_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("out")
    monkeypatch.chdir("/")
    save(store, 20)
    assert json.loads((tmp_path / "out" / "checkpoint-20" / MANIFEST).read_text())["step"] == 20

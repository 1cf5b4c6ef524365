"""Where checkpoints are, with and without a local folder."""

import pytest
from mirror_targets import save, steps

from hf_ext.checkpoints.places import Places
from hf_ext.checkpoints.run_lock import local_folder
from hf_ext.errors import CheckpointError


@pytest.fixture
def both(tmp_path) -> Places:
    return Places(tmp_path / "out", str(tmp_path / "local"))


def test_without_a_local_folder_checkpoints_are_in_the_output_folder_alone(tmp_path):
    places = Places(tmp_path / "out")
    save(places.store, 2)
    assert places.folder == tmp_path / "out"
    assert places.path(2) == tmp_path / "out" / "checkpoint-2"
    assert places.path(3) is None
    assert places.path(None) is None
    assert places.newest().step == 2
    places.copy(None, None)
    assert places.finish_copies() is None
    assert places.delete(2)
    assert places.path(2) is None


def test_with_one_they_are_saved_there_and_copied(both, tmp_path):
    save(both.store, 2)
    assert both.folder == local_folder(str(tmp_path / "local"), str(tmp_path / "out"))
    assert both.path(2).parent == both.folder
    both.copy(None, None)
    assert both.finish_copies() is None
    assert steps(both.mirror.target) == [2]
    assert both.store.delete(2)
    assert both.path(2) == tmp_path / "out" / "checkpoint-2"  # where it still is


def test_a_process_that_does_not_copy_sees_the_local_folder_alone(both, tmp_path):
    save(both.store, 2)
    other = Places(tmp_path / "out", str(tmp_path / "local"), copies=False)
    assert other.mirror is None
    assert other.path(2) == both.path(2)


def test_what_only_the_target_still_has_goes_with_the_next_copy_but_for_the_one_to_keep(both):
    for step in (1, 2):
        save(both.store, step)
        both.copy(None, 1)
        both.finish_copies()
        both.store.delete(step)
    save(both.store, 3)
    both.copy(None, 1)
    assert both.finish_copies() is None
    assert steps(both.mirror.target) == [1, 3]


def test_what_could_not_be_copied_is_named_with_both_folders(both, tmp_path):
    save(both.store, 2)
    (tmp_path / "out" / ".staging").write_text("in the way")
    (tmp_path / "out").chmod(0o500)
    try:
        both.mirror._copy_file = lambda *given: (_ for _ in ()).throw(OSError(5, "no"))
        both.copy(None, None)
        lacking = both.finish_copies()
    finally:
        (tmp_path / "out").chmod(0o700)
    assert lacking.startswith(f"{tmp_path / 'out'} lacks the newest checkpoint, which is in {both.folder}: ")


def test_what_is_newer_is_set_aside_in_both_places(both):
    for step in (1, 2):
        save(both.store, step)
    both.copy(None, None)
    both.finish_copies()
    both.set_aside_after(1)
    assert steps(both.store) == [1]
    assert both.path(2) is None
    assert (both.mirror.target.folder / "previous-checkpoint-2").is_dir()


def test_a_checkpoint_is_own_in_either_folder_and_foreign_elsewhere(both, tmp_path):
    save(both.store, 2)
    (stored,) = both.store.checkpoints()
    assert both.has(stored.path)
    assert not Places(tmp_path / "other").has(stored.path)


def test_a_local_folder_inside_the_output_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        Places(tmp_path / "out", str(tmp_path / "out"))

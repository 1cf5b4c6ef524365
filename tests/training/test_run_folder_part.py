"""One run per folder, held without a Trainer."""

from types import SimpleNamespace

import pytest
from other_runs import other_run

from hf_ext.checkpoints.run_folder.folder_lock import LOCK
from hf_ext.errors import FolderError
from hf_ext.training.run_folder import RunFolder
from hf_ext.training.team import Team


@pytest.fixture
def folder(tmp_path):
    args = SimpleNamespace(
        output_dir=str(tmp_path / "out"),
        local_checkpoint_dir=None,
        process_index=0,
        world_size=1,
        should_save=True,
        device="cpu",
    )
    return RunFolder(args, Team(args))


def test_the_folder_is_held_while_training_and_free_afterwards(folder, tmp_path):
    with folder.while_training():
        assert (tmp_path / "out" / LOCK).exists()
    with other_run(tmp_path / "out"), pytest.raises(FolderError), folder.while_training():
        pytest.fail("two runs in one folder")


def test_saving_elsewhere_or_for_a_checkpoint_needs_no_folder(folder, tmp_path):
    (tmp_path / "out").mkdir()
    with other_run(tmp_path / "out"):
        with folder.while_saving(str(tmp_path / "elsewhere"), is_for_checkpoint=False):
            pass
        with folder.while_saving(str(tmp_path / "out"), is_for_checkpoint=True):
            pass
        with pytest.raises(FolderError), folder.while_saving(None, is_for_checkpoint=False):
            pytest.fail("two runs in one folder")

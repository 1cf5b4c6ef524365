"""A checkpoint's JSON is checked in one place: what would make Trainer fail, or end at once, is refused by name."""

import dataclasses
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from small_runs import make_trainer

from hf_ext.checkpoints.format.manifest import MANIFEST, Manifest, hash_file
from hf_ext.checkpoints.state.progress import PROGRESS, STATE, check_trainer_state, read_progress
from hf_ext.checkpoints.storage.store import CheckpointStore
from hf_ext.disk import used_bytes
from hf_ext.errors import CheckpointError


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that saved at steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run") / "run"
    make_trainer(folder).train()
    return folder


@pytest.fixture
def folder(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def change(checkpoint: Path, name: str, **values) -> None:
    """Puts values into a JSON file, and its new hash into the manifest, as whoever may write there can."""
    file = checkpoint / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    manifest = Manifest.read(checkpoint)
    dataclasses.replace(manifest, files={**manifest.files, name: hash_file(file)}).write(checkpoint)


WRONG = [
    (STATE, {"global_step": 10**9}, r"tells of step 1000000000, but the manifest of step 6"),
    (STATE, {"global_step": "six"}, r"global_step = 'six'"),
    (STATE, {"epoch": None}, r"epoch = None"),
    (STATE, {"epoch": float("nan")}, r"epoch = nan"),
    (STATE, {"best_metric": "x"}, r"best_metric = 'x'"),
    (STATE, {"log_history": None}, r"log_history = None"),
    (STATE, {"log_history": [3]}, r"log_history = \[3\]"),
    (STATE, {"stateful_callbacks": [1]}, r"stateful_callbacks = \[1\]"),
    (STATE, {"stateful_callbacks": {"TrainerControl": {"args": 3}}}, r"stateful_callbacks = "),
    (STATE, {"surprise": 1}, r"surprise = 1"),
    (PROGRESS, {"last_logged_step": "4"}, r"last_logged_step = '4'"),
    (PROGRESS, {"last_logged_step": None}, r"last_logged_step = None"),
    (PROGRESS, {"evaluation_pending": 0}, r"evaluation_pending = 0"),
    (PROGRESS, {"only_model": "no"}, r"only_model = 'no'"),
    (PROGRESS, {"data_position": 7}, r"data_position = 7"),
    (PROGRESS, {"begun_loaders": "train"}, r"begun_loaders = 'train'"),
    (PROGRESS, {"best_saved_step": -1}, r"best_saved_step = -1"),
]


@pytest.mark.parametrize(("name", "values", "message"), WRONG)
def test_a_value_of_another_kind_is_refused_by_name(folder, name, values, message):
    checkpoint = folder / "checkpoint-6"
    read_progress(checkpoint)
    check_trainer_state(checkpoint, 6)
    change(checkpoint, name, **values)
    with pytest.raises(CheckpointError, match=f"{checkpoint / name}: .*{message}"):
        [read_progress(checkpoint), check_trainer_state(checkpoint, 6)]


@pytest.mark.parametrize(("name", "values", "message"), [WRONG[0], WRONG[7], WRONG[14]])
def test_a_run_that_would_continue_from_it_is_refused(folder, name, values, message):
    change(folder / "checkpoint-6", name, **values)
    with pytest.raises(CheckpointError, match=message):
        make_trainer(folder, resume="auto").train()
    make_trainer(folder, resume_from_checkpoint=str(folder / "checkpoint-4")).train()


@pytest.mark.parametrize("name", [MANIFEST, STATE, "model.safetensors"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(folder, name):
    (folder / "checkpoint-6" / name).unlink()
    os.mkfifo(folder / "checkpoint-6" / name)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    try:
        assert CheckpointStore(folder).find_newest().step == 4
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert (folder / "damaged-checkpoint-6").is_dir()


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="becomes another user")
def test_a_checkpoint_that_this_user_may_not_read_is_passed_over(run, caplog):
    top = Path(tempfile.mkdtemp(prefix="other-user-"))
    try:
        top.chmod(0o755)
        folder = Path(shutil.copytree(run, top / "run"))
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, 65534, 65534)
        (folder / "checkpoint-6").chmod(0)
        os.seteuid(65534)
        try:
            assert used_bytes(folder / "checkpoint-6") == os.lstat(folder / "checkpoint-6").st_blocks * 512
            trainer = make_trainer(folder, resume="auto")
            trainer.train()
        finally:
            os.seteuid(0)
        assert "not readable" in caplog.text
        assert trainer.state.global_step == 6
        assert {"checkpoint-4", "checkpoint-6", "previous-checkpoint-6"} <= set(os.listdir(folder))
        assert Manifest.read(folder / "checkpoint-6").step == 6
    finally:
        shutil.rmtree(top)

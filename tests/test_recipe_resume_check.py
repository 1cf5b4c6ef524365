"""recipes/resume_check.py as users run it: it names the checkpoint that a run takes."""

import shutil
from pathlib import Path

import commands
import pytest
from small_runs import SAVED, contents, make_trainer
from transformers import Trainer, TrainerCallback

from hf_ext.errors import CheckpointError


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folders `ours` and `stock`, each with checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("runs")
    make_trainer(folder / "ours").train()
    make_trainer(folder / "stock", Trainer).train()
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


# Name -> what happened to the run's folder, and the step from which a run continues.
CASES = {
    "nothing": (lambda f, r: None, 6),
    "a bit of the newest": (lambda f, r: flip(f / "checkpoint-6" / "model.safetensors"), 4),
    "all damaged": (lambda f, r: [flip(f / f"checkpoint-{n}" / "config.json") for n in SAVED], 0),
    "a newer one of stock Trainer": (lambda f, r: shutil.copytree(r / "stock/checkpoint-6", f / "checkpoint-9"), 6),
}


class BeganAt(TrainerCallback):
    step = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_it_names_the_checkpoint_that_a_run_takes_and_changes_nothing(case, runs, tmp_path, capsys):
    folder = Path(shutil.copytree(runs / "ours", tmp_path / "run"))
    happen, step = CASES[case]
    happen(folder, runs)
    before = contents(folder)
    assert commands.resume([str(folder)]) == (0 if step else 1)
    outcome = f"continues from step {step} " if step else "finds nothing to continue from"
    assert f"--resume auto {outcome}" in capsys.readouterr().out
    assert contents(folder) == before
    trainer, began = make_trainer(folder, resume="auto"), BeganAt()
    trainer.add_callback(began)
    trainer.train()
    assert began.step == step


def test_each_checkpoint_is_listed_with_what_is_wrong_with_it(runs, tmp_path, capsys):
    folder = Path(shutil.copytree(runs / "ours", tmp_path / "run"))
    flip(folder / "checkpoint-6" / "model.safetensors")
    shutil.copytree(runs / "stock" / "checkpoint-2", folder / "checkpoint-9")
    commands.resume([str(folder)])
    said = capsys.readouterr().out
    for words in ("checkpoint-4  verified", "checkpoint-6  damaged", "checkpoint-9  not written by hf_ext"):
        assert words in said
    assert "checkpoint-6: model.safetensors: expected" in said
    assert commands.resume([str(folder / "checkpoint-2")]) == 0  # one alone
    assert commands.resume([str(folder / "checkpoint-6")]) == 1
    with pytest.raises(CheckpointError, match="expected a folder, found nothing"):
        commands.resume([str(tmp_path / "none")])

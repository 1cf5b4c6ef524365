"""What else may lie in an output folder: the right checkpoint is taken, and what is not the run's stays as it is."""

import shutil
from pathlib import Path

import pytest
from faulty_runs import KilledRun, contents, make_rows, messages, names
from miniature_esm import make_narrow_esm
from other_runs import plant_lock
from transformers import Trainer

from hf_ext.errors import CheckpointError


class Runs(KilledRun):
    """And one of stock Trainer."""

    def __init__(self, folder):
        super().__init__(folder, make_narrow_esm())
        self.make.killed(folder / "stock", at=5, trainer=Trainer)
        self.stock = folder / "stock" / "checkpoint-4"

    def problems(self, folder, began_at=4, **given) -> list[str]:
        """What is wrong with a run that continues in `folder`; [] is right."""
        self.make(folder, **{"resume": "auto", **given}).train()
        watch, found = self.make.watch, []
        if watch.began_at != began_at:
            found.append(f"began at step {watch.began_at}")
        return found + [f"weights of step {s}" for s in watch.weights if watch.weights[s] != self.whole[s]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("stale"))


@pytest.fixture
def log():
    with messages() as found:
        yield found


def put_stock(runs, path):
    shutil.copytree(runs.stock, path)


def put_file(runs, path):
    path.write_text("notes of mine")


def put_link(runs, path):
    path.symlink_to(runs.folder / "killed" / "checkpoint-2")


INTRUDERS = {
    "a stock checkpoint": put_stock,
    "an empty folder": lambda runs, path: path.mkdir(),
    "a file": put_file,
    "a link to a checkpoint": put_link,
    "a link to nothing": lambda runs, path: path.symlink_to(path / "nowhere"),
}


def test_what_is_not_ours_is_passed_over_kept_and_told(runs, log, tmp_path):
    folder, elsewhere = runs.copy(tmp_path / "run"), contents(runs.folder / "killed")
    before = contents(folder)
    for number, put in enumerate(INTRUDERS.values()):
        put(runs, folder / f"checkpoint-{990 + number}")
    for name in ("checkpoint-best", "checkpoint-0999", "checkpoint-4.tmp", "checkpoint-", "Checkpoint-9"):
        shutil.copytree(folder / "checkpoint-4", folder / name)
    intruders = {name: value for name, value in contents(folder).items() if name not in before}
    assert runs.problems(folder, save_total_limit=1) == []
    assert {name: contents(folder)[name] for name in intruders} == intruders
    assert contents(runs.folder / "killed") == elsewhere
    assert [name for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6") if name in names(folder)] == [
        "checkpoint-6"
    ]
    (told,) = [text for text in log if "left alone" in text]
    assert all(str(folder / f"checkpoint-{990 + number}") in told for number in range(len(INTRUDERS)))
    assert "checkpoint-best" not in told  # which is no step
    assert "--resume_from_checkpoint PATH" in told


def test_what_stands_where_a_checkpoint_goes_is_moved_and_kept(runs, log, tmp_path):
    for step, put in zip((2, 4, 6), (put_stock, put_file, put_link)):
        put(runs, tmp_path / f"checkpoint-{step}")
    before = {f"previous-{name}": value for name, value in contents(tmp_path).items()}
    assert runs.problems(tmp_path, began_at=0) == []
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert all((tmp_path / f"checkpoint-{step}" / "manifest.json").is_file() for step in (2, 4, 6))
    assert any("checkpoint-6 was in the way of this run's" in text for text in log)


@pytest.mark.parametrize("name", ["L\u00e4ufe \u03b2 \U0001f9ec 100% 'of' \"it\" #1 {x} [a-z]*", "-n"])
def test_an_output_folder_may_have_any_name_be_relative_and_linked(name, runs, tmp_path, monkeypatch):
    target = runs.copy(tmp_path / "disk")
    monkeypatch.chdir(tmp_path)
    Path(name).symlink_to(target)
    assert runs.problems(Path(name), save_total_limit=1) == []
    assert Path(name).is_symlink()
    assert names(target) == ["checkpoint-6"]


def test_a_folder_that_was_moved_keeps_its_best_checkpoint(runs, tmp_path):
    errors = iter([1.0, 2.0, 3.0, 4.0])
    best = {"metric_for_best_model": "error", "greater_is_better": False, "load_best_model_at_end": True}
    given = {**best, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
    given["compute_metrics"] = lambda _: {"error": next(errors)}
    rows = make_rows(2)
    runs.make.killed(tmp_path / "old", at=5, eval_dataset=rows, **given)
    of_step_2 = runs.make.watch.weights[2]
    (tmp_path / "old").rename(tmp_path / "new")
    trainer = runs.make(tmp_path / "new", eval_dataset=rows, resume="auto", **given)
    trainer.train()
    assert runs.make.watch.began_at == 4
    assert {name: t.numpy().tobytes() for name, t in trainer.model.state_dict().items()} == of_step_2
    assert names(tmp_path) == ["new"]


def test_what_a_dead_process_left_is_cleared(runs, tmp_path):
    folder = runs.copy(tmp_path / "run")
    staged = Path(shutil.copytree(folder / "checkpoint-4", folder / ".staging/checkpoint-6"))
    (staged / "manifest.json").unlink()
    plant_lock(folder, pid=2**22 + 1)
    shutil.copytree(folder / "checkpoint-2", folder / ".trash-checkpoint-2")
    (folder / ".trash-checkpoint-3").mkdir()
    (folder / ".trash-checkpoint-5").mkdir()
    (folder / ".trash-checkpoint-5" / "thesis.txt").write_text("mine")
    assert runs.problems(folder) == []
    assert names(folder) == [".trash-checkpoint-5", "checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert contents(folder / ".trash-checkpoint-5") == {"thesis.txt": b"mine"}


def test_a_newer_checkpoint_of_a_run_that_differs_is_refused_with_the_difference_and_nothing_moves(runs, tmp_path):
    folder = runs.copy(tmp_path / "run")
    runs.make(tmp_path / "other", learning_rate=0.5, weight_decay=0.25).train()
    shutil.copytree(tmp_path / "other" / "checkpoint-6", folder / "checkpoint-6")
    before = contents(folder)
    with pytest.raises(CheckpointError) as refusal:
        runs.problems(folder)
    for words in ("learning_rate: 0.5 in the checkpoint, 0.01 now", "weight_decay: 0.25 in the checkpoint, 0.0 now"):
        assert words in str(refusal.value)
    assert str(folder / "checkpoint-6") in str(refusal.value)
    after = contents(folder)
    assert before.items() <= after.items()
    assert {name for name in after if "checkpoint" in name} == {name for name in before if "checkpoint" in name}


def test_a_rerun_without_resuming_renames_what_is_there_and_the_next_continues_the_new_run(runs, log, tmp_path):
    folder = runs.copy(tmp_path / "run")
    before = {f"previous-{name}": value for name, value in contents(folder).items() if name.startswith("checkpoint-")}
    runs.make.killed(folder, at=3, resume="no", save_total_limit=1)
    assert runs.make.watch.began_at == 0
    assert names(folder) == ["checkpoint-2", "previous-checkpoint-2", "previous-checkpoint-4"]
    assert before.items() <= contents(folder).items()
    assert any("is now previous-checkpoint-2, previous-checkpoint-4" in text for text in log)
    assert runs.problems(folder, began_at=2, save_total_limit=1) == []
    assert names(folder) == ["checkpoint-6", "previous-checkpoint-2", "previous-checkpoint-4"]
    assert before.items() <= contents(folder).items()

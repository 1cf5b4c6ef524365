"""What an inspection says is what a resumed run then does; and it changes nothing."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from other_runs import plant_lock
from small_runs import SAVED, contents, make_trainer
from transformers import Trainer

from hf_ext.checkpoints.format.manifest import Manifest
from hf_ext.checkpoints.storage.store import CheckpointStore
from hf_ext.checkpoints.tools.inspection import Inspection, inspect_folder
from hf_ext.checkpoints.tools.inspection_report import format_inspection, inspection_json
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


def drop_optimizer(folder: Path, step: int) -> None:
    store = CheckpointStore(folder, Manifest.read(folder / f"checkpoint-{step}").run_id)
    assert store.strip(step, ["optimizer.json", "optimizer.safetensors"])


def stage(folder: Path, step: int, source: int = 6, is_whole: bool = True) -> Path:
    """What a process leaves that was killed before the rename of `checkpoint-<step>`, or while it wrote."""
    path = Path(shutil.copytree(folder / f"checkpoint-{source}", folder / f".staging-checkpoint-{step}"))
    dataclasses.replace(Manifest.read(path), step=step).write(path)
    if not is_whole:
        (path / "manifest.json").unlink()
    return path


def stand_in(folder: Path, runs: Path) -> None:
    shutil.copytree(runs / "stock" / "checkpoint-6", folder / "checkpoint-9")


# Name -> what happened to the run's folder, and the step from which a run continues.
CASES = {
    "nothing": (lambda f, r: None, 6),
    "a bit of the newest": (lambda f, r: flip(f / "checkpoint-6" / "model.safetensors"), 4),
    "a bit of its manifest": (lambda f, r: flip(f / "checkpoint-6" / "manifest.json"), 4),
    "its manifest deleted": (lambda f, r: (f / "checkpoint-6" / "manifest.json").unlink(), 4),
    "a file deleted": (lambda f, r: (f / "checkpoint-6" / "rank_0.json").unlink(), 4),
    "renamed to another step": (lambda f, r: (f / "checkpoint-6").rename(f / "checkpoint-60"), 4),
    "the newest stripped": (lambda f, r: drop_optimizer(f, 6), 4),
    "an older one damaged": (lambda f, r: flip(f / "checkpoint-4" / "model.safetensors"), 6),
    "all damaged": (lambda f, r: [flip(f / f"checkpoint-{n}" / "config.json") for n in SAVED], None),
    "all stripped": (lambda f, r: [drop_optimizer(f, n) for n in SAVED], None),
    "killed before the rename": (lambda f, r: stage(f, 8), 8),
    "killed while writing": (lambda f, r: stage(f, 8, is_whole=False), 6),
    "staged for a step that is there": (lambda f, r: stage(f, 4), 6),
    "a newer one of stock Trainer": (stand_in, 6),
    "a newer folder of nobody": (lambda f, r: (f / "checkpoint-9").mkdir(), 6),
    "a newer link": (lambda f, r: (f / "checkpoint-9").symlink_to(f / "checkpoint-6"), 6),
    "a newer file": (lambda f, r: (f / "checkpoint-9").write_text("mine"), 6),
    "a name that is none": (lambda f, r: shutil.copytree(f / "checkpoint-6", f / "checkpoint-06"), 6),
    "nothing there": (lambda f, r: [shutil.rmtree(f / f"checkpoint-{n}") for n in SAVED], None),
}


def copy(runs: Path, to: Path, name: str = "ours") -> Path:
    return Path(shutil.copytree(runs / name, to, symlinks=True))


def is_agreed(inspection: Inspection, folder: Path) -> bool:
    """Whether the store takes the checkpoint that the inspection named; the store changes the folder."""
    store = CheckpointStore(folder)
    store.sweep()
    found = store.find_newest()
    return inspection.continues_from == (found and found.path.name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_the_inspection_names_the_checkpoint_that_a_run_takes_and_changes_nothing(case, runs, tmp_path):
    folder = copy(runs, tmp_path / "run")
    happen, step = CASES[case]
    happen(folder, runs)
    before = contents(folder)
    inspection = inspect_folder(folder)
    assert contents(folder) == before
    assert inspection.continues_from == (step and f"checkpoint-{step}")
    assert is_agreed(inspection, folder)


def test_an_inspection_that_trusts_names_would_be_seen(runs, tmp_path):
    folder = copy(runs, tmp_path / "run")
    flip(folder / "checkpoint-6" / "model.safetensors")
    trusting = dataclasses.replace(inspect_folder(folder), continues_from="checkpoint-6")
    assert not is_agreed(trusting, folder)


def test_a_whole_checkpoint_is_described_with_its_roles_and_everything_a_resume_restores(runs):
    first, _, last = inspect_folder(runs / "ours").checkpoints
    assert [(found.kind, found.step, found.roles, found.fate) for found in (first, last)] == [
        ("ours", 2, ("best",), "older"),
        ("ours", 6, ("newest",), "continued from"),
    ]
    assert (first.epoch, last.epoch) == (2 / 6, 1.0)
    assert first.run_id == last.run_id == Manifest.read(runs / "ours" / "checkpoint-6").run_id
    assert first.num_bytes > (runs / "ours" / "checkpoint-2" / "model.safetensors").stat().st_size
    weights = (runs / "ours" / "checkpoint-2" / "model.safetensors").stat().st_size
    assert first.contents.restores == {
        "weights": f"model.safetensors ({weights:,} bytes)",
        "optimizer": "AdamW",
        "scheduler": "LambdaLR",
        "random states": "of 1 process(es)",
        "loss since the last log": "since step 0",
        "place in the data": "by number of steps",
        "interrupted evaluation": "none",
        "callbacks": "EvaluationRecord, TrainerControl",
    }
    assert first.contents.lacks == ()


def test_damage_is_reported_with_file_expected_and_found(runs, tmp_path):
    folder = copy(runs, tmp_path / "run")
    weights = folder / "checkpoint-6" / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    (folder / "checkpoint-6" / "progress.json").unlink()
    found = inspect_folder(folder).checkpoints[-1]
    assert (found.kind, found.fate) == ("damaged", "renamed damaged-checkpoint-6")
    assert found.problems[0] == f"model.safetensors: expected {size} bytes, found {size - 1} bytes"
    assert found.problems[1].endswith("bytes, found nothing")


def test_a_stock_checkpoint_says_what_it_lacks_and_can_be_named(runs, tmp_path):
    folder = copy(runs, tmp_path / "run", "stock")
    inspection = inspect_folder(folder)
    assert inspection.continues_from is None
    assert [(c.kind, c.fate, c.step) for c in inspection.checkpoints][-1] == (
        "stock",
        "left alone unless it is named",
        6,
    )
    assert "loss since the last log" in inspection.checkpoints[-1].contents.lacks
    named = inspect_folder(folder / "checkpoint-4")
    assert named.continues_from == "checkpoint-4"
    (folder / "checkpoint-4" / "rng_state.pth").unlink()
    assert "random states" in inspect_folder(folder / "checkpoint-4").checkpoints[0].contents.lacks


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "trainer_state.json"])
def test_a_stock_checkpoint_that_was_cut_off_is_damaged(name, runs, tmp_path):
    folder = copy(runs, tmp_path / "run", "stock") / "checkpoint-6"
    assert inspect_folder(folder).checkpoints[0].problems == ()
    (folder / name).write_bytes((folder / name).read_bytes()[:200])
    inspection = inspect_folder(folder)
    assert inspection.continues_from is None
    assert [name in problem for problem in inspection.checkpoints[0].problems] == [True]


def test_weights_alone_are_refused_as_a_run_refuses_them(tmp_path):
    make_trainer(tmp_path / "run", save_only_model=True, max_steps=2).train()
    inspection = inspect_folder(tmp_path / "run")
    assert inspection.continues_from is None
    assert "weights alone" in inspection.outcome
    with pytest.raises(CheckpointError, match="weights alone"):
        make_trainer(tmp_path / "run", save_only_model=True, max_steps=2, resume="auto").train()


def test_weights_that_were_put_into_a_checkpoint_are_refused_as_a_run_refuses_them(runs, tmp_path):
    folder = copy(runs, tmp_path / "run")
    shutil.copy(folder / "checkpoint-6" / "model.safetensors", folder / "checkpoint-6" / "trainable.safetensors")
    assert "put there later" in inspect_folder(folder).outcome
    assert inspect_folder(folder).continues_from is None
    with pytest.raises(CheckpointError, match="put there later"):
        make_trainer(folder, resume="auto").train()


def test_an_uninterrupted_run_goes_on_from_the_step_that_was_named(runs, tmp_path):
    folder = copy(runs, tmp_path / "run")
    flip(folder / "checkpoint-6" / "optimizer.safetensors")
    assert inspect_folder(folder).outcome == "--resume auto continues from checkpoint-4 (step 4, epoch 0.67)."
    trainer = make_trainer(folder, resume="auto", save_strategy="no", load_best_model_at_end=False)
    trainer.train()
    assert trainer.checkpoints.run_id == Manifest.read(runs / "ours" / "checkpoint-4").run_id
    assert (folder / "damaged-checkpoint-6").is_dir()


def test_what_stands_beside_checkpoints_is_listed_with_what_becomes_of_it(runs, tmp_path):
    folder = copy(runs, tmp_path / "run")
    stage(folder, 8)
    stage(folder, 10, is_whole=False)
    (folder / ".trash-checkpoint-1").mkdir()
    (folder / "checkpoint-2").rename(folder / "damaged-checkpoint-2")
    (folder / "checkpoint-4").rename(folder / "previous-checkpoint-4-2")
    assert {entry.name: entry.fate for entry in inspect_folder(folder).remains} == {
        ".staging-checkpoint-8": "complete but for its name; the next run makes it checkpoint-8",
        ".staging-checkpoint-10": "not complete; the next run removes it",
        ".trash-checkpoint-1": "its deletion was cut short; the next run finishes it",
        "damaged-checkpoint-2": "did not verify; kept until you delete it",
        "previous-checkpoint-4-2": "of another run or branch; kept until you delete it",
    }


def test_a_staged_checkpoint_of_a_living_process_is_not_counted(runs, tmp_path):
    folder = copy(runs, tmp_path / "run")
    stage(folder, 8)
    plant_lock(folder)
    inspection = inspect_folder(folder)
    assert inspection.continues_from == "checkpoint-6"
    assert inspection.remains[0].fate == "a run that goes on now is writing it"


def test_the_report_has_every_name_and_the_json_is_the_same(runs, tmp_path):
    folder = copy(runs, tmp_path / "run")
    drop_optimizer(folder, 6)
    inspection = inspect_folder(folder)
    text = format_inspection(inspection)
    assert "refused: optimizer.json, optimizer.safetensors were dropped from it" in text
    assert "arguments.learning_rate: 0.01" in format_inspection(inspection, with_arguments=True)
    assert "arguments.learning_rate" not in text
    plain = json.loads(json.dumps(inspection_json(inspection)))
    assert [found["kind"] for found in plain["checkpoints"]] == ["ours", "ours", "stripped"]
    assert plain["continues_from"] == "checkpoint-4"


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="expected a folder, found nothing"):
        inspect_folder(tmp_path / "none")

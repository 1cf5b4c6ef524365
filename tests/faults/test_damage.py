"""Every file of a checkpoint, damaged in every way: found before a tensor reaches the model, and the run goes on."""

import shutil
from pathlib import Path

import pytest
from faulty_runs import NUM_STEPS, KilledRun, bits, contents, flip, make_lora, make_rows, messages, names, zero_block
from miniature_esm import make_narrow_esm
from transformers import TrainerCallback

from hf_ext.checkpoints import CheckpointStore
from hf_ext.checkpoints.manifest import read_stored
from hf_ext.errors import CheckpointError

pytestmark = pytest.mark.internals
NEWEST, BEFORE = "checkpoint-4", "checkpoint-2"
COMMON = ("manifest.json", "optimizer.pt", "progress.json", "rng_state.pth", "scheduler.pt", "trainer_state.json")
COMMON += ("training_args.json",)
FILES = {
    "esm": {*COMMON, "config.json", "model.safetensors"},
    "lora": {*COMMON, "README.md", "adapter_config.json", "adapter_model.safetensors", "frozen.json"},
}
# The same in both checkpoints, so that swapping them is no damage.
CONSTANT = {"config.json", "training_args.json", "README.md", "adapter_config.json", "frozen.json"}

CHANGES = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one byte less": lambda content: content[:-1],
    "bit flipped in front": flip(lambda length: length // 3),
    "bit flipped at the end": flip(lambda length: length - 1),
    "zero block": zero_block,
}
DAMAGES = ("deleted", *CHANGES, "swapped with another step's")
CASES = [
    (family, name, damage)
    for family, files in FILES.items()
    for name in sorted(files)
    for damage in DAMAGES
    if not (damage.startswith("swapped") and name in CONSTANT)
]


def do_damage(folder, name, damage) -> None:
    """Damages one file of the newest checkpoint in `folder`."""
    path = folder / name
    before = path.read_bytes()
    if damage == "deleted":
        path.unlink()
        return
    other = folder.parent / BEFORE / name
    path.write_bytes(other.read_bytes() if damage.startswith("swapped") else CHANGES[damage](before))
    assert path.read_bytes() != before


class Family(KilledRun):
    """Copies of its folder are damaged."""

    def problems(self, folder, name, log, store=CheckpointStore) -> list[str]:
        """What is wrong with how a run treats the damaged file `name` of its newest checkpoint; [] is right."""
        damaged, found = contents(folder / NEWEST), []
        trainer = self.make(folder, save_strategy="no")
        trainer.checkpoints.__class__ = store
        before = bits(trainer.model)
        try:
            trainer.train(resume_from_checkpoint=str(folder / NEWEST))
            found.append("a damaged checkpoint that was named is taken")
        except CheckpointError as error:
            found += missing_words(str(error), name)
            found += [] if bits(trainer.model) == before else ["the model changed"]
        log.clear()
        trainer = self.make(folder, resume="auto", save_strategy="no")
        trainer.checkpoints.__class__ = store
        trainer.train()
        watch = self.make.watch
        found += missing_words("\n".join(log), name)
        found += [] if watch.began_at == 2 else [f"began at step {watch.began_at}"]
        found += [f"weights of step {s}" for s in watch.weights if watch.weights[s] != self.whole[s]]
        found += [] if max(watch.weights) == NUM_STEPS else [f"ended at step {max(watch.weights)}"]
        aside = folder / f"damaged-{NEWEST}"
        found += [] if aside.is_dir() and contents(aside) == damaged else ["not set aside as it was"]
        return found


def missing_words(message, name) -> list[str]:
    return [f"no {word!r} in: {message}" for word in (name, "expected ", "found ") if word not in message]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    templates = {"esm": make_narrow_esm(), "lora": make_lora(folder / "base")}
    return {name: Family(folder / name, template) for name, template in templates.items()}


@pytest.fixture
def log():
    with messages() as found:
        yield found


def in_ci(family, name, damage) -> bool:
    """Files that both families have are damaged in one of them; nightly in both."""
    return family == "esm" or name not in COMMON or name == "manifest.json"


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("family", "name", "damage"),
    [pytest.param(*case, marks=[] if in_ci(*case) else [pytest.mark.nightly]) for case in CASES],
)
def test_damage_is_found_before_a_tensor_is_loaded_and_the_checkpoint_before_goes_on(
    family, name, damage, families, log
):
    folder = families[family].copy()
    do_damage(folder / NEWEST, name, damage)
    assert families[family].problems(folder, name, log) == []


def test_the_suite_covers_every_file_that_a_run_writes(families):
    for name, family in families.items():
        checkpoints = [contents(family.folder / "killed" / step) for step in (BEFORE, NEWEST)]
        assert [set(files) for files in checkpoints] == [FILES[name], FILES[name]]
        assert {file for file in FILES[name] if checkpoints[0][file] == checkpoints[1][file]} == CONSTANT & FILES[name]
    assert len(set(CASES)) == len(CASES)
    assert sum(in_ci(*case) for case in CASES) >= 80


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["a link to the same bytes", "a folder", "the whole checkpoint of another step"])
def test_what_only_looks_like_the_file_is_damage(kind, families, log):
    family = families["esm"]
    folder = family.copy()
    path = folder / NEWEST / "model.safetensors"
    name = "manifest.json" if kind.startswith("the whole") else path.name
    if kind.startswith("the whole"):
        shutil.rmtree(folder / NEWEST)
        shutil.copytree(folder / BEFORE, folder / NEWEST)
    elif kind == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.symlink_to(path.rename(folder / "elsewhere.safetensors"))
    assert family.problems(folder, name, log) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", list(FILES))
def test_of_several_damaged_ones_the_newest_whole_one_is_taken(family, families):
    make = families[family].make
    folder = families[family].folder / "every step"
    make.killed(folder, at=5, save_steps=1)
    assert names(folder) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    (folder / "checkpoint-4" / "manifest.json").unlink()
    do_damage(folder / "checkpoint-3", "optimizer.pt", "zero block")
    make(folder, resume="auto", save_steps=1).train()
    assert make.watch.began_at == 2
    assert make.watch.weights[NUM_STEPS] == families[family].whole[NUM_STEPS]
    assert names(folder)[-2:] == ["damaged-checkpoint-3", "damaged-checkpoint-4"]
    assert {f"checkpoint-{step}" for step in range(1, 7)} < set(names(folder))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("family", list(FILES))
@pytest.mark.parametrize("name", ["manifest.json", "optimizer.pt", "trainer_state.json"])
@pytest.mark.parametrize("damage", ["deleted", "half", "bit flipped at the end"])
def test_with_all_checkpoints_damaged_the_run_starts_anew_and_deletes_nothing(family, name, damage, families):
    folder = families[family].copy()
    for step in (BEFORE, NEWEST):
        do_damage(folder / step, name, damage)
    before = {f"damaged-{step}": contents(folder / step) for step in (BEFORE, NEWEST)}
    make = families[family].make
    make(folder, resume="auto").train()
    assert make.watch.began_at == 0
    assert make.watch.weights == families[family].whole
    assert {name: contents(folder / name) for name in before} == before
    assert names(folder) == [f"checkpoint-{step}" for step in (2, 4, 6)] + sorted(before)


def test_a_damaged_best_checkpoint_is_not_loaded_at_the_end(families, tmp_path):
    make = families["esm"].make

    class Damage(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                do_damage(tmp_path / "checkpoint-2", "model.safetensors", "bit flipped at the end")

    errors = iter([0.0, 1.0, 2.0, 3.0])  # the first before training
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": make_rows(2)}
    best = {"metric_for_best_model": "error", "greater_is_better": False, "load_best_model_at_end": True}
    metrics = {"compute_metrics": lambda _: {"error": next(errors)}}
    trainer = make(tmp_path, callbacks=[Damage()], **evaluation, **best, **metrics)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected sha256"):
        trainer.train()
    assert bits(trainer.model) == make.watch.weights[NUM_STEPS]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


class Trusting(CheckpointStore):
    """Takes the highest number, as it is."""

    def find_newest(self):
        return read_stored(self.path(4), 4)

    def open(self, path):
        return read_stored(Path(path), 4)


def test_the_suite_sees_a_store_that_verifies_nothing(families, log):
    folder = families["esm"].copy()
    do_damage(folder / NEWEST, "model.safetensors", "bit flipped at the end")
    found = families["esm"].problems(folder, "model.safetensors", log, Trusting)
    assert {"a damaged checkpoint that was named is taken", "began at step 4", "weights of step 6"} <= set(found)

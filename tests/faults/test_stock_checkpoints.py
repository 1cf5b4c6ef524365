"""Checkpoints of stock Trainer in FastTrainer and the other way round: weights bit for bit; what is missing is said.

Stock Trainer loses ESM's LayerNorms when it resumes and when it loads the best model; the same comparisons show it.
"""

import logging
import shutil
import warnings
from pathlib import Path

import pytest
from faulty_runs import bits
from peft import PeftModel
from stock_runs import BEST, ESM_KINDS, KINDS, LAYER_NORMS, NUM_STEPS, SAVED, Runs, differing
from transformers import Trainer

from hf_ext.errors import CheckpointError
from hf_ext.trainer import FastTrainer


class Bench(Runs):
    """Runs that nobody interrupted are made once."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self._whole: dict = {}

    def whole(self, kind, trainer_class):
        """(checkpoint of step 3, trainer, watch)."""
        key = kind, trainer_class
        if key not in self._whole:
            folder = self.folder / f"{kind} {trainer_class.__name__}"
            self._whole[key] = (folder / f"checkpoint-{SAVED}", *self.train(kind, trainer_class, folder))
        return self._whole[key]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("stock"))


def read(folder, model, base):
    """The model in `folder` as `from_pretrained` reads it, and the keys it found missing or unexpected."""
    if isinstance(model, PeftModel):
        fresh = type(model.get_base_model()).from_pretrained(base)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(fresh, folder), set()
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    return loaded, {*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]}


def log_of(trainer):
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in trainer.state.log_history[:NUM_STEPS]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stock_run_is_continued_as_if_nobody_had_interrupted_it(bench, kind, tmp_path, caplog):
    checkpoint, whole, watch = bench.whole(kind, Trainer)
    with caplog.at_level(logging.WARNING, "hf_ext"):
        resumed, seen = bench.train(kind, FastTrainer, tmp_path, checkpoint)
    assert seen.began_at == SAVED
    assert differing(seen.weights[SAVED], watch.weights[SAVED]) == []
    assert differing(seen.weights[NUM_STEPS], watch.weights[NUM_STEPS]) == []
    assert log_of(resumed) == log_of(whole)
    assert "its files cannot be verified. Data and most arguments are not compared." in caplog.text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_stock_trainer_continues_ours_and_of_its_own_loses_the_layer_norms_of_esm(bench, kind, tmp_path):
    for written_by in (FastTrainer, Trainer):
        checkpoint, _, watch = bench.whole(kind, written_by)
        _, seen = bench.train(kind, Trainer, tmp_path / written_by.__name__, checkpoint)
        assert seen.began_at == SAVED
        lost = differing(seen.weights[SAVED], watch.weights[SAVED])
        assert len(lost) == (LAYER_NORMS if kind in ESM_KINDS and written_by is Trainer else 0)
        assert all("LayerNorm" in name for name in lost)
        assert bool(differing(seen.weights[NUM_STEPS], watch.weights[NUM_STEPS])) == bool(lost)


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_reads_checkpoint_and_export_with_no_key_missing(bench, kind, tmp_path):
    checkpoint, trainer, watch = bench.whole(kind, FastTrainer)
    trainer.save_model(tmp_path)
    for folder, step in ((checkpoint, SAVED), (tmp_path, NUM_STEPS)):
        loaded, wrong = read(folder, trainer.model, bench.base)
        assert wrong == set()
        found = differing(bits(loaded), watch.weights[step])
        assert [name for name in found if "original_module" not in name] == []  # what PEFT keeps of an untrained head


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_model_comes_back_whole_where_stock_trainer_has_the_layer_norms_of_the_last(bench, kind, tmp_path):
    for trainer_class in (FastTrainer, Trainer):
        trainer, watch = bench.train(kind, trainer_class, tmp_path / trainer_class.__name__, **BEST)
        assert trainer.state.best_global_step == SAVED
        lost = differing(bits(trainer.model), watch.weights[SAVED])
        assert len(lost) == (LAYER_NORMS if kind in ESM_KINDS and trainer_class is Trainer else 0)
        from_the_last = differing(bits(trainer.model), watch.weights[NUM_STEPS])
        assert from_the_last != []
        assert not set(lost) & set(from_the_last)


# --- what a stock checkpoint lacks -----------------------------------------------------------------------------------


def without(checkpoint, folder, *names):
    """A copy of a checkpoint that lacks some files."""
    copy = folder / checkpoint.name
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns(*names))
    return copy


def test_what_a_stock_checkpoint_lacks_is_said_and_the_weights_still_arrive(bench, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hf_ext")
    checkpoint, _, watch = bench.whole("ESM regression", Trainer)
    copy = without(checkpoint, tmp_path, "scheduler.pt", "rng_state.pth")
    _, seen = bench.train("ESM regression", FastTrainer, tmp_path / "run", copy)
    assert "compared, and it lacks scheduler.pt, rng_state.pth, so that training does not continue" in caplog.text
    assert seen.began_at == SAVED
    assert differing(seen.weights[SAVED], watch.weights[SAVED]) == []
    assert differing(seen.weights[NUM_STEPS], watch.weights[NUM_STEPS]) != []


@pytest.mark.parametrize(
    ("name", "words"),
    [("trainer_state.json", "no checkpoint there"), ("model.safetensors", "Can't find a valid checkpoint")],
)
def test_a_stock_checkpoint_without_state_or_weights_is_refused(bench, name, words, tmp_path):
    copy = without(bench.whole("ESM regression", Trainer)[0], tmp_path, name)
    trainer, _ = bench.make("ESM regression", FastTrainer, tmp_path / "run")
    with pytest.raises((CheckpointError, ValueError), match=words):
        trainer.train(resume_from_checkpoint=str(copy))

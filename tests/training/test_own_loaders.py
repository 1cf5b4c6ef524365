"""A subclass's own loaders and samplers: a continued run is the one that was not killed, and stock Trainer's."""

import itertools

import pytest
import torch
from continued_runs import EVALUATING, interrupt, same, train
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_ext.trainer import FastTrainer

PLAIN = {"dataloader_num_workers": 0, "dataloader_persistent_workers": False}
LIVING = {"num_workers": 1, "persistent_workers": True}
STEPS = (2, 4, 6)  # in the first epoch, at its end, in the second


class Named(DataLoader):
    """A loader class of the user's."""


class WithGenerator(DataLoader):
    """Shuffles, and seeds its workers, by a generator of its own."""

    def __init__(self, rows, **given):
        super().__init__(rows, generator=torch.Generator().manual_seed(7), **given)


OFTEN = [(False, DataLoader, 2), (False, WithGenerator, 6), (True, Named, 4)]


def with_loaders(base, prepared, kind=DataLoader, cached_eval=False, **given):
    class OwnLoaders(base):
        def get_train_dataloader(self):
            return self.keep(kind(self.train_dataset, batch_size=2, shuffle=True, **self.own, **given))

        def get_eval_dataloader(self, eval_dataset=None):
            if not cached_eval:
                return super().get_eval_dataloader(eval_dataset)
            if not hasattr(self, "kept_eval"):
                self.kept_eval = self.keep(kind(self.eval_dataset, batch_size=2, **self.own, **given))
            return self.kept_eval

        @property
        def own(self):
            return {"collate_fn": self.data_collator}

        def keep(self, loader):
            made = self.accelerator.prepare(loader) if prepared else loader
            self.__dict__.setdefault("own_loaders", []).append(made)
            return made

    return OwnLoaders


NIGHTLY = [
    pytest.param(prepared, kind, step, marks=pytest.mark.nightly)
    for prepared, kind, step in itertools.product((True, False), (DataLoader, Named, WithGenerator), STEPS)
    if (prepared, kind, step) not in OFTEN
]


@pytest.mark.nightly
@pytest.mark.parametrize(("prepared", "kind", "step"), [*OFTEN, *NIGHTLY])
def test_own_persistent_workers_train_as_in_stock_trainer_and_continue_exactly(tmp_path, prepared, kind, step):
    given = {"prepared": prepared, "kind": kind, **LIVING}
    ours = with_loaders(FastTrainer, **given)
    whole = train(tmp_path / "whole", ours, **PLAIN)
    if step == STEPS[0]:
        assert same(whole, train(tmp_path / "stock", with_loaders(Trainer, **given), **PLAIN), ("loss", "grad_norm"))
    assert same(interrupt(tmp_path / "killed", ours, step, **PLAIN), whole)


@pytest.mark.nightly
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "not prepared"])
def test_an_own_evaluation_loader_that_is_kept_continues_exactly(tmp_path, prepared):
    ours = with_loaders(FastTrainer, prepared, cached_eval=True, **LIVING)
    whole = train(tmp_path / "whole", ours, **PLAIN, **EVALUATING)
    assert same(interrupt(tmp_path / "killed", ours, 4, **PLAIN, **EVALUATING), whole)


def test_a_loader_that_cannot_be_continued_exactly_is_named(tmp_path, caplog):
    class Iterating(DataLoader):
        def __iter__(self):
            return super().__iter__()

    train(tmp_path, with_loaders(FastTrainer, False, Iterating, **LIVING), **PLAIN, max_steps=1)
    assert "Iterating has an __iter__ of its own and persistent workers" in caplog.text

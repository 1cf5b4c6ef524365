"""Persistent workers, evaluations and continuing: dropout is that of the uninterrupted run, and stock Trainer's."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from continued_runs import EVALUATING, interrupt, same, train
from datasets import Dataset
from token_rows import make_number_rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from train_until_stopped import Collator
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast, Trainer, TrainerCallback

from hf_ext.data.repeatable_loaders import make_repeatable
from hf_ext.trainer import FastTrainer


class Drawing(Collator):
    """Adds noise to the labels, from the generators of torch, NumPy and Python."""

    def __call__(self, rows):
        batch = super().__call__(rows)
        noise = torch.rand(len(rows)) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return {**batch, "labels": batch["labels"] + noise}


@pytest.mark.nightly
@pytest.mark.parametrize("evaluating", [{}, EVALUATING], ids=["training", "evaluating"])
def test_with_persistent_workers_and_nothing_of_ours_it_trains_as_stock_trainer_and_continues_exactly(
    tmp_path, evaluating
):
    whole = train(tmp_path / "whole", **evaluating)
    assert same(whole, train(tmp_path / "stock", Trainer, **evaluating), ("loss", "grad_norm"))
    assert same(interrupt(tmp_path / "killed", **evaluating), whole)


@pytest.mark.nightly
def test_persistent_workers_of_the_plan_change_nothing(tmp_path):
    asked = {**EVALUATING, "speedups": ["data_loading"]}
    alone = train(tmp_path / "alone", **EVALUATING, dataloader_num_workers=0, dataloader_persistent_workers=False)
    assert same(train(tmp_path / "workers", **asked), alone)
    assert same(interrupt(tmp_path / "killed", **asked), alone)


@pytest.mark.nightly
def test_the_comparison_sees_a_loader_that_draws_as_torch_does(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_ext.training.repeatable_loading.make_repeatable", lambda loader, *_: loader)
    whole = train(tmp_path / "whole", **EVALUATING)
    assert not same(interrupt(tmp_path / "killed", **EVALUATING), whole)


def test_what_a_collator_draws_in_workers_depends_on_seed_epoch_and_batch_alone(tmp_path):
    asked = {**EVALUATING, "speedups": ["data_loading"], "collator": Drawing}
    whole = train(tmp_path / "whole", **asked)
    assert same(interrupt(tmp_path / "killed", **asked, dataloader_num_workers=2), whole)
    passing = {**asked, "dataloader_persistent_workers": False}
    assert same(interrupt(tmp_path / "passing", **passing), whole)
    assert not same(train(tmp_path / "other", **asked, seed=4), whole)


class OwnGenerators(Collator):
    """Adds noise to the labels, from generators of its own."""

    def __init__(self, case):
        super().__init__(case)
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.python, self.legacy = random.Random(1), np.random.RandomState(1)

    def __call__(self, rows):
        batch = super().__call__(rows)
        noise = torch.rand(len(rows), generator=self.torch) + self.numpy.random()
        return {**batch, "labels": batch["labels"] + noise + self.python.random() + self.legacy.rand()}


class Masking(DataCollatorForLanguageModeling):
    """Of transformers, whose masks come from a generator that it makes itself; the labels stay those of the rows."""

    def __init__(self, case):
        vocabulary = {word: number for number, word in enumerate(["<pad>", "<mask>", *map(str, range(2, 24))])}
        words = Tokenizer(WordLevel(vocabulary, unk_token="<mask>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", mask_token="<mask>")
        super().__init__(tokenizer, mlm_probability=0.5, seed=42)

    def torch_call(self, examples):
        batch = super().torch_call([{"input_ids": row["input_ids"]} for row in examples])
        return {**batch, "labels": torch.tensor([row["labels"] for row in examples])}


def masking_used_before(case):
    """As speed-ups, `find_batch_size` and users use one in the main process: its generator is then made there."""
    collator = Masking(case)
    collator(list(make_number_rows(2, 1)))
    return collator


class Noisy:
    """Rows with noise from a generator of the data set."""

    def __init__(self, rows):
        self.rows, self.generator = rows, torch.Generator().manual_seed(1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {**row, "labels": row["labels"] + float(torch.rand((), generator=self.generator))}


@pytest.mark.nightly
@pytest.mark.parametrize("collator", [OwnGenerators, lambda case: partial(OwnGenerators(case))])
def test_what_a_collators_own_generators_draw_in_workers_depends_on_seed_epoch_and_batch_alone(tmp_path, collator):
    asked = {"dataloader_num_workers": 2, "dataloader_persistent_workers": False, "collator": collator}
    assert same(interrupt(tmp_path / "killed", **asked, step=6), train(tmp_path / "whole", **asked))


def test_masks_of_transformers_collator_continue_exactly_with_any_number_of_workers(tmp_path):
    asked = {"dataloader_num_workers": 2, "dataloader_persistent_workers": False, "collator": masking_used_before}
    whole = train(tmp_path / "whole", **asked)
    assert same(interrupt(tmp_path / "killed", **asked), whole)
    assert same(train(tmp_path / "one", **asked | {"dataloader_num_workers": 1}), whole)
    assert same(train(tmp_path / "fresh", **asked | {"collator": Masking}), whole)
    assert not same(train(tmp_path / "plain", **asked | {"collator": Collator}), whole)


@pytest.mark.nightly
def test_what_a_data_sets_own_generator_draws_in_workers_depends_on_seed_epoch_and_batch_alone(tmp_path):
    asked = {"dataloader_num_workers": 2, "dataloader_persistent_workers": False, "rows": Noisy}
    assert same(interrupt(tmp_path / "killed", **asked), train(tmp_path / "whole", **asked))


class Validating(TrainerCallback):
    """Evaluates after some steps, under a name of its own."""

    def __init__(self, first):
        self.first = first

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.first:
            self.trainer.evaluate(metric_key_prefix="valid")


class Calling(FastTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Validating):
                callback.trainer = self


@pytest.mark.nightly
@pytest.mark.parametrize("first", [1, 4], ids=["before the checkpoint", "after it"])
def test_an_evaluation_of_another_name_takes_its_number_once(tmp_path, first):
    asked = {"trainer": Calling, "callbacks": [Validating(first)], "held_out": True}
    whole = train(tmp_path / "whole", **asked)
    assert same(interrupt(tmp_path / "killed", **asked), whole)


@pytest.mark.nightly
def test_an_evaluation_set_that_is_used_after_the_resume_alone_takes_its_number(tmp_path):
    class Later(Calling):
        def evaluate(self, eval_dataset=None, *args, **kwargs):
            if isinstance(self.eval_dataset, Dataset):
                self.eval_dataset = {"early": self.eval_dataset, "late": make_number_rows(4, 3)}
            return super().evaluate("late" if self.state.global_step > 3 else "early", *args, **kwargs)

    asked = {"trainer": Later, "callbacks": [Validating(1)], "held_out": True}
    whole = train(tmp_path / "whole", **asked)
    assert same(interrupt(tmp_path / "killed", **asked), whole)


@pytest.mark.nightly
def test_the_evaluation_on_start_is_not_repeated_when_a_run_is_continued(tmp_path):
    asked = {**EVALUATING, "eval_on_start": True}
    whole = train(tmp_path / "whole", **asked)
    resumed = interrupt(tmp_path / "killed", **asked)
    evaluated = [[e["step"] for e in run.state.log_history if "eval_loss" in e] for run in (whole, resumed)]
    assert evaluated == [[0, 2, 4, 6, 8]] * 2
    assert same(resumed, whole)


def numbers_taken(loader, passes):
    """How many of its next numbers torch's generator has given away after some passes over a loader."""
    torch.manual_seed(5)
    expected = [torch.get_rng_state()]
    for _ in range(passes + 1):
        torch.empty((), dtype=torch.int64).random_()
        expected.append(torch.get_rng_state())
    torch.manual_seed(5)
    for _ in range(passes):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    return next(i for i, state in enumerate(expected) if torch.equal(state, torch.get_rng_state()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("given", "draws_once", "has_begun", "taken"),
    [
        ({}, False, False, 3),
        ({"num_workers": 1}, False, False, 3),
        ({"num_workers": 1, "persistent_workers": True}, False, False, 3),
        ({"num_workers": 1, "persistent_workers": True}, True, False, 1),
        ({"num_workers": 1, "persistent_workers": True}, True, True, 0),
    ],
)
def test_of_the_global_generator_each_pass_takes_one_number_or_the_first_alone(given, draws_once, has_begun, taken):
    loader = make_repeatable(DataLoader([0, 1, 2, 3], batch_size=2, **given), draws_once, has_begun)
    assert numbers_taken(loader, 3) == taken
    loader._iterator = None


def test_what_torch_itself_takes_depends_on_workers():
    loader = DataLoader([0, 1, 2, 3], batch_size=2, num_workers=1, persistent_workers=True)
    assert numbers_taken(loader, 3) == 1
    loader._iterator = None
    assert numbers_taken(DataLoader([0, 1, 2, 3], batch_size=2), 3) == 3


@pytest.mark.nightly
def test_a_continued_run_needs_the_checkpoint_it_began_with_no_more(tmp_path):
    asked = {"save_total_limit": 1, **EVALUATING}
    whole = train(tmp_path / "whole", **asked)
    assert same(interrupt(tmp_path / "killed", **asked), whole)
    assert [folder.name for folder in (tmp_path / "killed").glob("checkpoint-*")] == ["checkpoint-8"]

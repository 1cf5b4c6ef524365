"""Masks follow Trainer's epochs, with workers, on streams and after a resume; the control is transformers' own."""

import datasets
import numpy as np
import pytest
import torch
import transformers
from inside import MaskedLMArguments, build_masked_lm, build_masked_lm_collator, build_tokenizer, prepare_splits
from masked_lm_trainer import build_trainer
from transformers import DataCollatorForLanguageModeling

from hf_ext.data import STANDARD, DataArguments, mark_evaluation
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

TINY = MaskedLMArguments(model_size="demo")
NUM_ROWS = 12


@pytest.fixture(scope="module")
def rows() -> datasets.Dataset:
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 30, NUM_ROWS)
    return datasets.Dataset.from_dict({"sequence": ["".join(rng.choice(list(STANDARD), n)) for n in lengths]})


def make_parts(seed: int = 0):
    torch.manual_seed(0)
    model = build_masked_lm(TINY)
    return model, build_masked_lm_collator(build_tokenizer(TINY), model, TINY, DataArguments(), seed)


def make_args(folder, **given) -> FastTrainingArguments:
    settings = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
    }
    return FastTrainingArguments(output_dir=str(folder), **{**settings, **given})


def train_and_close(trainer, resume=None) -> None:
    """Trains, and ends workers that live on: left to garbage collection, each takes torch 5 s to end."""
    trainer.train(resume_from_checkpoint=resume)
    if isinstance(trainer, FastTrainer):
        trainer.end()
        return
    for loader in (trainer.callback_handler.train_dataloader, trainer.callback_handler.eval_dataloader):
        if loader is not None:
            loader.base_dataloader._iterator = None


def watch(model, training: bool = True) -> list[list[list[int]]]:
    """Fills, while `model` trains (or evaluates), with the rows of each batch: token ids without padding."""
    seen: list[list[list[int]]] = []

    def look(module, _, inputs):
        if module.training == training:
            lengths = inputs["attention_mask"].sum(1).tolist()
            seen.append([ids[:n].tolist() for ids, n in zip(inputs["input_ids"], lengths)])

    model.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def masked_for(epoch: int, rows) -> list[list[int]]:
    _, collator = make_parts()
    collator.set_epoch(epoch)
    batch = collator(list(rows))
    return sorted(ids[:n].tolist() for ids, n in zip(batch["input_ids"], batch["attention_mask"].sum(1).tolist()))


def batches_by_epoch(seen, per_epoch: int) -> list[list[list[int]]]:
    return [sorted(row for batch in seen[i : i + per_epoch] for row in batch) for i in range(0, len(seen), per_epoch)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("trainer_cls", [FastTrainer, transformers.Trainer])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epoch_sees_its_own_masks_and_every_evaluation_the_same(rows, tmp_path, num_workers, trainer_cls):
    model, collator = make_parts()
    trained, evaluated = watch(model), watch(model, training=False)
    args = make_args(
        tmp_path,
        num_train_epochs=3,
        dataloader_num_workers=num_workers,
        dataloader_persistent_workers=num_workers > 0,
        eval_strategy="steps",
        eval_steps=4,
    )
    splits = prepare_splits({"train": rows, "validation": rows}, args, collator.columns, stock=False)
    is_stock = trainer_cls is transformers.Trainer
    trainer = build_trainer(model, args, collator, splits, frozenset() if is_stock else None)
    assert type(trainer) is trainer_cls
    train_and_close(trainer)
    assert batches_by_epoch(trained, 3) == [masked_for(epoch, rows) for epoch in range(3)]
    assert len(evaluated) == 6  # after steps 4, 8 and the last, two batches each
    assert evaluated[:2] == evaluated[2:4] == evaluated[4:]


def test_without_the_callback_and_the_mark_masks_are_wrong(rows, tmp_path):
    model, collator = make_parts()
    trained, evaluated = watch(model), watch(model, training=False)
    args = make_args(tmp_path, num_train_epochs=3, remove_unused_columns=False)
    transformers.Trainer(model, args, collator, rows).train()
    assert batches_by_epoch(trained, 3) == [masked_for(0, rows)] * 3
    args = make_args(tmp_path, num_train_epochs=3, eval_strategy="steps", eval_steps=4)
    FastTrainer(model, args, collator, rows, rows).train()
    assert evaluated[:2] != evaluated[2:4]


@pytest.mark.parametrize("explicit", [None, frozenset()], ids=["fast", "stock"])
def test_a_streams_passes_are_epochs_too(rows, tmp_path, explicit):
    model, collator = make_parts()
    seen = watch(model)
    args = make_args(tmp_path, max_steps=9)  # 0.33 of them per pass, so `state.epoch` stays below 1
    splits = prepare_splits({"train": rows.to_iterable_dataset()}, args, collator.columns, stock=explicit is not None)
    build_trainer(model, args, collator, splits, explicit).train()
    assert batches_by_epoch(seen, 3) == [masked_for(epoch, rows) for epoch in range(3)]


def final_weights(folder, train_rows, collator=None, resume=None, **given) -> dict[str, torch.Tensor]:
    model, ours = make_parts()
    args = make_args(folder, max_steps=9, save_strategy="steps", save_steps=5, **given)
    trainer = FastTrainer(model, args, collator or ours, train_rows)
    train_and_close(trainer, resume)
    return model.state_dict()


def resumes_exactly(folder, train_rows, make_collator=lambda: None, **given) -> bool:
    """Whether a run of 3 passes of 3 steps, resumed in the middle of the second, ends in the same weights."""
    whole = final_weights(folder / "whole", train_rows, make_collator(), **given)
    checkpoint = str(folder / "whole" / "checkpoint-5")
    resumed = final_weights(folder / "resumed", train_rows, make_collator(), checkpoint, **given)
    return all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumed_in_mid_epoch_sees_the_masks_it_would_have_seen(rows, tmp_path, num_workers):
    loading = {"dataloader_num_workers": num_workers}
    assert resumes_exactly(tmp_path, rows, **loading)


def test_with_transformers_collator_a_resumed_run_ends_elsewhere(rows, tmp_path):
    tokenizer = build_tokenizer(TINY)
    tokens = rows.map(lambda row: {"input_ids": tokenizer(row["sequence"])["input_ids"]}, remove_columns="sequence")
    assert not resumes_exactly(tmp_path, tokens, lambda: DataCollatorForLanguageModeling(tokenizer))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_resumed_in_its_second_pass_goes_on_where_it_was(rows, tmp_path, num_workers):
    assert resumes_exactly(tmp_path, rows.to_iterable_dataset(), dataloader_num_workers=num_workers)


def test_stock_trainer_starts_a_stream_over_that_it_resumes_in_its_second_pass(rows, tmp_path):
    def batches(folder, resume=None):
        model, collator = make_parts()
        seen = watch(model)
        args = make_args(tmp_path / folder, max_steps=9, save_strategy="steps", save_steps=5)
        build_trainer(model, args, collator, {"train": rows.to_iterable_dataset()}, frozenset()).train(resume)
        return seen

    whole = batches("whole")
    left = batches("left", str(tmp_path / "whole" / "checkpoint-5"))
    assert left != whole[5:]  # when this fails, Trainer resumes streams after their first pass: drop our sampler


def trained_weights(rows, folder, explicit, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights after 6 steps without speed-ups: by the stock Trainer where `explicit` is a set."""
    model, collator = make_parts(seed)
    args = make_args(folder, max_steps=6)
    splits = prepare_splits({"train": rows}, args, collator.columns, stock=explicit is not None)
    build_trainer(model, args, collator, splits, explicit).train()
    return model.state_dict()


def test_without_speedups_both_trainers_learn_the_same(rows, tmp_path):
    stock = trained_weights(rows, tmp_path / "stock", frozenset({"speedups"}))
    fast = trained_weights(rows, tmp_path / "fast", None)
    other = trained_weights(rows, tmp_path / "other", None, seed=1)  # other masks
    assert all(torch.allclose(fast[name], stock[name], atol=1e-5) for name in stock)
    assert not all(torch.allclose(other[name], stock[name], atol=1e-5) for name in stock)


def test_the_stock_trainer_groups_by_length(rows, tmp_path):
    model, collator = make_parts()
    args = make_args(
        tmp_path, max_steps=3, train_sampling_strategy="group_by_length", eval_strategy="steps", eval_steps=3
    )
    splits = prepare_splits({"train": rows, "validation": rows}, args, collator.columns, stock=True)
    assert splits["train"]["length"][:] == [len(sequence) for sequence in rows["sequence"][:]]
    seen = watch(model)
    build_trainer(model, args, collator, splits, frozenset()).train()
    assert batches_by_epoch(seen, 3) == [masked_for(0, rows)]


def test_every_trainable_weight_gets_a_gradient(rows):
    model, collator = make_parts()
    model(**collator(list(rows))).loss.backward()
    without = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    assert without == []  # DDP stops at one
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen == ["esm.contact_head.regression.weight", "esm.contact_head.regression.bias"]


def test_evaluation_rows_are_marked_once_for_every_split_but_train(rows, tmp_path):
    splits = prepare_splits({"train": rows, "validation": rows, "test": rows}, make_args(tmp_path), {}, stock=False)
    assert "mask_epoch" not in splits["train"].column_names
    assert splits["validation"][0] == splits["test"][0] == mark_evaluation(rows)[0]

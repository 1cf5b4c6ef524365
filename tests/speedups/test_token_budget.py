"""Token budgets in the plan and in FastTrainer: applied, refused, less padding, exact resume."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from miniature_esm import NO_DROPOUT, make_esm
from run_outcomes import same_weights
from token_rows import RecordingCollator
from transformers import EsmForTokenClassification

from hf_ext.errors import DataError, PlanRefused
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 3}


def make_rows(num: int = 40) -> Dataset:
    """Rows of 3 to 30 tokens with a label per token."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 31, (num,), generator=generator).tolist()
    ids = [torch.randint(4, 24, (size,), generator=generator).tolist() for size in sizes]
    labels = [torch.randint(0, 3, (size,), generator=generator).tolist() for size in sizes]
    return Dataset.from_dict({"row": list(range(num)), "input_ids": ids, "labels": labels, "length": sizes})


@pytest.fixture
def token_trainer(tmp_path):
    def make(folder="run", rows=None, **given):
        tokens = {"vocab_size": 24, "mask_token_id": 23, "num_labels": 3}
        model = make_esm(EsmForTokenClassification, **tokens, **NO_DROPOUT)
        settings = {"max_tokens_per_batch": 100, "num_train_epochs": 3, "learning_rate": 1e-2, **given}
        args = FastTrainingArguments(
            output_dir=str(tmp_path / folder), remove_unused_columns=False, **{**QUIET, **settings}
        )
        return FastTrainer(model, args, RecordingCollator(), make_rows() if rows is None else rows)

    return make


def test_training_sees_every_row_once_an_epoch_within_the_budget_and_says_how_full_it_was(token_trainer):
    trainer = token_trainer()
    trainer.train()
    evidence = json.loads((Path(trainer.args.output_dir) / "plan.json").read_text())["decisions"]
    (evidence,) = [d["evidence"] for d in evidence if d["name"] == "token_budget"]
    per_epoch = evidence["batches_per_epoch"]
    assert trainer.state.max_steps == 3 * per_epoch == len(trainer.data_collator.batches)
    lengths = trainer.train_dataset["length"][:]
    for epoch in range(3):
        batches = trainer.data_collator.batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for batch in batches for row in batch) == list(range(40))
        assert max(len(batch) * max(lengths[row] for row in batch) for batch in batches) <= 100
    assert 0.8 < evidence["real_tokens"] <= 1


def test_a_run_that_is_resumed_in_its_third_epoch_goes_on_with_the_very_batches_that_were_left(token_trainer):
    saving = {"save_strategy": "steps"}
    per_epoch = len(token_trainer("count").get_train_dataloader())
    step = 2 * per_epoch + 3
    whole = token_trainer("whole", **saving, save_steps=step)
    whole.train()
    checkpoint = str(Path(whole.args.output_dir) / f"checkpoint-{step}")
    resumed = token_trainer("resumed", **saving, save_steps=step)
    resumed.train(resume_from_checkpoint=checkpoint)
    seen = whole.data_collator.batches
    assert resumed.data_collator.batches == seen[step:]
    assert seen[step:] != seen[3:per_epoch]  # the first epoch's batches would be other ones
    assert same_weights(resumed.model, whole.model)


def test_a_row_above_the_budget_stops_the_run_before_its_first_step(token_trainer):
    with pytest.raises(DataError, match=r"Row \d+ has \d+ tokens.*max_tokens_per_batch is 20"):
        token_trainer(max_tokens_per_batch=20).train()
    with pytest.raises(PlanRefused, match="token_budget"):
        token_trainer(rows=make_rows().remove_columns("length"), train_sampling_strategy="group_by_length")


@pytest.mark.parametrize("speedups", [[], ["embedding_cache"]], ids=["live", "cached"])
def test_towers_train_on_budgets_of_the_residues_that_are_encoded(make_affinity, demo_rows, tmp_path, speedups):
    model, collator = make_affinity("frozen", "lora")
    args = FastTrainingArguments(
        output_dir=str(tmp_path), max_tokens_per_batch=1000, speedups=speedups, max_steps=2, logging_steps=1, **QUIET,
        embedding_cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    trainer = FastTrainer(model, args, collator, demo_rows)
    batches = list(trainer.get_train_dataloader())
    padded = [sum(tokens["input_ids"].numel() for tokens in batch["sequences"].values()) for batch in batches]
    assert max(padded) <= 1000
    assert sum(len(batch["labels"]) for batch in batches) == 200
    assert sorted(batches[0]["sequences"]) == (["antigen"] if speedups else ["antigen", "heavy", "light"])
    trainer.train()
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 2

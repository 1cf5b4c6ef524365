"""A model that reads what the attention mask leaves out keeps its padded encoder: packed, those positions are empty."""

import random
import re

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import EsmConfig, EsmForMaskedLM, EsmModel, EsmPreTrainedModel, Trainer, TrainingArguments

from hf_ext.errors import PlanRefused
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "token_dropout": False}
CONFIG = EsmConfig(
    **{"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    **{"pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    **NO_DROPOUT,
)


class Pooling(EsmPreTrainedModel):
    """A regression on the mean of states: of all positions, as people write it, or of those in the mask."""

    reads_padding = True

    def __init__(self, config):
        super().__init__(config)
        self.esm = EsmModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        states = self.esm(input_ids, attention_mask).last_hidden_state
        weights = torch.ones_like(attention_mask) if self.reads_padding else attention_mask
        predicted = self.head((states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True))[:, 0]
        return {"loss": ((predicted - labels) ** 2).mean(), "logits": predicted}


class MaskedPooling(Pooling):
    reads_padding = False


def make_rows() -> Dataset:
    draw = random.Random(0)
    ids = [[0, *(draw.randint(4, 23) for _ in range(length)), 2] for length in (3, 40, 9, 25, 60, 4, 17, 30)]
    return Dataset.from_list([{"input_ids": row, "value": float(len(row) % 7)} for row in ids])


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [1] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 1).long()}


def pooled(rows):
    return {**pad(rows), "labels": torch.tensor([row["value"] for row in rows])}


def masked_in_the_mask(rows):
    """The third token of each row is hidden by the attention mask, and is what is to be found."""
    batch = pad(rows)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 2] = batch["input_ids"][:, 2]
    batch["attention_mask"][:, 2] = 0
    return {**batch, "labels": labels}


def train(folder, cls, args_cls, model_cls, collator, **given):
    torch.manual_seed(0)
    fixed = {"use_cpu": True, "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "seed": 1}
    fixed |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
    args = args_cls(output_dir=str(folder), **fixed, **given)
    trainer = cls(model_cls(CONFIG), args, train_dataset=make_rows(), data_collator=collator)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer


@pytest.mark.parametrize(
    ("model", "collator", "reason"),
    [
        (Pooling, pooled, r"the loss reads positions that attention_mask leaves out .*: states differ by"),
        (EsmForMaskedLM, masked_in_the_mask, "labels stand at positions that attention_mask leaves out"),
    ],
)
def test_such_a_run_is_stock_trainers_and_says_why(tmp_path, model, collator, reason):
    stock, _ = train(tmp_path / "stock", Trainer, TrainingArguments, model, collator)
    given = {"speedups": ["all"], "without": ["precision", "compile"]}
    ours, trainer = train(tmp_path / "ours", FastTrainer, FastTrainingArguments, model, collator, **given)
    assert ours == pytest.approx(stock, rel=1e-6)
    decisions = trainer.plan["attention"], trainer.plan["packing"]
    assert [decision.status for decision in decisions] == ["skipped", "skipped"]
    assert re.search(reason, decisions[0].reason), decisions[0].reason
    trainer.end()


def test_asked_for_by_name_it_is_refused(tmp_path):
    given = {"attention": "blocked", "speedups": ["packing"]}
    with pytest.raises(PlanRefused, match="labels stand at positions that attention_mask leaves out"):
        train(tmp_path, FastTrainer, FastTrainingArguments, EsmForMaskedLM, masked_in_the_mask, **given)


def test_a_mean_of_what_the_mask_holds_is_packed(tmp_path):
    stock, _ = train(tmp_path / "stock", Trainer, TrainingArguments, MaskedPooling, pooled)
    given = {"speedups": ["all"], "without": ["precision", "compile"]}
    ours, trainer = train(tmp_path / "ours", FastTrainer, FastTrainingArguments, MaskedPooling, pooled, **given)
    assert trainer.plan["packing"].status == "applied"
    assert ours == pytest.approx(stock, rel=1e-4)
    trainer.end()

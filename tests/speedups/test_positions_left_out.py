"""A model that reads what the attention mask leaves out keeps its padded encoder: packed, those positions are empty."""

import random
import re
from functools import partial

import pytest
import torch
from datasets import Dataset
from locations import HELPERS
from ranks import run_on_ranks
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


def make_rows(num=12) -> Dataset:
    """Of 22 tokens, but for the last two of every four, which are shorter; nothing to see in the first and the last."""
    draw = random.Random(0)
    lengths = [20 if i % 4 < 2 or i == num - 1 else 5 + i for i in range(num)]
    ids = [[0, *(draw.randint(4, 23) for _ in range(length)), 2] for length in lengths]
    return Dataset.from_list([{"input_ids": row, "value": float(i % 7), "place": i} for i, row in enumerate(ids)])


def tokens(rows, reads_padding):
    """Every third token is to be found; where `reads_padding`, what pads labels is a label itself."""
    batch = pad(rows)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, ::3] = batch["input_ids"][:, ::3]
    if not reads_padding:
        labels[batch["attention_mask"] == 0] = -100
    return {**batch, "labels": labels}


class PenalisedTrainer(FastTrainer):
    """A term on what the model puts out at the last position, of a row or of padding, from the second epoch on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs)
        reads = self.state.epoch >= 1
        loss = output["loss"] + (0.01 * output["logits"][:, -1].pow(2).mean() if reads else 0.0)
        return (loss, output) if return_outputs else loss


class PenalisesStates(FastTrainer):
    """Its loss has a term on all states of the encoder; at zeros it has no gradient."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        states = model.esm(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        loss = model(**inputs)["loss"] + states.pow(2).mean()
        return (loss, {}) if return_outputs else loss


PACKED = {"speedups": ["packing"], "attention": "blocked"}
ALL = {"speedups": ["all"], "without": ["precision", "compile"]}


def train(folder, model_cls, collator, cls=FastTrainer, args_cls=FastTrainingArguments, resume=None, **given):
    torch.manual_seed(0)
    fixed = {"use_cpu": True, "num_train_epochs": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "seed": 1}
    fixed |= {"report_to": "none", "save_steps": 1, "disable_tqdm": True, "remove_unused_columns": False}
    args = args_cls(output_dir=str(folder), **fixed, **given)
    trainer = cls(model_cls(CONFIG), args, train_dataset=make_rows(), data_collator=collator)
    trainer.train(resume_from_checkpoint=resume)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer


SAID = r"packing: the loss of step \d reads positions that the attention mask leaves out .* weights were not touched"


@pytest.mark.parametrize(("model", "collator"), [(Pooling, pooled), (EsmForMaskedLM, masked_in_the_mask)])
def test_such_a_run_is_stock_trainers_and_says_why(tmp_path, model, collator):
    stock, _ = train(tmp_path / "stock", model, collator, Trainer, TrainingArguments)
    ours, trainer = train(tmp_path / "ours", model, collator, **ALL)
    assert ours == pytest.approx(stock, rel=1e-6)
    assert [trainer.plan[name].status for name in ("attention", "packing")] == ["skipped", "skipped"]
    assert "the loss reads positions that attention_mask leaves out" in trainer.plan["attention"].reason
    trainer.end()
    with pytest.raises(PlanRefused, match="the loss reads positions that attention_mask leaves out"):
        train(tmp_path / "named", model, collator, **PACKED)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model", "collator", "cls"),
    [
        (EsmForMaskedLM, partial(tokens, reads_padding=True), FastTrainer),
        (EsmForMaskedLM, partial(tokens, reads_padding=False), PenalisedTrainer),
        (Pooling, pooled, FastTrainer),
        (MaskedPooling, pooled, PenalisesStates),
    ],
    ids=["labels on padding", "a loss of one's own, later", "mean", "a penalty"],
)
def test_training_ends_before_the_step_in_which_it_shows(tmp_path, monkeypatch, model, collator, cls):
    monkeypatch.setattr("hf_ext.speedups.parity._sample_around", lambda *given: [])  # where no sample could show it
    with pytest.raises(PlanRefused, match=SAID):
        train(tmp_path, model, collator, cls, **PACKED, gradient_accumulation_steps=3)


def test_steps_before_it_are_right_and_go_on_without_packing(tmp_path):
    collator = partial(tokens, reads_padding=False)
    stock, other = train(tmp_path / "stock", EsmForMaskedLM, collator, PenalisedTrainer)
    with pytest.raises(PlanRefused, match=r"step 4 reads .*checkpoint-3"):
        train(tmp_path / "ours", EsmForMaskedLM, collator, PenalisedTrainer, **PACKED)
    found, trainer = train(tmp_path / "ours", EsmForMaskedLM, collator, PenalisedTrainer, resume="auto")
    assert found == pytest.approx(stock, rel=1e-5)
    assert trainer.state.global_step == other.state.global_step == 6


@pytest.mark.nightly
def test_what_one_process_sees_ends_all(tmp_path):
    run_on_ranks(HELPERS / "padding_on_ranks.py", tmp_path)
    for rank in range(2):
        assert re.match(SAID, (tmp_path / f"said_{rank}").read_text())


def test_what_reads_no_padding_trains_as_ever(tmp_path):
    stock, _ = train(tmp_path / "stock", MaskedPooling, pooled, Trainer, TrainingArguments)
    ours, trainer = train(tmp_path / "ours", MaskedPooling, pooled, **PACKED)
    assert trainer.plan["packing"].status == "applied"
    assert ours == pytest.approx(stock, rel=1e-5)
    trainer.end()

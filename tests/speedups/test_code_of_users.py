"""What users put in the place of transformers' code, and trainers side by side, train as in stock Trainer."""

import gc
import random

import pytest
import torch
from datasets import Dataset
from inside import VARIABLES
from tiny_encoders import tiny_esm, tiny_esmc
from tiny_masked_lm import make_trainer
from torch import nn
from torch.nn import functional
from transformers import (
    EsmConfig,
    EsmForMaskedLM,
    EsmModel,
    EsmPreTrainedModel,
    EsmTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.esm.modeling_esm import EsmIntermediate

from hf_ext.data import MaskedLMCollator, ResidueTokenizer
from hf_ext.errors import PlanRefused
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

FAST = {"speedups": ["all"], "without": ["precision", "compile", "length_grouping"]}


@pytest.fixture(scope="module")
def make_collator(demo_encoders):
    tokenizer = EsmTokenizer.from_pretrained(demo_encoders[1])
    return lambda cls=MaskedLMCollator: cls(ResidueTokenizer(tokenizer), mlm_probability=0.3)


def make_rows() -> Dataset:
    draw = random.Random(0)
    return Dataset.from_list(
        [
            {"sequence": "".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=k))}
            for k in (3, 30, 9, 25, 36, 4, 17, 30, 6, 21, 36, 12)
        ]
    )


def train(folder, cls, args_cls, model, collator, **given):
    fixed = {"use_cpu": True, "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "seed": 1}
    fixed |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
    args = args_cls(output_dir=str(folder), learning_rate=1e-3, **fixed, **given)
    trainer = cls(model, args, train_dataset=make_rows(), data_collator=collator)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer


def train_both(tmp_path, make_model, make_collator, mixin=object, **given):
    """Losses of stock Trainer, and of ours with the trainer; both with the methods of `mixin`."""
    stock = type("Stock", (mixin, Trainer), {}) if mixin is not object else Trainer
    fast = type("Fast", (mixin, FastTrainer), {}) if mixin is not object else FastTrainer
    expected, _ = train(tmp_path / "stock", stock, TrainingArguments, make_model(), make_collator())
    found, trainer = train(tmp_path / "fast", fast, FastTrainingArguments, make_model(), make_collator(), **given)
    return expected, found, trainer


def status(trainer, *names):
    return [trainer.plan[name].status for name in names]


def focal(logits, labels, vocab_size=None, num_items_in_batch=None, **kwargs):
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    counted = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    return ((1 - torch.exp(-losses)) ** 2 * losses).sum() / counted


def penalised(model, *args, **kwargs):
    """The forward of a masked language model, with a term on its logits."""
    output = EsmForMaskedLM.forward(model, *args, **kwargs)
    if output.loss is not None:
        output.loss = output.loss + output.logits.pow(2).mean()
    return output


class Renamed(EsmForMaskedLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return penalised(self, input_ids, attention_mask, labels=labels, **kwargs)


SameName = type("EsmForMaskedLM", (Renamed,), {})


def with_loss_function():
    model = tiny_esmc()
    model.loss_function = focal
    return model


def wrapped_forward():
    """As decorators leave it: a function that says what it wraps."""
    model = tiny_esm()
    forward = model.forward

    def doubled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.loss = output.loss and 2 * output.loss
        return output

    doubled.__wrapped__ = forward
    model.forward = doubled
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make_model", [with_loss_function, wrapped_forward, lambda: tiny_esm(SameName)])
def test_the_loss_of_the_users_own_is_what_trains(tmp_path, make_collator, make_model):
    expected, found, trainer = train_both(tmp_path, make_model, make_collator, **FAST)
    assert found == pytest.approx(expected, rel=1e-5)
    assert status(trainer, "masked_lm_head") == ["skipped"]
    mine = vars(trainer.model).get("forward")
    trainer.end()
    assert vars(trainer.model).get("forward") == mine


def cut(batch):
    """Hides the second half of every row."""
    mask = batch["attention_mask"]
    hidden = torch.arange(mask.shape[1])[None] >= mask.sum(1, keepdim=True) // 2 + 1
    changed = {"attention_mask": mask.masked_fill(hidden, 0), "labels": batch["labels"].masked_fill(hidden, -100)}
    return {**batch, **changed}


class CutInLoss:
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, cut(inputs), *args, **kwargs)


class CutInLoader:
    def get_train_dataloader(self):
        return [cut(batch) for batch in super().get_train_dataloader()]


@pytest.mark.parametrize("mixin", [CutInLoss, CutInLoader])
def test_so_is_a_trainer_that_does(tmp_path, make_collator, mixin):
    whole, _ = train(tmp_path / "whole", Trainer, TrainingArguments, tiny_esm(), make_collator())
    expected, found, trainer = train_both(tmp_path, tiny_esm, make_collator, mixin, **FAST)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found != pytest.approx(whole, rel=1e-3)
    assert status(trainer, "packing") == ["applied"]
    trainer.end()


class ReadsScores:
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs, output_attentions=True)
        peaks = [scores.max(-1).values.mean() for scores in outputs.attentions]
        loss = outputs.loss + 0.1 * torch.stack(peaks).sum()
        return (loss, outputs) if return_outputs else loss


def eager(make_model):
    model = make_model()
    model.set_attn_implementation("eager")
    return model


def test_a_loss_that_reads_attentions_gets_them(tmp_path, make_collator):
    expected, found, trainer = train_both(tmp_path, lambda: eager(tiny_esm), make_collator, ReadsScores, **FAST)
    assert found == pytest.approx(expected, rel=1e-5)
    assert "scores of the model's eager attention may be read" in trainer.plan["attention"].reason
    trainer.end()


class Relu(EsmIntermediate):
    def forward(self, hidden_states):
        return torch.relu(self.dense(hidden_states))


class HalvedInTraining(EsmModel):
    """Which no comparison in evaluation mode finds."""

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        states = self.embeddings(input_ids=input_ids, attention_mask=attention_mask)
        factor = 0.5 if self.training else 1.0
        return super().forward(inputs_embeds=states * factor, attention_mask=attention_mask, **kwargs)


def of_class(part, cls):
    def make():
        model = tiny_esm()
        for module in [m for m in model.modules() if type(m) is part]:
            module.__class__ = cls
        return model

    return make


@pytest.mark.parametrize(
    ("make_model", "name"),
    [(of_class(EsmIntermediate, Relu), "fused_gelu"), (of_class(EsmModel, HalvedInTraining), "packing")],
    ids=["feed-forward", "encoder"],
)
def test_layers_of_the_users_own_stay(tmp_path, make_collator, make_model, name):
    plain, _ = train(tmp_path / "plain", Trainer, TrainingArguments, tiny_esm(), make_collator())
    expected, found, trainer = train_both(tmp_path, make_model, make_collator, **FAST)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found != pytest.approx(plain, rel=1e-4)
    assert trainer.plan[name].status == "skipped"
    assert "the forward of such modules here is not that of transformers" in trainer.plan[name].reason
    trainer.end()
    mine = [m for m in make_model().modules() if "forward" in vars(m)]
    assert len([m for m in trainer.model.modules() if "forward" in vars(m)]) == len(mine)


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


def make_padded_rows(num: int) -> Dataset:
    """Of 22 tokens, but for the last two of every four, which are shorter; nothing to see in the first and the last."""
    draw = random.Random(0)
    lengths = [20 if i % 4 < 2 or i == num - 1 else 5 + i for i in range(num)]
    ids = [[0, *(draw.randint(4, 23) for _ in range(length)), 2] for length in lengths]
    return Dataset.from_list([{"input_ids": row, "value": float(i % 7), "place": i} for i, row in enumerate(ids)])


def labels_on_padding(rows):
    """Every third token is to be found, of padding too."""
    batch = pad(rows)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, ::3] = batch["input_ids"][:, ::3]
    return {**batch, "labels": labels}


PACKED = {"speedups": ["packing"], "attention": "blocked"}
ALL = {"speedups": ["all"], "without": ["precision", "compile"]}


def train_pooling(folder, model_cls, collator, cls=FastTrainer, args_cls=FastTrainingArguments, num_rows=12, **given):
    torch.manual_seed(0)
    fixed = {"use_cpu": True, "num_train_epochs": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "seed": 1}
    fixed |= {"report_to": "none", "save_steps": 1, "disable_tqdm": True, "remove_unused_columns": False}
    args = args_cls(output_dir=str(folder), **fixed, **given)
    trainer = cls(model_cls(CONFIG), args, train_dataset=make_padded_rows(num_rows), data_collator=collator)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer


SAID = r"packing: the loss of step \d reads positions that the attention mask leaves out .* weights were not touched"


@pytest.mark.parametrize(("model", "collator"), [(Pooling, pooled), (EsmForMaskedLM, masked_in_the_mask)])
def test_such_a_run_is_stock_trainers_and_says_why(tmp_path, model, collator):
    stock, _ = train_pooling(tmp_path / "stock", model, collator, Trainer, TrainingArguments)
    ours, trainer = train_pooling(tmp_path / "ours", model, collator, **ALL)
    assert ours == pytest.approx(stock, rel=1e-6)
    assert [trainer.plan[name].status for name in ("attention", "packing")] == ["skipped", "skipped"]
    assert "the loss reads positions that attention_mask leaves out" in trainer.plan["attention"].reason
    trainer.end()
    with pytest.raises(PlanRefused, match="the loss reads positions that attention_mask leaves out"):
        train_pooling(tmp_path / "named", model, collator, **PACKED)


@pytest.mark.parametrize(("model", "collator"), [(EsmForMaskedLM, labels_on_padding), (Pooling, pooled)])
def test_training_ends_before_the_step_in_which_it_shows(tmp_path, model, collator):
    with pytest.raises(PlanRefused, match=SAID):
        # Of 13 rows the sample has the first of every four, which are of one length: it cannot show it.
        train_pooling(tmp_path, model, collator, num_rows=13, **PACKED, gradient_accumulation_steps=3)


def test_what_reads_no_padding_trains_as_ever(tmp_path):
    stock, _ = train_pooling(tmp_path / "stock", MaskedPooling, pooled, Trainer, TrainingArguments)
    ours, trainer = train_pooling(tmp_path / "ours", MaskedPooling, pooled, **PACKED)
    assert trainer.plan["packing"].status == "applied"
    assert ours == pytest.approx(stock, rel=1e-5)
    trainer.end()


@pytest.fixture
def process(torch_settings, monkeypatch):
    """What runs set here for the process: two threads, and oneDNN's products, whatever they are worth."""
    gc.collect()  # trainers of tests before
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hf_ext.plan.count_cpu_cores", lambda: 2)
    monkeypatch.setattr("hf_ext.speedups.precision.MAX_ERROR", 1.0)
    monkeypatch.setattr("hf_ext.speedups.precision.is_amd_cpu", lambda: True)
    return lambda: (torch.get_num_threads(), torch_settings()["matmul"].on_cpu)


def make_run(folder, **given):
    return make_trainer(folder, speedups=["cpu_threads", "cpu_matmul"], **given)


@pytest.mark.parametrize(("first_out", "way"), [(0, "end"), (1, "close")])
def test_two_trainers_may_end_in_any_order(process, tmp_path, first_out, way):
    before = process()
    trainers = [make_run(tmp_path / name) for name in "ab"]
    assert process() == (2, "bf16") != before
    assert [trainer.plan["cpu_matmul"].status for trainer in trainers] == ["applied"] * 2
    getattr(trainers.pop(first_out), way)()
    assert process() == (2, "bf16")
    trainers[0].train()
    trainers[0].end()
    assert process() == before


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyError("a callback of the user's")


@pytest.mark.parametrize("trains", [True, False])
def test_a_trainer_that_nobody_ends_lets_go_of_the_process_when_it_goes(process, tmp_path, trains):
    before = process()
    trainer = make_run(tmp_path, callbacks=[Fails()])
    if trains:
        with pytest.raises(KeyError, match="a callback of the user's"):
            trainer.train()
    assert process() == (2, "bf16")
    del trainer
    gc.collect()
    assert process() == before

"""What a user put in the place of transformers' code is what trains: with every speed-up, as with stock Trainer."""

import random
from types import MethodType

import pytest
import torch
from datasets import Dataset
from tiny_encoders import tiny_esm, tiny_esmc
from torch.nn import functional
from transformers import EsmForMaskedLM, EsmModel, EsmTokenizer, Trainer, TrainingArguments
from transformers.models.esm.modeling_esm import EsmIntermediate

from hf_ext.data.masking import MaskedLMCollator
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.errors import PlanRefused
from hf_ext.models.affinity import AffinityModel
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


# --- losses -----------------------------------------------------------------------------------------------------------


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


class Doubled(AffinityModel):
    def forward(self, labels=None, **kwargs):
        output = AffinityModel.forward(self, labels=labels, **kwargs)
        output["loss"] = 2 * output["loss"]
        return output


def double_on_the_instance(model):
    model.forward = MethodType(Doubled.forward, model)


def test_the_loss_of_an_evaluation_is_that_of_the_forward(tmp_path, make_affinity, demo_rows):
    found = []
    for changes in (lambda model: None, double_on_the_instance):
        model, collator = make_affinity()
        changes(model)
        args = FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
        found.append(
            FastTrainer(model, args, collator, eval_dataset=demo_rows.select(range(16))).evaluate()["eval_loss"]
        )
    assert found[1] == pytest.approx(2 * found[0], rel=1e-5)


# --- batches ----------------------------------------------------------------------------------------------------------


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


# --- attention weights ------------------------------------------------------------------------------------------------


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
    assert "may read the scores of the model's eager attention" in trainer.plan["attention"].reason
    trainer.end()


def test_another_attention_for_it_is_refused(tmp_path, make_collator):
    fast = type("Fast", (ReadsScores, FastTrainer), {})
    with pytest.raises(PlanRefused, match=r"--attention blocked: .* set_attn_implementation\('sdpa'\)"):
        train(tmp_path, fast, FastTrainingArguments, eager(tiny_esm), make_collator(), attention="blocked")


# --- layers -----------------------------------------------------------------------------------------------------------


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
    [
        (of_class(EsmIntermediate, Relu), "fused_gelu"),
        (of_class(EsmModel, HalvedInTraining), "packing"),
    ],
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

"""What works with stock Trainer works with FastTrainer in its place: arguments, data, loaders, methods overridden."""

import logging
from dataclasses import dataclass

import pytest
import torch
from run_outcomes import losses
from stock_twins import PlainClassifier, make_model, make_rows, run, run_both, settings
from token_rows import pad_rows
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

from hf_ext.errors import ArgumentError, NotFiniteError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}


def fast(folder, **given):
    return FastTrainingArguments(str(folder), **{**QUIET, "max_steps": 2, **given})


def plain(folder, cls=TrainingArguments, **given):
    return cls(str(folder), **{**QUIET, "max_steps": 2, **given})


def test_plain_training_arguments_train_as_in_stock_trainer(tmp_path):
    ours, stock = run_both(tmp_path, "Plain", args_cls=TrainingArguments, gradient_accumulation_steps=2)
    assert ours.differences(stock) == []


def test_without_arguments_there_are_those_of_stock_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours, stock = (cls(PlainClassifier(), train_dataset=make_rows("Plain", 4)).args for cls in (FastTrainer, Trainer))
    theirs = stock.to_dict()
    assert {name: ours.to_dict()[name] for name in theirs} == theirs


def test_what_is_no_training_arguments_is_said(tmp_path):
    with pytest.raises(ArgumentError, match="args is a dict: give hf_ext's FastTrainingArguments"):
        FastTrainer(PlainClassifier(), {"output_dir": str(tmp_path)})


def test_without_speedups_the_arguments_are_the_callers_and_stay_as_they_are(tmp_path):
    args = fast(tmp_path, max_steps=5)
    before = args.to_dict()
    trainer = FastTrainer(PlainClassifier(), args, pad_rows, make_rows("Plain", 8), make_rows("Plain", 4))
    assert trainer.args is args
    args.max_steps = 1
    trainer.train()
    trainer.evaluate()
    assert trainer.state.global_step == 1
    assert args.to_dict() == {**before, "max_steps": 1}


def test_what_a_plan_sets_it_sets_in_a_copy(tmp_path):
    args = fast(tmp_path, effective_batch_size=4, per_device_train_batch_size=2)
    trainers = [FastTrainer(PlainClassifier(), args, pad_rows, make_rows("Plain", 8)) for _ in range(2)]
    assert args.gradient_accumulation_steps == 1
    for trainer in trainers:
        assert trainer.args is not args
        assert trainer.args.gradient_accumulation_steps == 2
        assert trainer.args.accelerator_config is not args.accelerator_config


def test_arguments_by_position_have_the_order_of_stock_trainer(tmp_path):
    def metrics(prediction):
        return {}

    def loss(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].mean()

    rows, model = make_rows("Plain", 4), PlainClassifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = (pad_rows, rows, rows, None, None, loss, metrics, [], (optimizer, None), None, None)
    trainer = FastTrainer(model, fast(tmp_path), *given)
    assert trainer.eval_dataset is rows
    assert (trainer.compute_loss_func, trainer.compute_metrics, trainer.optimizer) == (loss, metrics, optimizer)
    with pytest.raises(TypeError, match="Given twice, by position and by name: args"):
        FastTrainer(model, fast(tmp_path), args=fast(tmp_path))
    with pytest.raises(TypeError, match="14 arguments by position: Trainer takes model, args,"):
        FastTrainer(model, fast(tmp_path), *given, None)


def everything(base):
    """Overrides of what does not decide the loss, as old subclasses have them."""

    class Everything(base):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix=metric_key_prefix)
            return {**metrics, "eval_loss": metrics["eval_loss"] + 1}

        def predict(self, *args, **kwargs):
            output = super().predict(*args, **kwargs)
            return output._replace(metrics={**output.metrics, "test_loss": output.metrics["test_loss"] + 1})

        def log(self, logs, start_time=None):
            super().log({**logs, "mine": 1.0}, start_time)

        def create_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
            return self.optimizer

        def get_train_dataloader(self):
            rows = self.train_dataset.select(range(len(self.train_dataset))[::-1])
            return DataLoader(rows, 2, collate_fn=self.data_collator)

    return Everything


@pytest.mark.parametrize("is_behind", [False, True])
def test_other_methods_that_are_overridden_count_as_in_stock_trainer(is_behind, tmp_path):
    def override(base):
        return (
            type("Behind", (base, everything(Trainer)), {}) if is_behind and base is FastTrainer else everything(base)
        )

    ours, stock = run_both(tmp_path, "Plain", override, gradient_accumulation_steps=2)
    assert ours.differences(stock) == []


def test_optimizers_of_the_users_are_stepped_as_in_stock_trainer(tmp_path):
    def give(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))}

    ours, stock = run_both(tmp_path, "Plain", extra=give, gradient_accumulation_steps=2)
    assert ours.differences(stock) == []


class Squares(nn.Module):
    """A model whose inputs have names of ours."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, positions, labels=None):
        return {"loss": ((positions * self.weight).sum(1) - labels).square().mean()}


class OwnStep(FastTrainer):
    """As many trainers that are older than `num_items_in_batch`."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_step_of_the_users_is_watched_for_what_is_not_finite(tmp_path):
    rows = [{"positions": torch.ones(2), "labels": torch.tensor(float("nan") if i == 6 else 0.0)} for i in range(8)]
    given = {"max_steps": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = fast(tmp_path, train_sampling_strategy="sequential", learning_rate=0.1, **given)
    trainer = OwnStep(Squares(), args, train_dataset=rows)
    with pytest.raises(NotFiniteError, match=r"in step 4: loss nan, gradient norm nan; rows 6; 7 of the training data"):
        trainer.train()


class Counted(IterableDataset):
    """A stream that knows its length."""

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(make_rows("Plain", 8))


class Endless:
    """A loader that is none of torch's, and has no `dataset`."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def bare_loader(base):
    class Bare(base):
        def get_train_dataloader(self):
            rows = list(self.train_dataset)
            return Endless([pad_rows(rows[i : i + 2]) for i in range(0, len(rows), 2)])

    return Bare


def same(cls):
    return cls


DATA = {
    "stream with a length": (same, Counted),
    "loader without a dataset": (bare_loader, lambda: make_rows("Plain", 8)),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_that_stock_trainer_takes_trains_the_same(kind, tmp_path, caplog):
    override, make = DATA[kind]
    found = []
    for cls, arguments in ((FastTrainer, FastTrainingArguments), (Trainer, TrainingArguments)):
        # Six of four batches an epoch: half of the second.
        given = settings(tmp_path / cls.__name__, max_steps=6, save_strategy="steps", save_steps=3)
        data = make()
        with caplog.at_level(logging.WARNING):
            trainer = override(cls)(
                make_model("Plain"), arguments(**given), pad_rows, data, eval_dataset=make_rows("Plain", 4)
            )
            found.append(run(trainer))
        assert trainer.state.epoch == 1.5
    assert found[0].differences(found[1]) == []
    assert len(found[0].losses) == 6


@dataclass
class Row:
    input_ids: list[int]
    labels: int


def make_batch(rows):
    table = make_rows("Plain", 24)
    return pad_rows([table[int(i)] for i in rows])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("speedups", [[], ["all"]], ids=["stock", "all"])
@pytest.mark.parametrize("kind", ["tensor", "dataclass", "text"])
def test_rows_that_are_no_mappings_train_as_in_stock_trainer(kind, speedups, tmp_path):
    rows, collator = {
        "tensor": (torch.arange(24), make_batch),
        "text": ([str(i) for i in range(24)], make_batch),
        "dataclass": ([Row([4 + i % 15] * 5, i % 3) for i in range(24)], None),
    }[kind]
    numbers, ours = [], {"speedups": speedups, "without": ["precision", "tf32", "cpu_matmul"]}
    for cls, args in ((FastTrainer, fast(tmp_path / "f", **ours)), (Trainer, plain(tmp_path / "s"))):
        given = {"data_collator": collator, "train_dataset": rows, "eval_dataset": rows}
        model = make_model("BertForSequenceClassification")
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # drawn for packed rows, it is another draw
                module.p = 0.0
        trainer = cls(model, args, **given)
        trainer.train()
        numbers.append(losses(trainer))
        assert trainer.evaluate()["eval_loss"] > 0
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)

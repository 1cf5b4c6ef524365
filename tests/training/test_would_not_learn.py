"""What would not learn what was asked, or could not be judged, is named before or in the first step."""

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from tiny_classifier import ROWS, make_args, make_model
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertTokenizerFast, TrainerCallback
from transformers import DataCollatorForLanguageModeling as Masking

from hf_ext.errors import ArgumentError, DataError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

LETTERS = "ACDEFGHIKLMNPQRSTVWY"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As ProtBert's: a word for each residue, which blanks must part."""
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    return BertTokenizerFast(str(path), do_lower_case=False)


def make_texts(num=24) -> list[str]:
    draw = torch.Generator().manual_seed(0)
    return ["".join(LETTERS[i] for i in torch.randint(20, (12 + k % 5,), generator=draw)) for k in range(num)]


def train(folder, tokenizer, texts, kind=BertForSequenceClassification, collator=None, **given):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = kind(BertConfig(vocab_size=25, num_labels=1, pad_token_id=0, **sizes))
    rows = [dict(tokenizer(text)) for text in texts]
    if kind is BertForSequenceClassification:
        rows = [{**row, "labels": float(i)} for i, row in enumerate(rows)]
    args = make_args(folder, save_strategy="no", **{"num_train_epochs": 2, "max_steps": -1, **given})
    FastTrainer(model, args, collator, rows, processing_class=tokenizer).train()


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "of the first batch" in record.getMessage()]


def test_text_that_the_tokenizer_does_not_know_is_refused_with_what_to_do(tmp_path, tokenizer, caplog):
    for size in (4, 24):
        with pytest.raises(DataError, match=r"100% of the tokens of the first batch are '\[UNK\]'.* blanks"):
            train(tmp_path, tokenizer, make_texts(), per_device_train_batch_size=size)
    train(tmp_path, tokenizer, make_texts(), per_device_train_batch_size=1)  # one row may be odd
    assert len(said(caplog)) == 1


def test_with_blanks_nothing_is_said_and_mostly_unknown_text_is_said_once(tmp_path, tokenizer, caplog):
    train(tmp_path, tokenizer, [" ".join(text) for text in make_texts()])
    assert not said(caplog)
    train(tmp_path, tokenizer, [" ".join(f"A{text.lower()}") for text in make_texts()])
    (text,) = said(caplog)
    assert text.startswith("9")
    caplog.clear()
    texts = [f"A {text} {text}" for text in make_texts()]
    train(tmp_path, tokenizer, texts, kind=BertForMaskedLM, collator=Masking(tokenizer))
    assert "are '[UNK]'" in said(caplog)[0]


def test_adapters_that_want_a_call_after_each_step_are_refused_and_can_be_evaluated(tmp_path):
    layers = {"target_modules": ["query", "value"]}
    configs = [
        (AdaLoraConfig(total_step=4, tinit=1, tfinal=1, **layers), True),
        (LoraConfig(use_dora=True, **layers), False),
    ]
    for config, is_refused in configs:
        model = get_peft_model(make_model(), config)
        trainer = FastTrainer(model, make_args(tmp_path, save_strategy="no"), None, ROWS, ROWS)
        assert trainer.evaluate()["eval_loss"] > 0
        if is_refused:
            with pytest.raises(ArgumentError, match=r"'default' is AdaLoRA.* Use LoraConfig"):
                trainer.train()
        else:
            trainer.train()
        trainer.end()


def test_weights_that_train_in_float16_are_named_and_those_that_do_not_are_not(tmp_path, caplog):
    lora, with_head = (LoraConfig(target_modules=["query"], task_type=task) for task in (None, "SEQ_CLS"))
    for model, is_named in (
        (make_model().half(), True),
        (get_peft_model(make_model().half(), lora), False),
        (get_peft_model(make_model().half(), with_head), True),  # PEFT copies the head as it is
        (make_model().bfloat16(), False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            FastTrainer(model, make_args(tmp_path, max_steps=1, save_strategy="no"), train_dataset=ROWS).train()
        assert ("weights that train are float16 (" in caplog.text) == is_named
        assert ("dtype=torch.float32" in caplog.text) == is_named


def test_with_a_loss_scale_they_are_refused(tmp_path):
    trainer = FastTrainer(make_model().half(), make_args(tmp_path), train_dataset=ROWS)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # as fp16=True makes it on a GPU
    with pytest.raises(ArgumentError, match=r"float16 \(esm.* and \d+ more\).*dtype=torch\.float32"):
        trainer.train()
    assert trainer.state.global_step == 0


class Line(nn.Module):
    """y = w x + b after dropout; a parameter that nothing uses where asked."""

    def __init__(self, has_unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = nn.Linear(3, 1), nn.Dropout(0.5)
        if has_unused:
            self.forgotten = nn.Parameter(torch.ones(2))

    def forward(self, x, labels=None):
        return {"logits": self.linear(self.dropout(x))[:, 0]}


def mse(outputs, labels, num_items_in_batch=None):
    return ((outputs["logits"] - labels) ** 2).sum() / len(labels)


def make_trainer(folder, loss=mse, model=None, **arguments):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 3)).astype(np.float32)
    rows = Dataset.from_dict({"x": x.tolist(), "labels": x.sum(1).tolist()}).with_format("torch")
    given = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    given |= {"max_steps": 3, "learning_rate": 0.1, "output_dir": str(folder), **arguments}
    return FastTrainer(model or Line(), FastTrainingArguments(**given), train_dataset=rows, compute_loss_func=loss)


def test_parameters_that_the_loss_does_not_reach_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path, model=Line(has_unused=True)).train()
    assert caplog.text.count("1 trainable parameters get no gradient from the loss: forgotten.") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path / "sound").train()
    assert "gradient" not in caplog.text


EVERY_TWO = {"eval_strategy": "steps", "eval_steps": 2}


def make(folder, compute=None, cls=FastTrainer, sets=ROWS, **given) -> Any:
    callbacks = given.pop("callbacks", None)
    args = make_args(folder, **{**EVERY_TWO, **given})
    return cls(make_model(), args, train_dataset=ROWS, eval_dataset=sets, compute_metrics=compute, callbacks=callbacks)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_a_metric_for_best_model_that_evaluations_do_not_give_is_refused_before_the_first_step(tmp_path):
    two = {"near": ROWS, "far": ROWS[:3]}
    for given, words in (
        ({"sets": two, "metric_for_best_model": "loss"}, ("'eval_loss'", "eval_far_loss, eval_near_loss")),
        ({"compute": accuracy, "sets": two, "load_best_model_at_end": True}, ("eval_far_loss", "and more")),
        ({"metric_for_best_model": "accuracy"}, ("but eval_loss. ",)),
        ({"metric_for_best_model": "los"}, ("mean 'eval_loss'",)),
    ):
        trainer = make(tmp_path, **given)
        with pytest.raises(ArgumentError) as error:
            trainer.train()
        assert all(word in str(error.value) for word in words), error.value
        assert trainer.state.global_step == 0
    for name in ("eval_near_accuracy", "far_loss", "near_runtime"):
        trainer = make(tmp_path / name, accuracy, sets=two, metric_for_best_model=name, greater_is_better=True)
        trainer.train()
        assert trainer.state.global_step == 4


class Own(FastTrainer):
    def evaluate(self, *args, **kwargs):
        return {**super().evaluate(*args, **kwargs), "eval_mine": 1.0}


class Adds(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_mine"] = 1.0


def test_metrics_that_others_add_are_left_alone(tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    for i, given in enumerate(
        ({"callbacks": [Adds()]}, {"cls": Own}, {"compute": lambda p: {"mine": 1.0}, "sets": stream})
    ):
        trainer = make(tmp_path / f"{i}", metric_for_best_model="mine", greater_is_better=True, **given)
        trainer.train()
        assert trainer.state.best_metric == 1.0


def test_what_json_does_not_hold_does_not_cost_the_checkpoint(tmp_path):
    class Logs(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            state.log_history.append({"gates": np.zeros(2), "path": tmp_path, "rate": np.float32(0.5)})

    make(tmp_path, lambda p: {"f1": np.array([0.5, 0.25])}, callbacks=[Logs()], max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["log_history"][0] == {"gates": [0.0, 0.0], "path": str(tmp_path), "rate": 0.5}
    assert next(entry["eval_f1"] for entry in state["log_history"] if "eval_f1" in entry) == [0.5, 0.25]


def test_a_metric_that_becomes_none_is_not_the_best(tmp_path, caplog):
    values = iter([0.5, None])
    trainer = make(tmp_path, lambda p: {"f1": next(values)}, metric_for_best_model="f1", greater_is_better=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert (trainer.state.best_metric, trainer.state.global_step) == (0.5, 4)
    assert "eval_f1 is None at step 4: never the best." in caplog.text

"""What would not learn what was asked: text that a tokenizer does not know, adapters whose ranks nobody changes."""

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from tiny_classifier import ROWS, make_args, make_model
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertTokenizerFast
from transformers import DataCollatorForLanguageModeling as Masking

from hf_ext.errors import ArgumentError, DataError
from hf_ext.trainer import FastTrainer

LETTERS = "ACDEFGHIKLMNPQRSTVWY"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As ProtBert's: a word for each residue, which blanks must part."""
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    return BertTokenizerFast(str(path), do_lower_case=False)


def make_texts(num: int = 24) -> list[str]:
    draw = torch.Generator().manual_seed(0)
    return ["".join(LETTERS[i] for i in torch.randint(20, (12 + k % 5,), generator=draw)) for k in range(num)]


def train(folder, tokenizer, texts, labels=None, kind=BertForSequenceClassification, collator=None, **given):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = kind(BertConfig(vocab_size=25, num_labels=1, pad_token_id=0, **sizes))
    rows = [dict(tokenizer(text)) for text in texts]
    if kind is BertForSequenceClassification:
        rows = [{**row, "labels": float(i)} for i, row in enumerate(rows)]
    for row, label in zip(rows, labels or []):
        row["labels"] = label
    for name in {"token_type_ids", "attention_mask"} & given.keys():
        rows[1][name] = given.pop(name)
    args = make_args(folder, save_strategy="no", **{"num_train_epochs": 2, "max_steps": -1, **given})
    FastTrainer(model, args, collator, rows, processing_class=tokenizer).train()


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "of the first" in record.getMessage()]


def test_rows_that_are_one_to_the_model_are_refused_with_what_to_do(tmp_path, tokenizer):
    for size, given in ((4, {}), (4, {"speedups": ["all"]}), (1, {"gradient_accumulation_steps": 4}), (24, {})):
        with pytest.raises(DataError, match=r"'\[UNK\]'; .*of the first (16|24) rows .*\[2, 1, 3\], .*blanks") as error:
            train(tmp_path, tokenizer, make_texts(), per_device_train_batch_size=size, **given)
        assert "\n" not in str(error.value)


def test_with_blanks_nothing_is_said(tmp_path, tokenizer, caplog):
    train(tmp_path, tokenizer, [" ".join(text) for text in make_texts()])
    assert not said(caplog)


def test_text_that_is_mostly_unknown_is_said_once(tmp_path, tokenizer, caplog):
    texts = [" ".join(text.lower()) for text in make_texts()]  # of different lengths
    train(tmp_path, tokenizer, texts)
    (text,) = said(caplog)
    assert text.startswith("100% of the tokens of the first 16 rows are '[UNK]'")
    caplog.clear()
    train(tmp_path, tokenizer, make_texts(), kind=BertForMaskedLM, collator=Masking(tokenizer))
    assert "'[UNK]'" in said(caplog)[0]  # masked here and there, so no two alike


def test_rows_that_are_nearly_all_one_are_said(tmp_path, tokenizer, caplog):
    train(tmp_path, tokenizer, ["A C D"] * 23 + ["A"], per_device_train_batch_size=24)
    (text,) = said(caplog)
    assert text.startswith("23 of the first 24 rows have the same token ids")


def test_rows_that_may_be_alike_are_left_alone(tmp_path, tokenizer, caplog):
    alike = ["A C D"] * 24
    for name, values in (("token_type_ids", [0, 1, 1, 0, 0]), ("attention_mask", [1, 1, 0, 0, 1])):  # others per row
        train(tmp_path, tokenizer, alike, **{name: values})
    caplog.clear()
    train(tmp_path, tokenizer, alike, [1.0] * 24)  # nothing to tell apart
    train(tmp_path, tokenizer, alike[:6])  # a handful, time and again
    train(tmp_path, tokenizer, ["A C D", "A C E"] * 12)
    assert not said(caplog)


class WithPixels(BertForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, pixels=None, labels=None):
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels)


def test_rows_that_something_else_tells_apart_are_left_alone(tmp_path, tokenizer, caplog):
    model = WithPixels(
        BertConfig(vocab_size=25, num_labels=1, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    rows = [{**tokenizer("A C D"), "pixels": [float(i)], "labels": float(i)} for i in range(24)]
    FastTrainer(model, make_args(tmp_path, save_strategy="no", max_steps=8), None, rows).train()
    assert not said(caplog)


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

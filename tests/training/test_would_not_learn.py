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

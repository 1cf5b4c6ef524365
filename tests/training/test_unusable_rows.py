"""Rows that no step can take are named before the first step, with column, value and remedy; others are left alone."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_classifier import ROWS, make_args, make_model
from transformers import BertConfig, BertForSequenceClassification, RobertaConfig, RobertaForSequenceClassification
from transformers import default_data_collator as plain

from hf_ext.errors import DataError
from hf_ext.trainer import FastTrainer

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 33}


def with_labels(labels: list[Any], column: str = "labels") -> Dataset:
    """16 rows whose labels begin with these."""
    values = [*labels, *[row["labels"] for row in ROWS[len(labels) :]]]
    return Dataset.from_list([{"input_ids": row["input_ids"], column: value} for row, value in zip(ROWS, values)])


def make(folder: Any, rows: Any, model: Any = None, evaluated: Any = None, **given: Any) -> FastTrainer:
    own = {name: given.pop(name) for name in ("data_collator", "compute_loss_func") if name in given}
    args = make_args(folder, eval_strategy="epoch" if evaluated else "no", save_strategy="no", **given)
    return FastTrainer(model or make_model(), args, train_dataset=rows, eval_dataset=evaluated, **own)


def refused(trainer: FastTrainer, *words: str) -> None:
    with pytest.raises(DataError) as error:
        trainer.train()
    assert all(word in str(error.value) for word in words), error.value
    assert trainer.state.global_step == 0


def test_labels_that_are_none_are_named_with_row_and_column(tmp_path):
    texts = [str(row["labels"]) for row in ROWS]
    numbers = make_model()
    numbers.config.num_labels, numbers.config.problem_type = 1, "regression"
    for rows, words in (
        (with_labels(texts, "label"), ("train data, row 0, column 'label': '0'", "from 0 to 1 (num_labels)")),
        (with_labels([0, None], "label"), ("row 1, column 'label': None",)),
        (with_labels([1, 0, 2]), ("row 2, column 'labels': 2",)),
        (with_labels([-1]), ("row 0, column 'labels': -1",)),
    ):
        refused(make(tmp_path, rows), *words)
    refused(
        make(tmp_path, with_labels(["7.3"] * 16), numbers), "'7.3', but EsmForSequenceClassification takes a number."
    )
    refused(make(tmp_path, ROWS, evaluated={"far": with_labels([2])}), "eval_far data, row 0", "2, but")


def test_labels_that_somebody_may_understand_are_left_alone(tmp_path):
    several = make_model()
    several.config.problem_type = "multi_label_classification"

    def halves(rows):
        return plain([{**row, "labels": int(row["labels"]) // 2} for row in rows])

    def shifted(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"], labels - 1)

    one_based = with_labels([1 + row["labels"] for row in ROWS])
    halved = with_labels([1 + row["labels"] for row in ROWS])
    halved.set_transform(lambda batch: {**batch, "labels": [value - 1 for value in batch["labels"]]})
    unknown = with_labels([None] * 16, "label")
    make(tmp_path, ROWS, evaluated=unknown, data_collator=plain).train()  # is evaluated without a loss
    for rows, given in (
        (with_labels([-100]), {}),
        (with_labels(["2", "3"] * 8), {"data_collator": halves}),
        (one_based, {"compute_loss_func": shifted}),
        (halved, {"remove_unused_columns": False}),
        (with_labels([[1.0, 2.0]] * 16), {"model": several}),
        (
            Dataset.from_list([*ROWS * 2, {**ROWS[0], "labels": 2}]),
            {"max_steps": 1, "train_sampling_strategy": "sequential"},
        ),
    ):
        trainer = make(tmp_path, rows, **given)
        trainer.train()
        assert trainer.state.global_step > 0


def test_a_row_longer_than_the_positions_is_named_where_it_cannot_pass(tmp_path):
    lengths = [5, 9, 20, 5] * 4
    rows = Dataset.from_list([{"input_ids": [5] * n, "token_type_ids": [0] * n, "labels": 0} for n in lengths])
    bert = BertForSequenceClassification(BertConfig(**SHAPE, max_position_embeddings=12))
    one_a_step = {"per_device_train_batch_size": 1, "max_steps": 16}
    words = "train data, row 2: 20 tokens, but BertForSequenceClassification has 12 positions.", "max_length=12"
    refused(make(tmp_path, rows, bert, **one_a_step), *words)
    shuffled = rows.select([1, 0, 6])
    refused(make(tmp_path, rows.select([0, 1]), bert, shuffled, **one_a_step), "eval data, row 2: 20 tokens")
    make(tmp_path, rows, make_model(max_position_embeddings=12), **one_a_step).train()  # rotary positions have no end
    roberta = RobertaForSequenceClassification(RobertaConfig(**SHAPE, max_position_embeddings=14, pad_token_id=1))
    padded = [{"input_ids": [5] * 9 + [1] * 11, "attention_mask": [1] * 9 + [0] * 11, "labels": 0}] * 4
    make(tmp_path, Dataset.from_list(padded), roberta, **one_a_step).train()  # padding takes none

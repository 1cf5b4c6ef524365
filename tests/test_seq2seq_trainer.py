"""`FastSeq2SeqTrainer`: trains, evaluates and generates as transformers' own, and continues exactly."""

import numpy as np
import pytest
import torch
from run_outcomes import KillAt, Killed, losses
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from hf_ext.trainer import FastSeq2SeqTrainer

IGNORED = -100


def make_model(dropout=0.1):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": dropout}
    return T5ForConditionalGeneration(T5Config(vocab_size=24, decoder_start_token_id=0, **sizes))


def make_rows(number):
    """Rows of tokens to be written backwards, 3 to 7 long."""
    generator = torch.Generator().manual_seed(number)
    rows = [torch.randint(3, 24, (3 + i % 5,), generator=generator).tolist() for i in range(number)]
    return [{"input_ids": [*row, 1], "labels": [*row[::-1], 1]} for row in rows]


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] + [IGNORED] * (width - len(row["labels"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def share_right(prediction):
    labels = prediction.label_ids
    written = prediction.predictions[:, 1 : labels.shape[1] + 1]
    written = np.pad(written, ((0, 0), (0, labels.shape[1] - written.shape[1])))
    return {"right": float((written == labels)[labels != IGNORED].mean())}


def make(cls, folder, *callbacks, dropout=0.1, **given):
    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 1, "learning_rate": 1e-2}
    settings |= {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "save_steps": 4}
    settings |= {"predict_with_generate": True, "generation_max_length": 9, "eval_strategy": "epoch"}
    args = Seq2SeqTrainingArguments(output_dir=str(folder), **{**settings, **given})
    data = {"train_dataset": make_rows(16), "eval_dataset": make_rows(6), "data_collator": collate}
    return cls(make_model(dropout), args, **data, compute_metrics=share_right, callbacks=list(callbacks))


def test_it_learns_and_generates_what_transformers_own_does(tmp_path):
    ours, stock = (make(cls, tmp_path / cls.__name__, dropout=0.0) for cls in (FastSeq2SeqTrainer, Seq2SeqTrainer))
    for trainer in (ours, stock):
        trainer.train()
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    metrics = [trainer.evaluate(max_length=8, num_beams=2) for trainer in (ours, stock)]
    assert metrics[0]["eval_right"] == metrics[1]["eval_right"]
    written = [trainer.predict(make_rows(5), max_length=8).predictions for trainer in (ours, stock)]
    assert np.array_equal(*written)
    ours.end()


def test_a_killed_run_continues_to_the_same_weights(tmp_path):
    whole = make(FastSeq2SeqTrainer, tmp_path / "whole")
    whole.train()
    killed = make(FastSeq2SeqTrainer, tmp_path / "killed", KillAt(5))
    with pytest.raises(Killed):
        killed.train()
    killed.close()
    resumed = make(FastSeq2SeqTrainer, tmp_path / "killed")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 8
    weights = zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    assert not torch.equal(whole.model.lm_head.weight, make_model().lm_head.weight)
    for trainer in (whole, resumed):
        trainer.end()

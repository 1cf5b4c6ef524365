"""Weights that train in float16 are named before the first step; a frozen base in it is what LoRA is for."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_classifier import ROWS, make_args, make_model

from hf_ext.errors import ArgumentError
from hf_ext.trainer import FastTrainer


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

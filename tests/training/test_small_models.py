"""A step of a model so small that every microsecond counts."""

import accelerate.optimizer
import pytest
import torch
from tiny_masked_lm import make_args
from torch import nn

from hf_ext import FastTrainer
from hf_ext.training.fitting import halving

pytestmark = pytest.mark.internals


class Perceptron(nn.Sequential):
    def forward(self, inputs, labels):
        return {"loss": nn.functional.mse_loss(super().forward(inputs)[:, 0], labels)}


def make(folder, model=None, **given) -> FastTrainer:
    rows = [{"inputs": torch.randn(100), "labels": torch.randn(())} for _ in range(8)]
    model = model or Perceptron(nn.Linear(100, 100), nn.GELU(), nn.Linear(100, 1))
    return FastTrainer(model, make_args(folder, **given), train_dataset=rows)


def test_few_products_are_left_alone_on_a_cpu_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_ext.hardware._cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr("hf_ext.speedups.precision.is_amd_cpu", lambda: True)
    cases = ({}, {"per_device_train_batch_size": 500}, {"bf16": True})
    plans = [make(tmp_path, speedups=["precision", "cpu_matmul"], **given).plan for given in cases]
    assert [plan["precision"].status for plan in plans] == ["skipped", "applied", "applied"]
    for name in ("precision", "cpu_matmul"):  # 100 x 100 + 100 + 100 + 1
        assert "10,201 weights times 4 rows take 0.082 MFLOP: below 8" in plans[0][name].reason
    for layer in (nn.LSTM(4, 8), nn.MultiheadAttention(8, 2), nn.Conv1d(4, 8, 3)):  # whose weights count often in a row
        other = Perceptron(nn.Linear(100, 1))
        other.layer = layer
        assert make(tmp_path, other, speedups=["precision"]).plan["precision"].status == "applied"


def test_a_step_searches_no_disk_and_keeps_no_random_states_in_vain(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(accelerate.optimizer, "is_lomo_available", lambda: bool(asked.append("disk")))
    monkeypatch.setattr(halving, "capture_random_states", lambda: asked.append("states"))
    make(tmp_path, max_steps=4).train()
    accelerate.optimizer.is_lomo_available()  # as it was before
    assert asked == ["disk"] * 2  # stock Trainer: twice a step

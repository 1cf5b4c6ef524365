"""`finish_optimizer` without a Trainer: groups of encoders and heads, Muon's matrices, in one order."""

import pytest
import torch
from tiny_classifier import make_args, make_model
from torch.optim import SGD, AdamW

from hf_ext.errors import ArgumentError
from hf_ext.models.muon import MuonAdamW, block_matrices
from hf_ext.plan import make_plan
from hf_ext.training.optimizers import finish_optimizer


def finish(folder, model, optimizer=None, *, is_new=True, rate=None, **given):
    plan = make_plan(make_args(folder, **given), model)
    optimizer = optimizer or AdamW(model.parameters(), lr=1e-3)
    return finish_optimizer(optimizer, is_new, model, plan, rate)


def test_without_a_wish_the_optimizer_is_trainers(tmp_path):
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    assert finish(tmp_path, model, optimizer) is optimizer
    assert [[*map(id, group["params"])] for group in optimizer.param_groups] == [[*map(id, g)] for g in groups]


def test_encoders_have_their_rate_and_their_matrices_too(tmp_path):
    model = make_model()
    optimizer = finish(tmp_path, model, rate=1e-5, optim_ext="muon")
    assert type(optimizer) is MuonAdamW
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert {rates[id(p)] for p in model.base_model.parameters()} == {1e-5}
    assert {rates[id(p)] for p in model.classifier.parameters()} == {1e-3}
    algorithms = {id(p): group["algorithm"] for group in optimizer.param_groups for p in group["params"]}
    assert {algorithms[id(matrix)] for matrix in block_matrices(model)} == {"muon"}


def test_one_that_was_there_before_keeps_its_groups_and_a_callers_is_refused(tmp_path):
    model = make_model()
    first = finish(tmp_path, model, optim_ext="muon")
    groups = list(first.param_groups)
    assert finish(tmp_path, model, first, is_new=False, rate=1e-5, optim_ext="muon") is first
    assert first.param_groups == groups
    for optimizer, is_new in ((SGD(model.parameters()), True), (AdamW(model.parameters()), False)):
        with pytest.raises(ArgumentError, match=f"given an optimizer \\({type(optimizer).__name__}\\)"):
            finish(tmp_path, model, optimizer, is_new=is_new, optim_ext="muon")


def test_a_model_without_an_encoder_that_trains_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="Linear has no encoder that trains"):
        finish(tmp_path, torch.nn.Linear(2, 1), rate=1e-5)

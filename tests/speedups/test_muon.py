"""`--speedups muon`: decided, carried out by the Trainer with clipping and schedule, resumed; off means untouched."""

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_trainer

from hf_ext.errors import ArgumentError
from hf_ext.models.muon import MuonAdamW, block_matrices

MUON = {"optim": "adamw_torch_fused", "speedups": "muon", "learning_rate": 1e-3, "weight_decay": 0.1}


def rates(optimizer) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {"muon": set(), "adamw": set()}
    for group in optimizer.param_groups:
        found[group["algorithm"]].add(group["lr"])
    return found


def test_the_optimizer_holds_every_parameter_once_with_trainers_weight_decay(tmp_path):
    model = make_wide_esm()
    plain = make_trainer(tmp_path / "a", model, **{**MUON, "speedups": []}).create_optimizer()
    assert type(plain) is torch.optim.AdamW  # off means untouched
    ours = make_trainer(tmp_path / "m", model, **MUON).create_optimizer()
    assert type(ours) is MuonAdamW

    def decay(optimizer):
        pairs = [(id(p), group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
        return sorted(pairs)

    assert decay(ours) == decay(plain)
    matrices = [p for group in ours.param_groups if group["algorithm"] == "muon" for p in group["params"]]
    assert {id(p) for p in matrices} == {id(p) for p in block_matrices(model)}
    assert all(group["fused"] for group in ours.param_groups if group["algorithm"] == "adamw")


def test_the_schedule_scales_both_and_a_matrix_keeps_one_number_a_weight(tmp_path):
    trainer = make_trainer(tmp_path, **MUON)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert rates(optimizer) == {"muon": {0.0}, "adamw": {0.0}}  # linear, at its end
    assert {group["initial_lr"] for group in optimizer.param_groups} == {1e-3}
    matrices = sum(p.numel() for p in block_matrices(trainer.model))
    assert matrices == 2 * (4 * 32 * 32 + 2 * 32 * 64)
    kept = [tensor.numel() for state in optimizer.state.values() for tensor in state.values() if tensor.numel() > 1]
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p in optimizer.state)
    assert sum(kept) == 2 * trained - matrices
    trainer.train()  # a second time, with the optimizer it has
    assert trainer.optimizer.optimizer is optimizer


def test_encoder_and_head_rates_hold_beside_muon(make_affinity, tmp_path):
    model, _ = make_affinity("full", "frozen")
    optimizer = make_trainer(tmp_path, model, **MUON, encoder_learning_rate=1e-5).create_optimizer()
    assert rates(optimizer) == {"muon": {1e-5}, "adamw": {1e-5, 1e-3}}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_accumulation_and_clipping_act_as_on_one_batch(tmp_path):
    given = {**MUON, "max_grad_norm": 0.1}
    whole = make_trainer(tmp_path / "w", per_device_train_batch_size=8, **given)
    split = make_trainer(tmp_path / "s", per_device_train_batch_size=4, gradient_accumulation_steps=2, **given)
    adamw = make_trainer(tmp_path / "a", per_device_train_batch_size=8, **{**given, "speedups": []})
    for trainer in (whole, split, adamw):
        trainer.train()
    assert largest_weight_difference(whole.model, split.model) < 1e-4
    assert largest_weight_difference(whole.model, adamw.model) > 1e-3


def test_an_optimizer_of_the_callers_own_is_not_replaced_in_silence(tmp_path):
    trainer = make_trainer(tmp_path, **MUON)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"--speedups muon: the trainer was given an optimizer \(SGD\)"):
        trainer.train()

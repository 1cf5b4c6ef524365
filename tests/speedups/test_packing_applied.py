"""Packing in FastTrainer: no layer computes on padding, the budget counts real tokens, and what differs is not used."""

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args, make_rows, make_trainer
from token_rows import pad_rows
from transformers.models.esm.modeling_esm import EsmIntermediate

from hf_ext.errors import PlanRefused
from hf_ext.models.packing import find_encoders
from hf_ext.trainer import FastTrainer

PACKED = ["attention", "packing"]


def count_tokens(trainer) -> list[int]:
    """Tokens that the first feed-forward layer computes on while the trainer trains."""
    seen = []
    layer = next(module for module in trainer.model.modules() if isinstance(module, EsmIntermediate))
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
    trainer.train()
    return seen


def test_packed_training_computes_on_no_padding(tmp_path):
    stock, packed = make_trainer(tmp_path / "stock"), make_trainer(tmp_path / "packed", speedups=PACKED)
    evidence = packed.plan["packing"].evidence
    assert evidence["max_difference"] < 1e-4
    assert evidence["cosine"] == 1.0
    torch.manual_seed(stock.args.seed)
    batches = list(stock.get_train_dataloader())[:4]  # those that training sees: both draw their order from the seed
    torch.manual_seed(stock.args.seed)
    real = [int(batch["attention_mask"].sum()) for batch in batches]
    padded = [batch["input_ids"].numel() for batch in batches]
    assert count_tokens(stock) == padded
    assert count_tokens(packed) == real
    assert sum(real) < 0.9 * sum(padded)


def test_a_token_budget_counts_the_tokens_of_packed_rows(tmp_path):
    given = {"max_tokens_per_batch": 100, "per_device_train_batch_size": 8}
    packed = make_trainer(tmp_path / "packed", speedups=PACKED, **given)
    padded = make_trainer(tmp_path / "padded", **given)
    packed.train()
    sizes = [batch["attention_mask"].sum().item() for batch in packed.get_train_dataloader()]
    assert max(sizes) <= 100
    assert sum(sizes) == sum(make_rows()["length"])
    assert packed.plan["token_budget"].evidence["budget_used"] > 0.8
    assert max(batch["input_ids"].numel() for batch in packed.get_train_dataloader()) > 100
    assert max(batch["input_ids"].numel() for batch in padded.get_train_dataloader()) <= 100


def test_packed_encoders_that_differ_are_not_used(tmp_path, monkeypatch):
    # Packing that forgets where each sequence begins, as transformers' own packed inputs do for ESM.
    monkeypatch.setattr("hf_ext.models.packing._for_layers", lambda kwargs, segments: {})
    monkeypatch.setattr("hf_ext.models.packing.keeps_sequences_apart", lambda encoder: True)
    model = make_wide_esm()
    args = make_args(tmp_path, speedups=["all"], without=["cpu_matmul", "precision", "fused_gelu", "masked_lm_head"])
    decision = FastTrainer(model, args, pad_rows, make_rows()).plan["packing"]
    assert decision.status == "skipped"
    assert decision.reason.startswith("against padded encoders: states differ by ")
    assert "forward" not in vars(model.esm)
    with pytest.raises(PlanRefused, match=r"packing: against padded encoders: states differ .* Leave packing out"):
        make_trainer(tmp_path, make_wide_esm(), speedups=PACKED)


def test_towers_loaded_later_are_packed_too(tmp_path, make_affinity, demo_rows):
    model, collator = make_affinity("frozen", "frozen")
    rows = demo_rows.map(lambda row, i: {"antigen": row["antigen"][: 10 + i]}, with_indices=True)
    trainer = FastTrainer(model, make_args(tmp_path, speedups=PACKED), collator, rows)
    assert trainer.plan["packing"].evidence["max_difference"] < 1e-4
    trainer.model.release_encoders()
    trainer.model.attach_encoders()
    encoders = find_encoders(trainer.model)
    assert [encoder.config.model_type for encoder in encoders] == ["bert", "esm"]
    for encoder in encoders:
        assert ("forward" in vars(encoder), encoder.config._attn_implementation) == (True, "hf_ext_blocked")

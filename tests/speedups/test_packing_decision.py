"""Packing in the plan and in FastTrainer: when it is used, that training is stock training, and exact resume."""

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer, resumed_difference
from token_rows import pad_rows
from transformers.models.esm.modeling_esm import EsmIntermediate

from hf_ext.errors import PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models.packing import find_encoders
from hf_ext.speedups import Context, DataFacts, ModelFacts, packing
from hf_ext.trainer import FastTrainer

ROWS = DataFacts(num_rows=10_000, has_lengths=True, padding_share_random=0.3)
PACKED = ["attention", "packing"]


def context(hardware="A100", families=("esm",), data=ROWS, **given) -> Context:
    args = make_args(**{"speedups": ["all"], **given})
    return Context(describe_hardware(hardware), args, ModelFacts(families, blocks="2 EsmLayer"), data)


def decide(*args, **given):
    return packing.decide(context(*args, **given))


# --- decisions -------------------------------------------------------------------------------------------------------


def test_rows_are_filled_up_for_compiled_blocks_only():
    assert decide().settings == {"round_up": True, "named": False}
    assert decide(without=["compile"]).settings == {"round_up": False, "named": False}
    assert decide("cpu", speedups=PACKED).settings == {"round_up": False, "named": True}


# --- training --------------------------------------------------------------------------------------------------------


def count_tokens(trainer) -> list[int]:
    """Tokens that each feed-forward layer computes on while the trainer trains."""
    seen = []
    layers = [module for module in trainer.model.modules() if isinstance(module, EsmIntermediate)]
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
    trainer.train()
    assert len(layers) == 2
    return seen


def test_packed_training_ends_in_the_weights_of_stock_training_and_computes_on_no_padding(tmp_path):
    stock, packed = make_trainer(tmp_path / "stock"), make_trainer(tmp_path / "packed", speedups=PACKED)
    evidence = packed.plan["packing"].evidence
    assert evidence["max_difference"] < 1e-4
    assert evidence["cosine"] == 1.0
    per_batch = [(batch["attention_mask"].sum().item(), batch["input_ids"].numel()) for batch in _batches(stock)]
    real, padded = zip(*per_batch)
    assert count_tokens(stock) == [tokens for tokens in padded for _ in range(2)]
    assert count_tokens(packed) == [tokens for tokens in real for _ in range(2)]
    assert sum(real) < 0.9 * sum(padded)
    assert largest_weight_difference(packed.model, stock.model) < 1e-6


def _batches(trainer) -> list[dict]:
    """The first four, which are those that training sees: both draw their order from the seed."""
    torch.manual_seed(trainer.args.seed)
    batches = list(trainer.get_train_dataloader())[:4]
    torch.manual_seed(trainer.args.seed)
    return batches


def test_accumulated_and_padded_differently_it_is_still_stock_training(tmp_path):
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    stock, packed = make_trainer(tmp_path / "stock", **given), make_trainer(tmp_path / "p", speedups=PACKED, **given)
    stock.train()
    packed.train()
    assert largest_weight_difference(packed.model, stock.model) < 1e-6


def test_a_packed_run_that_was_stopped_goes_on_exactly(tmp_path):
    assert resumed_difference(tmp_path / "same", speedups=PACKED) == 0
    assert resumed_difference(tmp_path / "other", seed=4, allow_changed=["seed"], speedups=PACKED) > 1e-3  # other rows


def test_a_token_budget_counts_the_tokens_of_packed_rows(tmp_path):
    given = {"max_tokens_per_batch": 100, "per_device_train_batch_size": 8}
    packed = make_trainer(tmp_path / "packed", speedups=PACKED, **given)
    padded = make_trainer(tmp_path / "padded", **given)
    for trainer in (packed, padded):
        trainer.train()
    sizes = [batch["attention_mask"].sum().item() for batch in packed.get_train_dataloader()]
    assert max(sizes) <= 100
    assert sum(sizes) == sum(make_rows()["length"])
    assert packed.plan["token_budget"].evidence["budget_used"] > 0.8
    assert max(batch["input_ids"].numel() for batch in packed.get_train_dataloader()) > 100
    assert max(batch["input_ids"].numel() for batch in padded.get_train_dataloader()) <= 100


def test_end_gives_the_encoder_its_own_forward_back(tmp_path):
    model = make_wide_esm()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    trainer = make_trainer(tmp_path, model, speedups=PACKED)
    assert "forward" in vars(model.esm)
    trainer.end()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == "sdpa"


def test_packed_encoders_that_differ_are_not_used(tmp_path, monkeypatch):
    # Packing that forgets where each sequence begins, as transformers' own packed inputs do for ESM.
    monkeypatch.setattr("hf_ext.models.packing._for_layers", lambda kwargs, segments: {})
    monkeypatch.setattr("hf_ext.models.packing.keeps_sequences_apart", lambda encoder: True)
    model = make_wide_esm()
    args = make_args(tmp_path, speedups=["all"], without=["cpu_matmul", "precision", "fused_gelu", "masked_lm_head"])
    trainer = FastTrainer(model, args, pad_rows, make_rows())
    decision = trainer.plan["packing"]
    assert decision.status == "skipped"
    assert decision.reason.startswith("against padded encoders: states differ by ")
    assert decision.evidence["max_difference"] > 1e-2
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

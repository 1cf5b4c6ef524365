"""LoRA beside a frozen base in half precision, 8 or 4 bits: what it computes, what it stores, saves and merges."""

import importlib.util

import pytest
import torch
from miniature_esm import make_wide_esm
from run_outcomes import losses, same_tensors, trained_weights
from safetensors.torch import load_file
from tiny_masked_lm import make_rows
from token_rows import pad_rows
from transformers import EsmForMaskedLM

from hf_ext.affinity.predictor import load_model
from hf_ext.errors import ArgumentError, CheckpointError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models.frozen_weights import HalfLinear, quantized_layers
from hf_ext.models.lora import merged_copy
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

FIXED = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 1}
FIXED |= {"per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "no", "learning_rate": 1e-2}
FIXED |= {"lr_scheduler_type": "constant", "use_peft": True, "lora_r": 2}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
HALF = {"speedups": ["precision", "lora_base"]}
EIGHT, FOUR = {"load_in_8bit": True}, {"load_in_4bit": True}
needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="optional")
CODES = [pytest.param(how, id=f"{bits} bits", marks=needs_bitsandbytes) for bits, how in ((8, EIGHT), (4, FOUR))]
STORED = pytest.mark.parametrize("how", [pytest.param(HALF, id="half"), *CODES])


def make_trainer(folder, model, collator, rows, **given):
    args = FastTrainingArguments(output_dir=str(folder), **{**FIXED, **given})
    # Bits are for cards; what bitsandbytes does of them on this CPU will do for a test that does not evaluate.
    hardware = "H100" if args.load_in_8bit or args.load_in_4bit else "cpu-amx-bf16"
    plan = make_plan(args, model, rows, collator, describe_hardware(hardware))
    return FastTrainer(model, args, collator, rows, plan=plan)


@pytest.fixture
def base(tmp_path):
    """A masked language model that was read from a folder."""
    make_wide_esm().save_pretrained(tmp_path / "base", save_original_format=False)

    def read() -> EsmForMaskedLM:
        model = EsmForMaskedLM.from_pretrained(tmp_path / "base")
        model.esm.contact_head.requires_grad_(False)
        return model

    return read


@pytest.fixture
def towers(make_affinity, demo_rows, tmp_path):
    """Makes a trainer of two LoRA towers."""
    return lambda folder, **given: make_trainer(tmp_path / folder, *make_affinity("lora", "lora"), demo_rows, **given)


@pytest.fixture(params=["towers", "masked lm"])
def trainer_for(request, towers, tmp_path, base):
    """Makes a trainer: of two LoRA towers, or of a masked language model that `--use_peft` wraps."""
    if request.param == "towers":
        return towers
    return lambda folder, **given: make_trainer(tmp_path / folder, base(), pad_rows, make_rows(), **given)


def narrow_layers(model) -> list:
    halves = [m for m in model.modules() if isinstance(m, HalfLinear) and m.weight.dtype == torch.bfloat16]
    return halves or list(quantized_layers(model).values())


@pytest.mark.sampled(2)
@STORED
def test_storage_falls_by_the_bytes_that_were_computed_by_hand_and_the_rest_stays_in_float32(trainer_for, how):
    plain, ours = trainer_for("plain"), trainer_for("ours", **how)
    found = ours.plan["lora_base" if how is HALF else "quantized_base"].evidence
    layers = narrow_layers(ours.model)
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    by_hand = {
        "half": 2 * numbers,
        "8": 3 * numbers - 4 * sum(layer.out_features for layer in layers),  # a scale for each row
        "4": 4 * numbers - numbers // 2 - 4 * (numbers // 64),  # and for each 64 numbers
    }["half" if how is HALF else "8" if how is EIGHT else "4"]
    stored = [sum(p.nbytes for p in trainer.model.parameters()) for trainer in (plain, ours)]
    assert found["bytes_saved"] == by_hand
    assert how is not HALF or by_hand == stored[0] - stored[1]  # scales are no parameters
    assert found["layers"] == len(layers) >= 12
    narrow = [name for name, p in ours.model.named_parameters() if p.dtype != torch.float32]
    assert len(narrow) == len(layers)
    assert not any(part in name for name in narrow for part in ("lora_", "LayerNorm", "embeddings", "head"))


@pytest.mark.nightly
def test_losses_are_those_of_a_float_base_that_was_rounded_so_and_of_no_other(trainer_for):
    def train(folder, change=lambda model: None, **given):
        trainer = trainer_for(folder, **given)  # at once: making a trainer sets the seed that its dropout is drawn with
        change(trainer.model)
        trainer.train()
        return trainer

    def round_further(model):
        for layer in narrow_layers(model):
            layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn).to(torch.bfloat16)

    ours, other = train("ours", **HALF), train("other", round_further, **HALF)
    rounded = train("rounded", **HALF, without=["lora_base"])
    assert losses(ours) == losses(rounded)
    assert losses(ours) != losses(other)
    assert same_tensors(trained_weights(ours.model), trained_weights(rounded.model))


@pytest.mark.sampled(4)
@STORED
def test_a_run_goes_on_bit_for_bit(trainer_for, how):
    whole = trainer_for("whole", **SAVING, **how)
    whole.train()
    trainer_for("run", **{**SAVING, "max_steps": 2}, **how).train()
    resumed = trainer_for("run", resume="auto", allow_changed=["max_steps"], **SAVING, **how)
    resumed.train()
    assert losses(resumed) == losses(whole)
    assert same_tensors(trained_weights(resumed.model), trained_weights(whole.model))


def test_another_base_is_still_refused(base, tmp_path):
    make_trainer(tmp_path / "run", base(), pad_rows, make_rows(), **SAVING, **HALF).train()
    other = base()
    other.esm.encoder.layer[0].output.dense.weight.data[0, 0] += 1e-6  # below what half precision can tell
    trainer = make_trainer(tmp_path / "run", other, pad_rows, make_rows(), resume="auto", **SAVING, **HALF)
    with pytest.raises(CheckpointError, match="was trained on frozen weights"):
        trainer.train()


@pytest.mark.nightly
@STORED
def test_no_file_holds_the_base_and_a_float_base_predicts_nearly_the_same(towers, demo_rows, tmp_path, how):
    trainer = towers("run", **{**SAVING, "max_steps": 2}, **how)
    trainer.train()
    rows = demo_rows.select(range(20))
    expected = trainer.predict(rows).predictions
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-2"):
        entries = load_file(folder / "model.safetensors")
        assert any("lora_A" in name for name in entries)
        assert not any("base_layer" in name for name in entries)
        assert {tensor.dtype for tensor in entries.values()} <= {torch.float32, torch.int64, torch.bool}
    loaded = load_model(tmp_path / "saved")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    with torch.no_grad():
        found = loaded.eval()(**trainer.data_collator([rows[i] for i in range(20)])).logits.numpy()
    assert abs(found - expected).max() < 0.1 * expected.std() + 0.02


# --- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@STORED
def test_towers_are_merged_into_the_weights_read_again(make_affinity, towers, how):
    pretrained, _ = make_affinity("lora", "lora")
    trainer = towers("run", **how)
    trainer.train()
    adapters = {name: p for name, p in trainer.model.state_dict().items() if "lora_" in name or "head" in name}
    pretrained.load_state_dict({**pretrained.state_dict(), **adapters})
    expected, merged = merged_copy(pretrained).state_dict(), merged_copy(trainer.model)
    assert all(torch.equal(value, expected[name]) for name, value in merged.state_dict().items() if "encoders" in name)
    assert not narrow_layers(merged)
    assert narrow_layers(trainer.model)  # which goes on as it was


def test_a_half_base_that_cannot_be_read_again_is_merged_as_it_was_rounded_and_says_so(tmp_path, caplog):
    trainer = make_trainer(tmp_path, make_wide_esm(), pad_rows, make_rows(), **HALF)
    merged = merged_copy(trainer.model)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert "they are merged as rounded" in caplog.text


@needs_bitsandbytes
def test_adapters_of_a_wrapped_model_are_not_merged_into_codes(base, tmp_path):
    trainer = make_trainer(tmp_path, base(), pad_rows, make_rows(), **EIGHT)
    with pytest.raises(ArgumentError, match="not merged into weights in 8 or 4 bits: read the base again"):
        merged_copy(trainer.model)


# --- refusals --------------------------------------------------------------------------------------------------------


@needs_bitsandbytes
def test_weights_that_would_be_saved_with_the_model_are_refused(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity("lora", "lora", save_full=True)
    with pytest.raises(PlanRefused, match="--save_full keeps the weights that are saved in float32"):
        make_trainer(tmp_path, model, collator, demo_rows, **EIGHT)
    assert not quantized_layers(model)

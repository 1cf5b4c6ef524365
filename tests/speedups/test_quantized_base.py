"""LoRA beside a frozen base in 8 or 4 bits: what it computes, what it saves, and that nobody writes the codes."""

import copy
import json
import sys

import pytest
import torch
from miniature_esm import make_wide_esm
from run_outcomes import losses, trained_weights
from safetensors.torch import load_file
from tiny_masked_lm import make_rows
from token_rows import pad_rows
from torch import nn
from transformers import EsmForMaskedLM

from hf_ext.affinity.predictor import load_model
from hf_ext.errors import ArgumentError, MissingDependencyError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models.lora import merged_copy
from hf_ext.models.quantization import make_float, quantized_layers
from hf_ext.optional import import_problem
from hf_ext.plan import make_plan
from hf_ext.speedups import quantized_base
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytest.importorskip("bitsandbytes")

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 1}
SMALL = {"per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "no", "learning_rate": 1e-2}
SMALL |= {"lr_scheduler_type": "constant"}
LORA = {"use_peft": True, "lora_r": 2}
EIGHT, FOUR = {"load_in_8bit": True}, {"load_in_4bit": True}


def make_trainer(folder, model, collator, rows, **given):
    args = FastTrainingArguments(output_dir=str(folder), **{**QUIET, **SMALL, **LORA, **given})
    plan = make_plan(args, model, rows, collator, describe_hardware("cpu-amx-bf16"))
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


@pytest.fixture(params=["towers", "masked lm"])
def trainer_for(request, make_affinity, demo_rows, tmp_path, base):
    """Makes a trainer: of two LoRA towers, and of a masked language model that `--use_peft` wraps."""

    def make(folder="run", **given):
        if request.param == "towers":
            return make_trainer(tmp_path / folder, *make_affinity("lora", "lora"), demo_rows, **given)
        return make_trainer(tmp_path / folder, base(), pad_rows, make_rows(), **given)

    make.kind = request.param
    return make


# --- decisions --------------------------------------------------------------------------------------------------------


def decide(make_affinity, training="lora", hardware="T4", **given):
    model, collator = make_affinity(training, training)
    args = FastTrainingArguments(output_dir="o", **{"use_cpu": True, **LORA, **given})
    return make_plan(args, model, None, collator, describe_hardware(hardware))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"training": "full", "use_peft": False}, "give --use_peft, or keep encoders frozen"),
        ({"without": ["quantized_base"]}, "contradict each other"),
        ({"use_dora": True}, "DoRA takes norms"),
        ({"fsdp": True, "fsdp_config": {"version": 2}}, "split frozen weights over the processes instead"),
        (FOUR, "give one of the two"),
    ],
    ids=["full", "without", "dora", "fsdp", "both"],
)
def test_what_would_do_something_else_is_refused_with_the_remedy(make_affinity, given, reason):
    found = decide(make_affinity, **EIGHT, **given)["quantized_base"]
    assert found.status == "refused"
    assert reason in found.reason


def test_weights_that_would_be_saved_with_the_model_are_refused(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity("lora", "lora", save_full=True)
    with pytest.raises(PlanRefused, match="--save_full keeps the weights that are saved in float32"):
        make_trainer(tmp_path, model, collator, demo_rows, **EIGHT)
    assert not quantized_layers(model)


def test_a_gradient_that_is_too_far_off_ends_the_run_before_it_begins(base, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_base, "MAX_GRADIENT_ERROR", 1e-3)
    with pytest.raises(PlanRefused, match=r"in 8 bits the gradient of a layer of 32 x 32 is off by 1%"):
        make_trainer(tmp_path, base(), pad_rows, make_rows(), **EIGHT)


def test_without_bitsandbytes_the_extra_is_named(base, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    import_problem.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"hf_ext\[quantization\]"):
        make_trainer(tmp_path, base(), pad_rows, make_rows(), **EIGHT)
    monkeypatch.undo()
    import_problem.cache_clear()


# --- what is computed, and what is stored -----------------------------------------------------------------------------


def dequantised_twin(trainer) -> nn.Module:
    """The model before training, with plain layers that hold what the codes stand for."""
    twin = copy.deepcopy(trainer.model)
    make_float(twin)
    return twin


@pytest.mark.nightly
# towers in 8 bits and a masked language model in 4
@pytest.mark.parametrize("asked", [EIGHT, FOUR], ids=["8", "4"])
def test_losses_are_those_of_a_float_base_that_was_rounded_so_and_of_no_other(trainer_for, asked):
    ours = trainer_for("ours", **asked)
    twin = dequantised_twin(ours)
    ours.train()
    rounded = trainer_for("rounded")
    rounded.model.load_state_dict(twin.state_dict())
    rounded.train()
    plain = trainer_for("plain")
    plain.train()
    assert losses(ours) == pytest.approx(losses(rounded), abs=1e-6)
    assert len(losses(ours)) == 3
    assert max(abs(a - b) for a, b in zip(losses(ours), losses(plain))) > 1e-5
    ours, rounded = trained_weights(ours.model), trained_weights(rounded.model)
    assert all((ours[name] - rounded[name]).abs().max() < 1e-4 for name in ours)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("asked", "bits"), [(EIGHT, 8), (FOUR, 4)])
def test_storage_falls_by_the_bytes_that_were_computed_by_hand(trainer_for, asked, bits):
    def stored(model) -> int:
        return sum(p.nbytes for p in model.parameters())

    plain, ours = trainer_for("plain"), trainer_for("ours", **asked)
    found = ours.plan["quantized_base"].evidence
    layers = quantized_layers(ours.model).values()
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    scales = sum(layer.out_features if bits == 8 else layer.in_features * layer.out_features // 64 for layer in layers)
    by_hand = 4 * numbers - (numbers * bits // 8 + 4 * scales)
    assert found["bytes_saved"] == by_hand == stored(plain.model) - stored(ours.model)
    assert found["layers"] == len(layers) >= 12
    assert 0 < found["layer_error"] < (0.02 if bits == 8 else 0.3)


# --- checkpoints ------------------------------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


@pytest.mark.sampled(6)  # towers in 8 bits and a masked language model in 4
@pytest.mark.parametrize("asked", [EIGHT, FOUR], ids=["8", "4"])
def test_a_killed_run_goes_on_bit_for_bit(trainer_for, asked):
    whole = trainer_for("whole", **SAVING, **asked)
    whole.train()
    trainer_for("run", **{**SAVING, "max_steps": 2}, **asked).train()
    resumed = trainer_for("run", resume="auto", allow_changed=["max_steps"], **SAVING, **asked)
    resumed.train()
    assert losses(resumed) == losses(whole)
    ours, theirs = trained_weights(resumed.model), trained_weights(whole.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.nightly
def test_neither_checkpoint_nor_export_holds_a_code(trainer_for, tmp_path):
    trainer = trainer_for("run", **{**SAVING, "max_steps": 2}, **EIGHT)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    files = [*(tmp_path / "run" / "checkpoint-2").glob("*.safetensors"), *(tmp_path / "saved").glob("*.safetensors")]
    assert len(files) >= 4
    entries = {
        name: t for file in files if "model" in file.name or "train" in file.name for name, t in load_file(file).items()
    }
    assert any("lora_A" in name for name in entries)
    assert not any("base_layer" in name and name.endswith("weight") for name in entries)
    assert {tensor.dtype for tensor in entries.values()} <= {torch.float32, torch.int64, torch.bool}


# --- afterwards: in float32, and merged ------------------------------------------------------------------------------


@pytest.mark.nightly
def test_adapters_of_towers_predict_nearly_the_same_on_a_float_base(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity("lora", "lora")
    trainer = make_trainer(tmp_path / "run", model, collator, demo_rows, **EIGHT)
    trainer.train()
    rows = demo_rows.select(range(20))
    expected = trainer.predict(rows).predictions
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["encoder_bits"] is None
    loaded = load_model(tmp_path / "saved")
    assert not quantized_layers(loaded)
    with torch.no_grad():
        found = loaded.eval()(**collator([rows[i] for i in range(20)])).logits.numpy()
    assert 0 < abs(found - expected).max() < 0.1 * expected.std() + 0.02


@pytest.mark.nightly
def test_towers_are_merged_into_the_weights_read_again(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity("lora", "lora")
    pretrained = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, model, collator, demo_rows, **FOUR)
    trainer.train()
    adapters = {name: p for name, p in trainer.model.state_dict().items() if "lora_" in name or "head" in name}
    pretrained.load_state_dict({**pretrained.state_dict(), **adapters})
    expected = merged_copy(pretrained).state_dict()
    merged = merged_copy(trainer.model).state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())
    assert quantized_layers(trainer.model)  # which goes on as it was


def test_a_wrapped_model_is_merged_into_its_own_float_weights_and_loads_without_bitsandbytes(
    base, tmp_path, monkeypatch
):
    trainer = make_trainer(tmp_path / "run", base(), pad_rows, make_rows(), **FOUR)
    trainer.train()
    trainer.save_merged(tmp_path / "merged")
    plain = make_trainer(tmp_path / "plain", base(), pad_rows, make_rows())
    plain.model.load_state_dict(trained_weights(trainer.model), strict=False)
    expected = merged_copy(plain.model).state_dict()
    for name in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    found = EsmForMaskedLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert any(not torch.equal(value, base().state_dict()[name]) for name, value in found.items())


def test_what_cannot_be_read_again_is_not_merged(base, tmp_path):
    made_here = make_trainer(tmp_path / "a", make_wide_esm(), pad_rows, make_rows(), **EIGHT)
    with pytest.raises(ArgumentError, match="it was made here"):
        merged_copy(made_here.model)
    trainer = make_trainer(tmp_path / "b", base(), pad_rows, make_rows(), **EIGHT)
    make_wide_esm(seed=5).save_pretrained(tmp_path / "base", save_original_format=False)
    with pytest.raises(ArgumentError, match="holds other weights now"):
        merged_copy(trainer.model)
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(ArgumentError, match="cannot be read"):
        merged_copy(trainer.model)

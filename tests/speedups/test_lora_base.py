"""LoRA's frozen base in half precision: the numbers of autocast, 2 bytes a weight, and merged in float32."""

import copy

import pytest
import torch
from miniature_esm import make_wide_esm
from run_outcomes import losses, trained_weights
from safetensors.torch import load_file
from tiny_masked_lm import make_rows
from token_rows import pad_rows

from hf_ext.affinity.predictor import load_model
from hf_ext.errors import CheckpointError
from hf_ext.hardware import describe_hardware
from hf_ext.models.half_linear import HalfLinear, narrow
from hf_ext.models.lora import merged_copy
from hf_ext.models.wrapping import find_base_layers
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

AMX = "cpu-amx-bf16"
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 1}
SMALL = {"per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "no", "learning_rate": 1e-2}
SMALL |= {"lr_scheduler_type": "constant"}
LORA = {"use_peft": True, "lora_r": 2, "speedups": ["precision", "lora_base"]}


def make_trainer(folder, model, collator, rows, hardware=AMX, **given):
    args = FastTrainingArguments(output_dir=str(folder), **{**QUIET, **SMALL, **LORA, **given})
    plan = make_plan(args, model, rows, collator, describe_hardware(hardware))
    return FastTrainer(model, args, collator, rows, plan=plan)


@pytest.fixture(params=["towers", "masked lm"])
def trainer_for(request, make_affinity, demo_rows, tmp_path):
    """Makes a trainer: of two LoRA towers, and of a masked language model that `--use_peft` wraps."""

    def make(folder="run", **given):
        if request.param == "towers":
            return make_trainer(tmp_path / folder, *make_affinity("lora", "lora"), demo_rows, **given)
        return make_trainer(tmp_path / folder, make_wide_esm(), pad_rows, make_rows(), **given)

    make.kind = request.param
    return make


# --- decisions --------------------------------------------------------------------------------------------------------


def decide(make_affinity, hardware="T4", training="lora", **given):
    model, collator = make_affinity(training, training)
    args = FastTrainingArguments(output_dir="o", **{"use_cpu": True, **LORA, **given})
    return make_plan(args, model, None, collator, describe_hardware(hardware))["lora_base"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("card", "dtype"), [("T4", "fp16"), ("A100", "bf16"), (AMX, "bf16")])
def test_it_applies_where_training_runs_under_autocast(make_affinity, card, dtype):
    found = decide(make_affinity, card)
    assert (found.status, found.settings, found.kind) == ("applied", {"dtype": dtype}, "I")
    assert decide(make_affinity, card, use_peft=False).status == "applied"  # towers that have adapters
    assert decide(make_affinity, card, speedups=[]).status == "off"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"hardware": "cpu"}, "nothing is computed in half precision"),
        ({"without": ["precision"]}, "nothing is computed in half precision"),
        ({"use_dora": True}, "DoRA takes norms"),
        ({"training": "full", "use_peft": False}, "no LoRA"),
        ({"fsdp": True, "fsdp_config": {"version": 2}}, "the weights are spread over processes"),
    ],
    ids=["plain CPU", "float32", "dora", "no lora", "fsdp"],
)
def test_it_is_skipped_with_the_reason(make_affinity, given, reason):
    found = decide(make_affinity, **given)
    assert found.status == "skipped"
    assert reason in found.reason


# --- the same numbers, fewer bytes ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_losses_and_adapters_are_those_of_a_float32_base_bit_for_bit(trainer_for):
    plain = trainer_for("plain", without=["lora_base"])
    assert plain.plan["lora_base"].status == "off"
    plain.train()
    half = trainer_for("half")
    decision = half.plan["lora_base"]
    assert decision.status == "applied"
    assert decision.evidence["bytes_saved"] == sum(m.weight.nbytes for m in half.model.modules() if is_half(m)) > 0
    assert decision.evidence["layers"] == sum(map(is_half, half.model.modules()))
    half.train()
    assert losses(half) == losses(plain)
    assert len(losses(half)) == 3
    ours, theirs = trained_weights(half.model), trained_weights(plain.model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}


def is_half(module) -> bool:
    return isinstance(module, HalfLinear) and module.weight.dtype == torch.bfloat16


def saved_for_backward(model, batch) -> list[torch.Tensor]:
    found = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)
    del output
    return found


def test_no_copy_of_a_frozen_weight_is_kept_for_backward(make_affinity, demo_rows):
    model, collator = make_affinity("lora", "lora")
    batch = collator([demo_rows[i] for i in range(3)])
    layers = find_base_layers(model)
    shapes = {tuple(layer.weight.shape) for layer in layers} | {tuple(layer.weight.shape)[::-1] for layer in layers}

    def copies() -> int:
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = {t.untyped_storage().data_ptr(): t for t in saved_for_backward(model, batch)}
        return sum(tuple(t.shape) in shapes for pointer, t in kept.items() if pointer not in own)

    assert copies() >= len(layers)
    narrow(layers, torch.bfloat16)
    assert copies() == 0


def test_what_trains_heads_norms_and_embeddings_stay_in_float32(trainer_for):
    model = trainer_for().model
    halves = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert halves
    assert all(name.endswith("weight") and ".layer." in name for name in halves)
    assert not any(part in name for name in halves for part in ("lora_", "LayerNorm", "embeddings", "head", "lm_head"))


# --- saving, merging, resuming ----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_saved_model_predicts_as_it_did_from_a_float32_base(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity("lora", "lora")
    trainer = make_trainer(tmp_path / "run", model, collator, demo_rows)
    trainer.train()
    rows = demo_rows.select(range(20))
    expected = trainer.predict(rows).predictions
    trainer.save_model(str(tmp_path / "saved"))
    assert not any("base_layer" in name for name in load_file(tmp_path / "saved" / "model.safetensors"))
    trainer.end()
    loaded = load_model(tmp_path / "saved")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    with torch.no_grad():
        found = loaded.eval()(**collator([rows[i] for i in range(20)])).logits.numpy()
    assert abs(found - expected).max() < 0.03 * expected.std() + 0.02


@pytest.mark.nightly
def test_towers_are_merged_in_float32_into_the_weights_read_again(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity("lora", "lora")
    pretrained = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, model, collator, demo_rows)
    trainer.train()
    adapters = {name: p for name, p in trainer.model.state_dict().items() if "lora_" in name or "head" in name}
    pretrained.load_state_dict({**pretrained.state_dict(), **adapters})
    expected = merged_copy(pretrained).state_dict()
    merged = merged_copy(trainer.model)
    assert all(torch.equal(value, expected[name]) for name, value in merged.state_dict().items() if "encoders" in name)
    assert not any(isinstance(module, HalfLinear) for module in merged.modules())
    assert any(isinstance(module, HalfLinear) for module in trainer.model.modules())  # which goes on as it was


def test_a_wrapped_model_is_merged_in_float32_as_it_was_rounded_and_says_so(tmp_path, caplog):
    trainer = make_trainer(tmp_path, make_wide_esm(), pad_rows, make_rows())
    trainer.train()
    merged = merged_copy(trainer.model)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert not any(isinstance(module, HalfLinear) for module in merged.modules())
    assert "they are merged as rounded" in caplog.text
    batch = pad_rows([make_rows()[i] for i in range(4)])
    with torch.no_grad():
        ours, theirs = merged.eval()(**batch).logits, trainer.model.eval()(**batch).logits
    assert (ours - theirs).abs().max() < 0.1 * theirs.std()  # the trained model computes under autocast


@pytest.mark.sampled(2)
def test_a_killed_run_goes_on_bit_for_bit(trainer_for):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trainer_for("whole", **saving)
    whole.train()
    trainer_for("run", **{**saving, "max_steps": 2}).train()
    resumed = trainer_for("run", resume="auto", allow_changed=["max_steps"], **saving)
    resumed.train()
    assert losses(resumed) == losses(whole)
    ours, theirs = trained_weights(resumed.model), trained_weights(whole.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_base_is_still_refused(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    make_trainer(tmp_path, make_wide_esm(), pad_rows, make_rows(), **saving).train()
    other = make_wide_esm()
    other.esm.encoder.layer[0].output.dense.weight.data[0, 0] += 1e-6  # below what half precision can tell
    trainer = make_trainer(tmp_path, other, pad_rows, make_rows(), resume="auto", **saving)
    with pytest.raises(CheckpointError, match="was trained on frozen weights"):
        trainer.train()

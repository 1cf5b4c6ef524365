"""QLoRA by flags: adapters beside weights in 4 bits; what is stored, learned, saved, predicted, merged and refused."""

import numpy as np
import pytest
import torch
from doctored import gather_facts, main
from miniature_esm import make_esm
from peft.utils.integrations import dequantize_module_weight
from run_outcomes import losses, same_tensors, trained_weights
from safetensors.torch import load_file
from token_rows import pad_rows
from transformers import EsmForSequenceClassification

from hf_ext.errors import CheckpointError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models import merged_copy
from hf_ext.property import AffinityPredictor
from hf_ext.speedups import Context, describe_model, find_speedup
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.internals
FLAGS = {"use_peft": True, "load_in_4bit": True}
FIXED = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 1, "lora_r": 2}
FIXED |= {"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
FIXED |= {"save_steps": 2}
# Of two encoders, in two layers: four matrices of attention, 64 x 64, and two of feed-forward, 64 x 128.
NUM_WEIGHTS = 2 * 2 * (4 * 64 * 64 + 2 * 64 * 128)


@pytest.fixture
def towers(make_affinity, demo_rows, tmp_path):
    """Makes a trainer of two LoRA towers."""

    def make(folder, **given):
        args = FastTrainingArguments(str(tmp_path / folder), **{**FIXED, **FLAGS, **given})
        model, collator = make_affinity("lora", "lora")
        return FastTrainer(model, args, collator, demo_rows)

    return make


def coded(model) -> list:
    return [module for module in model.modules() if type(module).__name__ == "CodedLinear"]


def decode(model) -> int:
    layers = coded(model)
    for layer in layers:
        layer.weight = torch.nn.Parameter(dequantize_module_weight(layer).data.clone(), requires_grad=False)
        layer.__class__ = torch.nn.Linear
    return len(layers)


def test_weights_take_half_a_byte_and_adapters_learn_in_float32(towers):
    trainer = towers("run", max_steps=2, save_strategy="no")
    before = trained_weights(trainer.model)
    assert trainer.plan["lora_4bit"].evidence == {"bytes_saved": NUM_WEIGHTS * 7 // 2}
    assert sum(layer.weight.nbytes for layer in coded(trainer.model)) == NUM_WEIGHTS // 2
    trainer.train()
    after = trained_weights(trainer.model)
    moved = [name for name in after if "lora_" in name and not torch.equal(before[name], after[name])]
    assert len(moved) == 2 * 24  # both matrices of each of six layers, twice, in two encoders
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}


def test_a_run_learns_beside_the_codes_and_goes_on_bit_for_bit(towers):
    whole = towers("whole")
    whole.train()
    decoded = towers("decoded", save_strategy="no")
    assert decode(decoded.model) == 24
    decoded.train()
    assert losses(decoded) == pytest.approx(losses(whole), rel=1e-5)
    plain = towers("plain", load_in_4bit=False, save_strategy="no")
    plain.train()
    assert losses(plain) != pytest.approx(losses(whole), rel=1e-5)
    towers("run", max_steps=2).train()
    resumed = towers("run", resume="auto", allow_changed=["max_steps"])
    resumed.train()
    assert losses(resumed) == losses(whole)
    assert same_tensors(trained_weights(resumed.model), trained_weights(whole.model))
    with pytest.raises(CheckpointError, match="4bit"):
        towers("run", resume="auto", load_in_4bit=False, allow_changed=["max_steps"], max_steps=6).train()


def test_files_hold_adapters_and_predictions_are_beside_the_same_codes(towers, demo_rows, tmp_path):
    trainer = towers("run", max_steps=2)
    trainer.train()
    rows = demo_rows.select(range(20))
    expected = np.asarray(trainer.predict(rows).predictions).reshape(-1)
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-2"):
        names = [*load_file(folder / "model.safetensors")]
        assert any("lora_A" in name for name in names)
        assert not any("base_layer" in name for name in names)
    trainer.data_collator.save_pretrained(tmp_path / "saved")
    predictor = AffinityPredictor.from_pretrained(tmp_path / "saved")
    assert predictor.model.config.base_bits == 4
    assert np.allclose(predictor.predict(rows), expected, atol=1e-4)
    merged = merged_copy(trainer.model)
    assert (merged.config.base_bits, coded(merged)) == (None, [])
    with torch.no_grad():
        found = merged.eval()(**trainer.data_collator([rows[i] for i in range(20)])).logits.numpy()
    assert np.allclose(found, expected, atol=1e-4)
    decode(predictor.model)
    for layer in predictor.model.modules():  # a base that is a little otherwise
        if type(layer) is torch.nn.Linear and not layer.weight.requires_grad:
            layer.weight.data *= 1.05
    assert not np.allclose(predictor.predict(rows), expected, atol=1e-4)


def test_what_cannot_be_is_refused_by_name(towers, make_affinity):
    adapted = make_affinity("lora", "lora")[0]

    def decide(hardware="T4", name="lora_4bit", model=adapted, **given):
        args = FastTrainingArguments("o", **{**FLAGS, **given})
        return find_speedup(name).decide(Context(describe_hardware(hardware), args, describe_model(model)))

    assert {decide(card).status for card in ("T4", "A100", "cpu")} == {"applied"}
    assert decide(load_in_4bit=False).status == decide(use_peft=False).status == "off"
    assert "bitsandbytes trains no 4-bit weights on MPS" in decide("mps").reason
    assert "leave out --find_batch_size" in decide(find_batch_size=True).reason
    assert "DoRA takes the norms of weights" in decide(lora_kwargs={"use_dora": True}).reason
    assert decide(name="encoder_precision").status == "skipped"
    other = decide(name="encoder_precision", model=make_esm(EsmForSequenceClassification))
    assert other.status == "refused"
    assert "for the towers of hf-ext train" in other.reason
    with pytest.raises(PlanRefused, match="--load_in_8bit is for frozen encoders"):
        towers("eight", load_in_4bit=False, load_in_8bit=True)
    args = FastTrainingArguments("o", **FIXED, **FLAGS)
    with pytest.raises(PlanRefused, match=r"peft\.get_peft_model"):
        FastTrainer(make_esm(EsmForSequenceClassification), args, pad_rows)


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["t4", "a100"])
def test_the_doctor_counts_half_a_byte_and_the_scales(device):
    coded, half = (main(gather_facts(device, use_peft=True, load_in_4bit=bits)).memory for bits in (True, False))
    # 1/2 of codes, 1/64 of scales, 4 bytes for each 256 of these; half precision has 2.
    saved = NUM_WEIGHTS * (2 - 0.5 - 1 / 64 - 4 / (64 * 256))
    assert half.forecast.weights - coded.forecast.weights == pytest.approx(saved, abs=2)
    assert half.forecast.activations == coded.forecast.activations

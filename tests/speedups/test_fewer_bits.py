"""LoRA, and weights and optimizer states in fewer bits: what is stored, computed, saved, merged and refused."""

import sys

import numpy as np
import pytest
import torch
from datasets import Dataset
from miniature_esm import make_esm, make_wide_esm
from peft import PeftModel
from run_outcomes import losses, same_tensors, trained_weights
from safetensors.torch import load_file
from tiny_masked_lm import make_rows
from token_rows import pad_rows
from transformers import EsmForMaskedLM, EsmForSequenceClassification, default_data_collator

from hf_ext.baselines.embedded import encode_as_before
from hf_ext.errors import CheckpointError, MissingDependencyError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models import LoraSettings, merged_copy, wrap_with_lora
from hf_ext.models.lora import HalfLinear
from hf_ext.optional import import_problem
from hf_ext.plan import make_plan
from hf_ext.property import AffinityPredictor, load_model
from hf_ext.speedups import encoder_precision
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

ROWS = Dataset.from_dict({"input_ids": [[0, 5, 6, 7, 8 + i, 2] for i in range(8)], "labels": [0, 1] * 4})


@pytest.fixture
def trainer_of(tmp_path):
    def make(model=None, rows=ROWS, collator=default_data_collator, **given):
        args = FastTrainingArguments(str(tmp_path), **{"use_cpu": True, "use_peft": True, "lora_r": 2, **given})
        return FastTrainer(model or make_esm(EsmForSequenceClassification), args, collator, rows)

    return make


def test_a_plain_model_is_wrapped_and_the_plan_counts_what_trains(trainer_of):
    plain = make_esm(EsmForSequenceClassification)
    trainer = trainer_of(plain)
    decision = trainer.plan["lora"]
    assert isinstance(trainer.model, PeftModel)
    assert (decision.evidence["rank"], decision.evidence["adapted_layers"]) == (2, 6)
    # r=2 on a layer of 16 x 16: 2 * (16 + 16) = 64, four of them; on 16 x 32 and 32 x 16: 2 * 48 = 96 each: 448 in all.
    # The classifier: 16 * 16 + 16 + 16 * 2 + 2 = 306. AdamW keeps 8 bytes of each.
    assert decision.evidence["adamw_bytes"] == 6032
    assert f": 754 of {sum(p.numel() for p in trainer.model.parameters()):,} parameters train" in decision.reason


def test_adapters_follow_the_seed_of_the_arguments_and_not_what_ran_before(trainer_of):
    def weights(seed, before):
        torch.manual_seed(before)
        state = trainer_of(seed=seed).model.state_dict()
        return torch.cat([value.flatten() for name, value in state.items() if "lora_A" in name])

    assert torch.equal(weights(3, before=1), weights(3, before=2))
    assert not torch.equal(weights(3, before=1), weights(4, before=1))


def test_a_model_that_brings_its_adapters_is_not_wrapped_again(trainer_of, make_affinity, demo_rows):
    own = wrap_with_lora(make_esm(EsmForSequenceClassification), LoraSettings(r=3))
    trainer = trainer_of(own)
    assert trainer.model is own
    assert trainer.plan["lora"].evidence["rank"] == 3  # the model's, not that of the arguments
    model, collator = make_affinity("frozen", "lora")
    trainer = trainer_of(model, demo_rows, collator)
    assert trainer.model is model
    assert trainer.plan["lora"].evidence["adapted_layers"] == 12
    with pytest.raises(PlanRefused, match="no tower of this model has adapters: build it with --tower_training lora"):
        trainer_of(make_affinity("full", "full")[0], demo_rows, collator)


FIXED = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 1}
FIXED |= {"per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "no", "learning_rate": 1e-2}
FIXED |= {"lr_scheduler_type": "constant", "use_peft": True, "lora_r": 2}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
HALF = {"speedups": ["precision", "lora_base"]}
EIGHT = {"load_in_8bit": True}


def make_trainer(folder, model, collator, rows, **given):
    args = FastTrainingArguments(output_dir=str(folder), **{**FIXED, **given})
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
    return [m for m in model.modules() if isinstance(m, HalfLinear) and m.weight.dtype == torch.bfloat16]


def test_storage_falls_by_the_bytes_that_were_computed_by_hand_and_the_rest_stays_in_float32(trainer_for):
    plain, ours = trainer_for("plain"), trainer_for("ours", **HALF)
    found = ours.plan["lora_base"].evidence
    layers = narrow_layers(ours.model)
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    stored = [sum(p.nbytes for p in trainer.model.parameters()) for trainer in (plain, ours)]
    assert found["bytes_saved"] == 2 * numbers == stored[0] - stored[1]
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


@pytest.mark.sampled(2)
def test_a_run_goes_on_bit_for_bit(trainer_for):
    whole = trainer_for("whole", **SAVING, **HALF)
    whole.train()
    trainer_for("run", **{**SAVING, "max_steps": 2}, **HALF).train()
    resumed = trainer_for("run", resume="auto", allow_changed=["max_steps"], **SAVING, **HALF)
    resumed.train()
    assert losses(resumed) == losses(whole)
    assert same_tensors(trained_weights(resumed.model), trained_weights(whole.model))


def test_another_base_is_still_refused(base, tmp_path):
    make_trainer(tmp_path / "run", base(), pad_rows, make_rows(), **SAVING, **HALF).train()
    other = base()
    other.esm.encoder.layer[0].output.dense.weight.data[0, 0] += 1e-6  # below what half precision can tell
    trainer = make_trainer(tmp_path / "run", other, pad_rows, make_rows(), resume="auto", **SAVING, **HALF)
    with pytest.raises(CheckpointError, match="was trained on other frozen weights"):
        trainer.train()


@pytest.mark.nightly
def test_towers_are_merged_into_the_weights_read_again(make_affinity, towers):
    pretrained, _ = make_affinity("lora", "lora")
    trainer = towers("run", **HALF)
    trainer.train()
    adapters = {name: p for name, p in trainer.model.state_dict().items() if "lora_" in name or "head" in name}
    pretrained.load_state_dict({**pretrained.state_dict(), **adapters})
    expected, merged = merged_copy(pretrained).state_dict(), merged_copy(trainer.model)
    assert all(torch.equal(value, expected[name]) for name, value in merged.state_dict().items() if "encoders" in name)
    assert not narrow_layers(merged)
    assert narrow_layers(trainer.model)  # which goes on as it was


@pytest.mark.nightly
def test_no_file_holds_the_base_and_a_float_base_predicts_nearly_the_same(towers, demo_rows, tmp_path):
    trainer = towers("run", **{**SAVING, "max_steps": 2}, **HALF)
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


def test_baselines_read_pretrained_encoders_in_half_precision_if_rounding_allows(towers, demo_rows, monkeypatch):
    sequences = [*dict.fromkeys(demo_rows["antigen"])][:8]
    plain, half = towers("plain"), towers("half", speedups=["precision"])
    exact, rounded = (encode_as_before(each, demo_rows)("antigen", sequences) for each in (plain, half))
    assert 0 < (rounded - exact).norm() < 0.02 * exact.norm()
    monkeypatch.setattr(encoder_precision, "MAX_NOISE", 1e-6)
    assert torch.allclose(encode_as_before(half, demo_rows)("antigen", sequences), exact, atol=1e-6)


pytest.importorskip("bitsandbytes")

QUIET_HEAD = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 1,
    "save_strategy": "no",
    "max_steps": 2,
}
WIDE = {"bound": 1.0}
CACHED = {"speedups": ["embedding_cache"]}


def make_encoding_trainer(folder, model, collator, rows, hardware="cpu", bound=None, **given):
    settings = {"output_dir": str(folder), "embedding_cache_dir": str(folder.parent / "cache")}
    args = FastTrainingArguments(**{**settings, **QUIET_HEAD, **given})
    plan = make_plan(args, model, rows, collator, describe_hardware(hardware))
    if bound is not None:
        plan["encoder_precision"].settings["max_noise"] = bound
    return FastTrainer(model, args, collator, rows, plan=plan)


@pytest.mark.nightly
def test_the_noise_is_measured_and_decides(make_affinity, demo_rows, tmp_path):
    trainer = make_encoding_trainer(tmp_path / "run", *make_affinity(), demo_rows, **EIGHT, **WIDE)
    found = trainer.plan["encoder_precision"]
    assert found.status == "applied"
    assert set(found.evidence["noise_share"]) == {"heavy", "light", "antigen"}
    assert all(0 < share < 0.2 for share in found.evidence["noise_share"].values())
    model = make_affinity()[0]
    with pytest.raises(PlanRefused, match=r"8 bit noise on '\w+' is \d+% .*: leave out --load_in_8bit"):
        make_encoding_trainer(tmp_path / "other", model, trainer.data_collator, demo_rows, bound=1e-4, **EIGHT)
    assert (model.config.encoder_bits, model.config.encoder_autocast) == (None, None)


def test_the_cache_tells_bits_apart_and_gives_what_is_computed_live(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity()
    plain = make_encoding_trainer(tmp_path / "a", model, collator, demo_rows, **CACHED)
    ours = make_encoding_trainer(tmp_path / "b", make_affinity()[0], collator, demo_rows, **CACHED, **EIGHT, **WIDE)
    sequences = [*dict.fromkeys(demo_rows["antigen"])][:6]
    exact, stored = (trainer.encode_distinct("antigen", sequences) for trainer in (plain, ours))
    assert ours.embedding_key("antigen") == {**plain.embedding_key("antigen"), "bits": 8}
    assert not torch.equal(exact, stored)
    live = ours.encode_sequences("antigen", sequences)
    assert torch.allclose(live, stored, atol=1e-5)
    assert not torch.allclose(live, exact, atol=1e-5)


@pytest.fixture
def trained(make_affinity, demo_rows, tmp_path):
    """A folder of a model that was trained on embeddings of 8 bits, and what it predicted."""
    trainer = make_encoding_trainer(tmp_path / "run", *make_affinity(), demo_rows, **CACHED, **EIGHT, **WIDE)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.data_collator.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", np.asarray(trainer.predict(demo_rows.select(range(20))).predictions).reshape(-1)


@pytest.mark.nightly
def test_a_saved_model_predicts_from_the_embeddings_that_it_was_trained_on(trained, demo_rows):
    folder, expected = trained
    predictor = AffinityPredictor.from_pretrained(folder)
    assert predictor.model.config.encoder_bits == 8
    rows = demo_rows.select(range(20))
    assert np.allclose(predictor.predict(rows), expected, atol=1e-4)
    other = AffinityPredictor.from_pretrained(folder)
    other.model.config.encoder_bits = None  # as if nobody had kept it
    other.model.release_encoders()
    assert not np.allclose(other.predict(rows), expected, atol=1e-4)


pytestmark = [pytest.mark.internals, pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")]

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 1}
SMALL = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}


def make_coded_trainer(folder, collator=pad_rows, **given):
    """Matrices of 64 x 64 and above, 4,096 numbers: those get 8-bit states."""
    args = FastTrainingArguments(output_dir=str(folder), **{**QUIET, **SMALL, **SAVING, **given})
    model = make_wide_esm(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    return FastTrainer(model, args, collator, make_rows(32))


def states(trainer) -> set[torch.dtype]:
    return {state["state1"].dtype for state in trainer.optimizer.state.values()}


def test_the_states_on_disk_are_codes_maps_and_scales(tmp_path):
    trainer = make_coded_trainer(tmp_path, optim="adamw_8bit", max_steps=2)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    tensors = [t for state in states for kept in state.values() if isinstance(kept, dict) for t in kept.values()]
    coded = sum(t.numel() for t in tensors if getattr(t, "dtype", None) == torch.uint8)
    assert coded == 2 * (5 * 64 * 64 + 2 * 64 * 128)  # four matrices of attention, lm_head's, two of feed-forward
    plain = make_coded_trainer(tmp_path / "plain", max_steps=2)
    plain.train()
    ours, theirs = (
        f.stat().st_size for f in (checkpoint / "optimizer.pt", tmp_path / "plain" / "checkpoint-2" / "optimizer.pt")
    )
    assert ours < 0.6 * theirs


def test_muon_takes_adamw_alone(tmp_path):
    with pytest.raises(
        PlanRefused, match="would need --optim adamw_torch_fused or adamw_torch, and --optim adamw_8bit"
    ):
        make_coded_trainer(tmp_path, optim="adamw_8bit", speedups="muon")


def test_without_bitsandbytes_the_extra_is_named_before_anything_is_built(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    import_problem.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"needed for --optim lion_8bit.*hf_ext\[quantization\]"):
        make_coded_trainer(tmp_path, optim="lion_8bit")
    monkeypatch.undo()
    import_problem.cache_clear()

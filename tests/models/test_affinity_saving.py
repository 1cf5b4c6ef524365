import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_affinity import make_batch, make_model, predict, shift
from tiny_t5 import write_t5_encoder
from transformers import AutoModel

from hf_ext.errors import ArgumentError
from hf_ext.models import AffinityModel, LoraSettings


@pytest.fixture
def folders(demo_encoders, tmp_path):
    """Copies that a test may change: paths of a BERT, a T5 and an ESM encoder."""
    copies = [tmp_path / "bert", tmp_path / "t5", tmp_path / "esm"]
    shutil.copytree(demo_encoders[0], copies[0])
    write_t5_encoder(copies[1])
    shutil.copytree(demo_encoders[1], copies[2])
    return [str(copy) for copy in copies]


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(Path(folder) / "model.safetensors")


def change(file, name_part):
    """Adds 1 to the first tensor of a safetensors file whose name contains `name_part`."""
    tensors = load_file(file)
    name = next(name for name in tensors if name_part in name)
    tensors[name] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def assert_reload_predicts_the_same(model, folder):
    again, info = AffinityModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not again.training
    batch = make_batch(model)
    torch.testing.assert_close(predict(again, batch), predict(model, batch), rtol=0, atol=1e-6)
    assert trainable_names(again) == trainable_names(model)
    return again


def trainable_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("settings", [{}, {"save_full": True}])
@pytest.mark.parametrize("training", ["frozen", "lora", "full"])
def test_a_saved_model_reads_back_with_every_weight_and_the_same_predictions(folders, tmp_path, training, settings):
    model = make_model(folders, training, label_mean=7.0, label_std=1.5, loss="huber", **settings)
    assert shift(model, "lora_B" if training == "lora" else "head") > 0
    if training == "full":
        shift(model, "encoders")
    saved(model, tmp_path / "model")
    again = assert_reload_predicts_the_same(model, tmp_path / "model")
    assert (again.config.label_mean, again.config.label_std, again.config.loss) == (7.0, 1.5, "huber")


def test_a_changed_tensor_in_the_file_is_told_apart(folders, tmp_path):
    model = make_model(folders, "lora")
    saved(model, tmp_path / "model")
    change(tmp_path / "model" / "model.safetensors", "intermediate.dense.lora_B")
    with pytest.raises(AssertionError):
        assert_reload_predicts_the_same(model, tmp_path / "model")


def test_frozen_encoders_and_weights_under_adapters_are_not_in_the_file(folders, tmp_path):
    model = make_model(folders)
    predict(model, make_batch(model))  # loads them
    names = set(saved(model, tmp_path / "model"))
    assert {name.split(".")[0] for name in names} == {"head"}
    assert {"head.input_mean", "head.input_scale", "head.layers.0.weight"} <= names
    names = list(saved(make_model(folders, "lora", lora=LoraSettings(kwargs={"use_dora": True})), tmp_path / "adapted"))
    assert all(name.startswith("head.") or "lora_" in name for name in names)
    assert any("lora_magnitude_vector" in name for name in names)


def test_a_changed_encoder_is_refused_when_it_is_needed(folders, tmp_path):
    saved(make_model(folders), tmp_path / "frozen")
    saved(make_model(folders, "lora"), tmp_path / "lora")
    change(Path(folders[2]) / "model.safetensors", "word_embeddings")
    again = AffinityModel.from_pretrained(tmp_path / "frozen")
    with pytest.raises(ArgumentError, match=r"has changed: its weights hash to sha256:.*Restore the folder"):
        again.attach_encoders()
    with pytest.raises(ArgumentError, match="has changed"):
        AffinityModel.from_pretrained(tmp_path / "lora")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("training", "settings"), [("full", {}), ("frozen", {"save_full": True}), ("lora", {"save_full": True})]
)
def test_a_model_with_all_its_weights_needs_no_encoder_folder(folders, tmp_path, training, settings):
    model = make_model(folders, training, **settings)
    batch = make_batch(model)
    expected = predict(model, batch)
    saved(model, tmp_path / "model")
    for folder in folders:
        shutil.rmtree(folder)
    assert torch.equal(predict(AffinityModel.from_pretrained(tmp_path / "model"), batch), expected)


def after_raw_resume(model, tensors):
    """What `Trainer` does on resume and for the best model: a bare `load_state_dict` into a model of other weights."""
    fresh = make_model([spec.name_or_path for spec in model.config.encoder_specs], "full")
    shift(fresh)
    fresh.load_state_dict(tensors, strict=False)
    other = fresh.state_dict()
    return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, other[name])]


def test_esm_layer_norms_survive_the_trainers_raw_load(folders, tmp_path):
    model = make_model(folders, "full")
    shift(model, "LayerNorm")
    tensors = saved(model, tmp_path / "model")
    assert "encoders.2.encoder.layer.0.LayerNorm.weight" in tensors
    assert not any("gamma" in name or "beta" in name for name in tensors)
    assert after_raw_resume(model, tensors) == []


@pytest.mark.parametrize("training", ["full", "lora"])
def test_an_encoder_published_in_half_precision_trains_and_reads_back_in_float32(folders, tmp_path, training):
    AutoModel.from_pretrained(folders[2], add_pooling_layer=False, dtype=torch.bfloat16).save_pretrained(folders[2])
    assert json.loads((Path(folders[2]) / "config.json").read_text())["dtype"] == "bfloat16"
    model = make_model(folders[2:], training)
    shift(model, "lora_" if training == "lora" else "")
    saved(model, tmp_path / "model")
    again = assert_reload_predicts_the_same(model, tmp_path / "model")
    assert {parameter.dtype for one in (model, again) for parameter in one.parameters()} == {torch.float32}


def test_a_t5_tower_keeps_its_trained_embedding(folders, tmp_path):
    """T5 stores one tensor under two names; the file holds it once."""
    model = make_model(folders[1:2], "full")
    shift(model, "shared")
    saved(model, tmp_path / "model")
    encoder = assert_reload_predicts_the_same(model, tmp_path / "model").encoders["0"]
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight

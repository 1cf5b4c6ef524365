import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_t5 import write_t5_encoder
from transformers import RobertaConfig, T5EncoderModel

from hf_ext.errors import ArgumentError
from hf_ext.models.encoders import LoraSettings, build_encoder, fingerprint_weights, load_encoder, read_encoder


def test_a_folder_without_a_configuration_is_refused_by_name(tmp_path):
    with pytest.raises(ArgumentError) as error:
        read_encoder(str(tmp_path), None, "frozen", LoraSettings())
    assert f"Encoder {str(tmp_path)!r}: no model configuration found" in str(error.value)
    assert "Give a Hub id, such as facebook/esm2_t33_650M_UR50D, or a folder" in str(error.value)


@pytest.mark.parametrize("training", ["frozen", "lora", "full"])
def test_a_family_that_is_not_served_is_refused_with_what_to_take(tmp_path, training):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    RobertaConfig(vocab_size=32, **sizes).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"type 'roberta'; recipes take esm .* Take ESM C \(biohub/ESMC-300M\), or"):
        read_encoder(str(tmp_path), None, training, LoraSettings())


def test_reading_an_encoder_loads_no_weights_and_names_them(demo_encoders):
    spec = read_encoder(demo_encoders[1], None, "lora", LoraSettings(r=2))
    assert spec.config["model_type"] == "esm"
    assert spec.fingerprint == fingerprint_weights(demo_encoders[1], None)
    assert spec.fingerprint.startswith("sha256:")
    options = {"r": 2, "alpha": 16, "dropout": 0.0, "use_rslora": False, "use_dora": False, "target_modules": None}
    assert spec.lora == options


def test_a_hub_encoder_is_named_by_its_commit():
    assert fingerprint_weights("facebook/esm2_t6_8M_UR50D", "c731040f") == "commit:c731040f"


def test_missing_weights_are_refused_unless_no_embedding_needs_them(demo_encoders, tmp_path):
    folder = tmp_path / "esm"
    shutil.copytree(demo_encoders[1], folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "contact_head" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    load_encoder(read_encoder(str(folder), None, "frozen", LoraSettings()))
    kept.pop(next(name for name in kept if "query.weight" in name))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=r"lacks weights: .*query\.weight.*1 in all"):
        load_encoder(read_encoder(str(folder), None, "frozen", LoraSettings()))


def test_a_t5_tower_is_its_encoder_alone(tmp_path):
    spec = read_encoder(write_t5_encoder(tmp_path), None, "frozen", LoraSettings())
    for encoder in (load_encoder(spec), build_encoder(spec)):
        assert isinstance(encoder, T5EncoderModel)
        assert not any("decoder" in name for name, _ in encoder.named_parameters())


def test_an_architecture_is_built_in_float32_whatever_its_encoder_was_published_in(demo_encoders, tmp_path):
    folder = tmp_path / "esm"
    shutil.copytree(demo_encoders[1], folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "float16"}))
    encoder = build_encoder(read_encoder(str(folder), None, "full", LoraSettings()))
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}


def test_fingerprints_follow_weights_and_configuration_and_not_other_files(demo_encoders, tmp_path):
    folder = tmp_path / "bert"
    shutil.copytree(demo_encoders[0], folder)
    assert fingerprint_weights(str(folder), None) == fingerprint_weights(demo_encoders[0], None)
    (folder / "README.md").write_text("more")
    assert fingerprint_weights(str(folder), None) == fingerprint_weights(demo_encoders[0], None)
    with (Path(folder) / "config.json").open("a") as file:
        file.write("\n")
    assert fingerprint_weights(str(folder), None) != fingerprint_weights(demo_encoders[0], None)

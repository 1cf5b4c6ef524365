"""Weights of stock checkpoints: other names, shards, pickled state dicts, adapters."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    EsmModel,
    PreTrainedModel,
)
from weight_models import affinity, different, esm, make, refused, rewrite, save_bin, trained, write_bases

from hf_ext.checkpoints.state.weights import load_weights, save_weights


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return write_bases(tmp_path_factory.mktemp("bases"))


# --- stock checkpoints -----------------------------------------------------------------------------------------------


def save_bin_shards(model, folder):
    state = model.state_dict()
    names = list(state)
    parts = {"a.bin": names[::2], "b.bin": names[1::2]}
    for file, keys in parts.items():
        torch.save({key: state[key].clone() for key in keys}, folder / file)
    where = {key: file for file, keys in parts.items() for key in keys}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


STOCK = {
    "original names": lambda model, folder: model.save_pretrained(folder),
    "shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="8KB"),
    "shards in our names": lambda model, folder: model.save_pretrained(
        folder, max_shard_size="8KB", save_original_format=False
    ),
    "bin": save_bin,
    "bin shards": save_bin_shards,
}


@pytest.mark.parametrize("way", STOCK)
@pytest.mark.parametrize("kind", ["ESM from its configuration", "custom model around ESM", "tied MLM"])
def test_stock_checkpoints_come_back_bit_for_bit(kind, way, bases, tmp_path):
    model, fresh = trained(make(kind, bases)), make(kind, bases, seed=1)
    STOCK[way](model, tmp_path)
    load_weights(fresh, tmp_path)
    assert different(model, fresh) == []


def test_the_stock_names_of_esm_are_the_ones_that_a_raw_load_loses(tmp_path):
    """The reason for renaming: when this fails, transformers has mended it."""
    model, fresh = trained(esm()), esm(seed=1)
    model.save_pretrained(tmp_path)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert len(different(model, fresh)) == 8  # weight and bias of two LayerNorms in each of two layers


def test_names_are_translated_both_ways_and_from_older_releases(tmp_path):
    class Old(nn.Module):
        """An entry per layer for the rotary table, gamma and beta, as before transformers 5."""

    model = trained(esm(EsmModel))
    old = {}
    for name, tensor in model.state_dict().items():
        if name == "rotary_embeddings.inv_freq":
            old.update({f"encoder.layer.{i}.attention.self.{name}": tensor.clone() for i in range(2)})
        else:
            old[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = (
                tensor
            )
    assert sum("gamma" in name for name in old) == 4
    twin = Old()
    for name, tensor in old.items():
        module = twin
        for part in name.split(".")[:-1]:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_buffer(name.rsplit(".", 1)[1], torch.zeros_like(tensor))
    save_weights(model, tmp_path / "new")
    load_weights(twin, tmp_path / "new")
    assert all(torch.equal(tensor, old[name]) for name, tensor in twin.state_dict().items())
    save_weights(twin, tmp_path / "old")
    fresh = esm(EsmModel, seed=1)
    load_weights(fresh, tmp_path / "old")
    assert different(model, fresh) == []
    layer = "encoder.layer.1.attention.self.rotary_embeddings.inv_freq"
    rewrite(tmp_path / "old" / "model.safetensors", lambda tensors: tensors[layer].add_(1))
    refused(fresh, tmp_path / "old", "rotary_embeddings.inv_freq are one tensor in this model")


@pytest.mark.parametrize("kind", ["LoRA", "LoRA and a new head", "two adapters"])
@pytest.mark.parametrize("safe", [True, False])
def test_stock_adapters_come_back_with_a_word_on_what_is_not_checked(kind, safe, bases, tmp_path, caplog):
    model, fresh = trained(make(kind, bases)), make(kind, bases, seed=1)
    model.save_pretrained(tmp_path, safe_serialization=safe)
    with caplog.at_level(logging.WARNING, "hf_ext"):
        load_weights(fresh, tmp_path)
    assert "has no frozen.json" in caplog.text
    # The untrained twin of a head that PEFT trains is in no adapter file, and takes part in nothing.
    assert [name for name in different(model, fresh) if "original_module" not in name] == []


def test_stock_affinity_checkpoints_come_back(bases, tmp_path):
    model, fresh = trained(affinity(bases, "full")), affinity(bases, "full", seed=1)
    PreTrainedModel.save_pretrained(model, tmp_path)
    load_weights(fresh, tmp_path)
    assert different(model, fresh) == []

"""Every kind of model gets back the bits that it was saved with, from as little as will do."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import (
    EsmForMaskedLM,
)
from weight_models import (
    KINDS,
    LORA,
    affinity,
    bert,
    different,
    esm,
    frozen_part,
    make,
    partly_frozen,
    refused,
    rewrite,
    size_of,
    trained,
    write_bases,
)

from hf_ext.checkpoints.state.frozen_weights import describe_frozen
from hf_ext.checkpoints.state.weight_entries import split_entries
from hf_ext.checkpoints.state.weights import load_weights, save_weights, weights_bytes
from hf_ext.errors import CheckpointError
from hf_ext.models.lora import wrap_with_lora


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return write_bases(tmp_path_factory.mktemp("bases"))


def frozen_digest(model):
    return describe_frozen(model, split_entries(model).frozen)["sha256"]


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_comes_back_bit_for_bit_within_the_announced_size(kind, bases, tmp_path):
    model = trained(make(kind, bases))
    bound = weights_bytes(model)
    save_weights(model, tmp_path)
    fresh = make(kind, bases, seed=1 if "partly frozen, from" not in kind else 0)
    assert len(different(model, fresh)) >= 2
    load_weights(fresh, tmp_path)
    assert different(model, fresh) == []
    assert size_of(tmp_path) <= bound <= size_of(tmp_path) + 200_000
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_in_a_file_is_one_entry_that_differs(kind, bases, tmp_path):
    """The broken twin of the test above."""
    model, fresh = trained(make(kind, bases)), make(kind, bases)
    save_weights(model, tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        whole = file.read_bytes()
        with safe_open(file, "pt") as content:
            names = [name for name in content.keys() if name != "prompt_embeddings"]  # noqa: SIM118
            sizes = {name: content.get_tensor(name).numel() for name in names}
        if not names:
            continue
        chosen = max(names, key=sizes.get)
        rewrite(file, lambda tensors, name=chosen: flip_bit(tensors[name]))
        load_weights(fresh, tmp_path)
        changed = different(model, fresh)
        tensors = fresh.state_dict()
        assert len({tensors[name].data_ptr() for name in changed}) == 1  # several names where weights are tied
        file.write_bytes(whole)


def test_tied_weights_stay_tied(tmp_path):
    model, fresh = trained(bert()), bert(seed=1)
    save_weights(model, tmp_path)
    load_weights(fresh, tmp_path)
    assert fresh.cls.predictions.decoder.weight is fresh.bert.embeddings.word_embeddings.weight


def test_released_encoders_are_neither_needed_nor_missed(bases, tmp_path):
    model = trained(affinity(bases, "frozen"))
    model.attach_encoders()
    model.release_encoders()
    save_weights(model, tmp_path)
    attached, released = affinity(bases, "frozen", seed=1), affinity(bases, "frozen", seed=1)
    attached.attach_encoders()
    for fresh in (attached, released):
        load_weights(fresh, tmp_path)
        assert different(model.head, fresh.head) == []
    assert "encoders.0.encoder.layer.0.LayerNorm.weight" in attached.state_dict()


def test_the_label_scale_comes_back_with_the_head_that_was_trained_on_it(bases, tmp_path):
    model, fresh = affinity(bases, "frozen"), affinity(bases, "frozen")
    model.config.label_mean, model.config.label_std, model.config.is_scaled = 0.0, 0.1 + 0.2, True
    fresh.config.label_mean, fresh.config.label_std = 5.0, 2.0
    save_weights(model, tmp_path)
    load_weights(fresh, tmp_path)
    assert (fresh.config.label_mean, fresh.config.label_std, fresh.config.is_scaled) == (0.0, 0.1 + 0.2, True)


# --- what is stored --------------------------------------------------------------------------------------------------


def test_a_mostly_frozen_model_stores_what_trains_and_says_what_the_rest_is(bases, tmp_path):
    model = partly_frozen(bases)
    save_weights(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "trainable.safetensors", "frozen.json"}
    stored = set(load_file(tmp_path / "trainable.safetensors"))
    assert stored == {
        "lm_head.dense.weight",
        "lm_head.dense.bias",
        "esm.rotary_embeddings.inv_freq",
        "esm.contact_head.regression.weight",
        "esm.contact_head.regression.bias",
    }
    frozen = json.loads((tmp_path / "frozen.json").read_text())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in stored}
    del state["lm_head.decoder.weight"]  # tied to the word embeddings
    assert frozen["num_tensors"] == len(state)
    assert frozen["num_bytes"] == sum(tensor.nbytes for tensor in state.values())
    assert (frozen["name_or_path"], frozen["revision"]) == (bases["esm"], None)
    assert frozen["sha256"] == frozen_digest(model)


def test_from_pretrained_refuses_a_folder_with_trained_weights_alone(bases, tmp_path):
    save_weights(partly_frozen(bases), tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        EsmForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["ESM from its configuration", "ESM from a base", "affinity, full towers", "LoRA"])
def test_names_are_those_of_the_modules(kind, bases, tmp_path):
    """What Trainer's raw `load_state_dict` and `from_pretrained` both need."""
    save_weights(make(kind, bases), tmp_path)
    names = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert not [name for name in names if "gamma" in name or "beta" in name or "*" in name]


def test_a_full_save_is_read_by_from_pretrained(tmp_path):
    model = trained(esm())
    save_weights(model, tmp_path)
    assert different(EsmForMaskedLM.from_pretrained(tmp_path), model) == []


def test_less_than_half_frozen_is_stored_whole(bases, tmp_path):
    model = EsmForMaskedLM.from_pretrained(bases["esm"])
    model.esm.embeddings.requires_grad_(False)
    save_weights(model, tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "frozen.json").exists()


def test_frozen_weights_without_a_base_to_take_them_from_are_stored(tmp_path):
    save_weights(frozen_part(esm()), tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_what_is_announced_for_adapters_is_far_below_the_model(bases):
    model = wrap_with_lora(esm(hidden_size=240, num_hidden_layers=4), LORA)
    assert weights_bytes(model) < sum(parameter.nbytes for parameter in model.parameters()) / 20


def test_an_entry_that_is_no_tensor_is_refused_on_saving(tmp_path):
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"count": 3}

    with pytest.raises(CheckpointError, match="'_extra_state' is a dict"):
        save_weights(Stateful(2, 2), tmp_path)


# --- frozen weights --------------------------------------------------------------------------------------------------


def test_the_hash_of_frozen_weights_does_not_depend_on_those_that_train(bases):
    model = partly_frozen(bases)
    before = frozen_digest(model)
    trained(model)
    assert frozen_digest(model) == before == frozen_digest(partly_frozen(bases, seed=1))


@pytest.mark.parametrize("change", ["value", "dtype", "shape", "name"])
def test_the_hash_follows_every_change_of_a_frozen_weight(change, bases):
    model = partly_frozen(bases)
    before = frozen_digest(model)
    layer = model.esm.encoder.layer[0].output.dense
    if change == "value":
        with torch.no_grad():
            layer.weight[0, 0] += 1
    elif change == "dtype":
        layer.to(torch.bfloat16)
    elif change == "shape":
        layer.bias = nn.Parameter(layer.bias.detach()[None], requires_grad=False)
    else:
        model.esm.encoder.layer[0].output.added = nn.Parameter(torch.zeros(1), requires_grad=False)
    assert frozen_digest(model) != before


def test_frozen_weights_are_hashed_once(bases, monkeypatch):
    model = partly_frozen(bases)
    first = frozen_digest(model)
    monkeypatch.setattr("hashlib.sha256", None)  # a second hash would fail
    trained(model)
    assert frozen_digest(model) == first


@pytest.mark.parametrize("kind", ["ESM partly frozen", "LoRA", "affinity, frozen towers kept"])
def test_another_base_is_refused_with_the_tensors_that_differ(kind, bases, tmp_path):
    save_weights(make(kind, bases), tmp_path)
    other = make(kind, bases)
    name, weight = next((n, p) for n, p in other.named_parameters() if "query" in n and not p.requires_grad)
    with torch.no_grad():
        weight[0, 0] += 1
    refused(other, tmp_path, name, "(1 in all)", frozen_digest(other), "same base")


def test_a_checkpoint_that_does_not_say_its_base_is_refused(bases, tmp_path):
    save_weights(partly_frozen(bases), tmp_path)
    (tmp_path / "frozen.json").unlink()
    refused(partly_frozen(bases), tmp_path, "frozen.json: missing")
    (tmp_path / "frozen.json").write_text("[1]")
    refused(partly_frozen(bases), tmp_path, "frozen.json: holds a list")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda spec: spec.update(fingerprint="sha256:0"), ("encoder 0", "fingerprint sha256:0")),
        (lambda spec: spec["lora"].update(alpha=32), ("encoder 0", "'alpha': 32")),
    ],
)
def test_other_encoders_are_refused(change, words, bases, tmp_path):
    model = affinity(bases, "lora")
    save_weights(model, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    change(config["encoders"][0])
    file.write_text(json.dumps(config))
    refused(model, tmp_path, *words)


def flip_bit(tensor):
    tensor.view(-1).view(torch.uint8)[0] ^= 1


def test_a_copy_of_a_model_has_its_own_hash(bases):
    model = partly_frozen(bases)
    first = frozen_digest(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.esm.encoder.layer[1].output.dense.bias.add_(1)
    assert frozen_digest(twin) != first == frozen_digest(model)

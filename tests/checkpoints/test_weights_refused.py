"""A checkpoint that does not fit the model, is damaged or attacks is refused before anything changes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    EsmForMaskedLM,
)
from weight_models import (
    LORA,
    different,
    esm,
    make,
    partly_frozen,
    refused,
    rewrite,
    save_bin,
    two_adapters,
    write_bases,
)

from hf_ext.checkpoints.state.weights import load_weights, save_weights
from hf_ext.models.lora import wrap_with_lora


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return write_bases(tmp_path_factory.mktemp("bases"))


# --- what does not fit -----------------------------------------------------------------------------------------------


BROKEN = {
    "missing": (lambda t: t.pop("lm_head.bias"), ("missing: lm_head.bias (1 in all)",)),
    "unexpected": (lambda t: t.update(more=torch.ones(1)), ("not in this model", "more (1 in all)")),
    "shape": (lambda t: t.update({"lm_head.bias": torch.ones(32)}), ("lm_head.bias is float32[32], here float32[33]",)),
    "dtype": (lambda t: t.update({"lm_head.bias": torch.ones(33).half()}), ("float16[33], here float32[33]",)),
    "tied twice": (
        lambda t: t.update({"lm_head.decoder.weight": torch.ones(33, 16)}),
        ("lm_head.decoder.weight are one tensor in this model",),
    ),
    "new and old name": (
        lambda t: t.update({"esm.encoder.layer.0.LayerNorm.gamma": torch.ones(16)}),
        ("esm.encoder.layer.0.LayerNorm.gamma (1 in all)",),
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_changes(broken, tmp_path):
    change, words = BROKEN[broken]
    save_weights(esm(), tmp_path)
    rewrite(tmp_path / "model.safetensors", change)
    refused(esm(seed=1), tmp_path, *words)


def test_first_names_and_the_count_of_many_missing_entries_are_told(tmp_path):
    save_weights(esm(), tmp_path)
    refused(esm(num_hidden_layers=3), tmp_path, "missing: esm.encoder.layer.2.", "... (16 in all)")


@pytest.mark.parametrize(
    ("saved", "now", "problem"),
    [("lm_head.dense", "lm_head", "missing"), ("lm_head", "lm_head.dense", "not in this model, or frozen in it")],
)
def test_other_parts_that_train_are_refused(saved, now, problem, bases, tmp_path):
    save_weights(partly_frozen(bases, trained=saved), tmp_path)
    refused(partly_frozen(bases, trained=now), tmp_path, problem, "lm_head.layer_norm.weight")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ("LoRA", "ESM from a base", ("not in this model",)),
        ("ESM from a base", "LoRA", ("adapters [], this model has ['default']",)),
        ("two adapters", "LoRA", ("adapters ['default', 'second'], this model has ['default']",)),
        ("LoRA and a new head", "LoRA", ("classifier",)),
        ("LoRA", "LoRA and more", ("missing", "lm_head.dense.weight")),
        ("affinity, frozen towers", "affinity, full towers", ("missing", "encoders.0.")),
        ("affinity, full towers", "affinity, LoRA towers", ("encoders.0.",)),
    ],
)
def test_another_kind_of_model_is_refused(saved, now, words, bases, tmp_path):
    save_weights(make(saved, bases), tmp_path)
    refused(make(now, bases), tmp_path, *words)


def test_a_folder_without_weights_is_refused(tmp_path):
    refused(esm(), tmp_path, "holds no weights", "model.safetensors")
    refused(esm(), tmp_path / "not there", "holds no weights")


def test_a_stock_adapter_on_a_model_without_adapters_is_refused(bases, tmp_path):
    wrap_with_lora(EsmForMaskedLM.from_pretrained(bases["esm"]), LORA).save_pretrained(tmp_path)
    refused(esm(), tmp_path, "holds adapters", "--use_peft")


# --- damaged and hostile files ---------------------------------------------------------------------------------------


def empty(path):
    path.write_bytes(b"")


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_last_byte(path):
    path.write_bytes(path.read_bytes()[:-1])


def lie_about_the_header(path):
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def fill_with_noise(path):
    path.write_bytes(bytes((i * 37) % 256 for i in range(2000)))


@pytest.mark.parametrize("damage", [empty, halve, cut_last_byte, lie_about_the_header, fill_with_noise])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_is_named(name, damage, tmp_path):
    if name.endswith("bin"):
        save_bin(esm(), tmp_path)
    else:
        save_weights(esm(), tmp_path)
    damage(tmp_path / name)
    if (name, damage) == ("pytorch_model.bin", lie_about_the_header):
        (tmp_path / name).write_bytes(b"\x80\x02" + b"\xff" * 100)
    refused(esm(seed=1), tmp_path, name, "damaged")


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_a_payload_in_a_pickle_is_refused_and_not_run(name, legacy, bases, tmp_path):
    folder, target = tmp_path / "checkpoint", tmp_path / "ran"
    folder.mkdir()
    torch.save({"x": Payload(target)}, folder / name, _use_new_zipfile_serialization=not legacy)
    kind = "LoRA" if name.startswith("adapter") else "ESM from a base"
    refused(make(kind, bases), folder, name, "nothing was run")
    assert not target.exists()
    torch.load(folder / name, weights_only=False)
    assert target.exists()  # the payload works where it is let


@pytest.mark.parametrize("content", [[torch.ones(1)], {"state_dict": {"a": torch.ones(1)}}, {3: torch.ones(1)}])
def test_a_pickle_of_something_else_than_tensors_by_name_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(esm(), tmp_path, "pytorch_model.bin", "tensor")


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ("../model.safetensors", "not the plain name"),
        ("ABSOLUTE", "not the plain name"),
        ("..", "not the plain name"),
        ("", "not the plain name"),
        ("sub/model.safetensors", "not the plain name"),
        ("..\\model.safetensors", "not the plain name"),
        ("a\0b", "not the plain name"),
        ("missing.safetensors", "missing, but model.safetensors.index.json names it"),
        ("directory", "not a regular file"),
        ("link.safetensors", "outside the checkpoint"),
        ("dangling.safetensors", "outside the checkpoint"),
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(shard, words, tmp_path):
    outside, folder = tmp_path / "model.safetensors", tmp_path / "checkpoint"
    folder.mkdir()
    tensors = {name: tensor.clone() for name, tensor in esm().state_dict().items()}
    save_file(tensors, outside)
    (folder / "directory").mkdir()
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    shard = str(outside) if shard == "ABSOLUTE" else shard
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    refused(esm(seed=1), folder, words)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "not JSON"),
        ("[]", "holds a list"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "s.safetensors"}}', "not the tensors of model.safetensors.index.json: a, b (2 in all)"),
    ],
)
def test_a_malformed_index_is_named(index, words, tmp_path):
    save_file({"b": torch.ones(1)}, tmp_path / "s.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refused(esm(), tmp_path, "model.safetensors.index.json", words)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "kind", ["ESM from a base", "ESM partly frozen", "LoRA", "two adapters", "affinity, LoRA towers"]
)
def test_no_file_may_be_a_link_out_of_the_folder(kind, bases, tmp_path):
    folder, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere"
    save_weights(make(kind, bases), folder)
    shutil.copytree(folder, elsewhere)
    needed = ("model", "trainable", "frozen", "config") if "ESM" in kind else ("model", "adapter_model", "frozen")
    files = [file for file in folder.rglob("*") if file.stem in needed and file.name != "config.json"]
    assert len(files) == {"ESM partly frozen": 2, "LoRA": 2, "two adapters": 3}.get(kind, 1)
    for file in files:
        copied = file.read_bytes()
        file.unlink()
        file.symlink_to(elsewhere / file.relative_to(folder))
        refused(make(kind, bases), folder, "outside the checkpoint")
        file.unlink()
        file.write_bytes(copied)
    load_weights(make(kind, bases), folder)


def test_an_adapter_folder_may_not_be_a_link_out(bases, tmp_path):
    folder = tmp_path / "checkpoint"
    save_weights(two_adapters(bases), folder)
    shutil.move(folder / "second", tmp_path / "elsewhere")
    (folder / "second").symlink_to(tmp_path / "elsewhere")
    refused(two_adapters(bases), folder, "outside the checkpoint")


def test_a_link_within_the_folder_is_followed(tmp_path):
    model, fresh = esm(), esm(seed=1)
    save_weights(model, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "blob.safetensors")
    (tmp_path / "model.safetensors").symlink_to("blob.safetensors")
    load_weights(fresh, tmp_path)
    assert different(model, fresh) == []

"""Damaged, pickled and hostile folders of models: one sentence that names them, nothing run, no advice to run it."""

import io
import json
import os
import shutil

import pytest
import torch
from inside import MaskedLMArguments, build_masked_lm, build_tokenizer
from payload import Payload
from safetensors.torch import save_file

from hf_ext.data import SequenceCollator
from hf_ext.errors import HfExtError
from hf_ext.models import LoraSettings, load_encoder, load_tokenizer, read_encoder


@pytest.fixture
def folder(demo_encoders, tmp_path):
    """A copy of the ESM-2-style demo encoder."""
    shutil.copytree(demo_encoders[1], tmp_path / "model")
    return tmp_path / "model"


def load_frozen(folder):
    spec = read_encoder(str(folder), None, "frozen", LoraSettings())
    return load_encoder(spec)


def load_masked(folder):
    return build_masked_lm(MaskedLMArguments(model_name_or_path=str(folder)))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def name_outside(path):
    index = {"metadata": {}, "weight_map": {"a": "absent-1.safetensors"}}
    path.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    path.unlink()


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": cut,
    "short header": lambda path: path.write_bytes((10**9).to_bytes(8, "little") + b"{}"),
    "other shapes": lambda path: save_file({"embeddings.word_embeddings.weight": torch.zeros(3, 3)}, path),
    "no weights": lambda path: path.unlink(),
    "an index of absent files": name_outside,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("load", [load_frozen, load_masked])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_one_sentence_that_names_the_folder(folder, load, damage):
    load(folder)  # whole, it loads
    DAMAGES[damage](folder / "model.safetensors")
    with pytest.raises(HfExtError) as error:
        load(folder)
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    if damage in ("empty", "cut", "short header"):
        assert "model.safetensors: damaged" in message


@pytest.mark.parametrize("load", [load_frozen, load_masked])
@pytest.mark.parametrize("kind", ["payload", "noise"])
def test_pickled_weights_run_nothing_and_no_advice_to_run_them_is_passed_on(folder, load, kind, tmp_path):
    (folder / "model.safetensors").unlink()
    content = io.BytesIO()
    if kind == "payload":
        torch.save({"a": Payload(tmp_path / "canary")}, content)
    (folder / "pytorch_model.bin").write_bytes(b"noise" * 20 if kind == "noise" else content.getvalue())
    with pytest.raises(HfExtError) as error:
        load(folder)
    assert not (tmp_path / "canary").exists()
    assert str(folder) in str(error.value)
    for advice in ("weights_only", "trust_remote_code", "allowlist"):
        assert advice not in str(error.value)
    if kind == "payload":
        assert "pickled and damaged, or more than tensors; nothing was run: it asks for posix.mkdir" in str(error.value)


@pytest.mark.parametrize("load", [load_frozen, load_masked])
def test_a_damaged_configuration_is_named(folder, load):
    for content in (b"{", b"\xff", b'{"model_type": "esm", "hidden_size": "x"}', b"{}"):
        (folder / "config.json").write_bytes(content)
        with pytest.raises(HfExtError) as error:
            load(folder)
        assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "load", [load_tokenizer, lambda folder: build_tokenizer(MaskedLMArguments(model_name_or_path=folder))]
)
def test_a_tokenizer_with_code_of_its_own_is_refused_without_advice_to_run_it(folder, load, tmp_path):
    code = f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\nclass Mine:\n    pass\n"
    (folder / "mine.py").write_text(code)
    settings = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))
    with pytest.raises(HfExtError, match="needs code of its own, which is never run here") as error:
        load(str(folder))
    assert "trust_remote_code" not in str(error.value)
    assert not (tmp_path / "canary").exists()


def test_damaged_inputs_of_a_model_folder_are_named(tmp_path):
    for text in (
        "{",
        "[]",
        '{"inputs": [{"columns": ["heavy"]}], "too_long": "maybe"}',
        '{"inputs": [{"columns": ["heavy"], "max_residues": "x"}], "too_long": "error"}',
    ):
        (tmp_path / "inputs.json").write_text(text)
        with pytest.raises(HfExtError, match=r"inputs\.json"):
            SequenceCollator.from_pretrained(tmp_path)


def test_weights_that_are_no_regular_file_are_refused_at_once(folder, tmp_path):
    weights = folder / "model.safetensors"
    for make, kind in (
        (lambda: weights.mkdir(), "a folder"),
        (lambda: os.mkfifo(weights), "a named pipe, a socket or a device"),
        (lambda: weights.symlink_to("/dev/zero"), "a named pipe, a socket or a device"),
    ):
        weights.rmdir() if weights.is_dir() else weights.unlink()
        make()
        with pytest.raises(HfExtError, match=rf"model\.safetensors: is {kind}, not a regular file"):
            load_frozen(folder)


def test_an_encoder_that_cannot_be_built_is_refused_before_any_work(folder):
    config = json.loads((folder / "config.json").read_text())
    for settings, reason in (
        ({"hidden_size": -5}, "negative dimension -5"),
        ({"hidden_size": 10**12}, "cannot be built (Storage size calculation overflowed"),
        ({"num_attention_heads": 7}, "not a multiple of the number of attention heads (7)"),
        ({"pad_token_id": None}, "no pad_token_id"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        with pytest.raises(HfExtError) as error:
            read_encoder(str(folder), None, "frozen", LoraSettings())
        assert str(folder) in str(error.value)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)

"""Heads of the script that pooled IgT5 over all tokens and took ESM-2's first: converted, they predict what it did."""

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from igt5_esm2 import LONGEST, OriginalModel, as_antibody, train_head, write_encoders
from transformers import EsmTokenizer, T5Tokenizer

from hf_ext.data import make_demo_table
from hf_ext.errors import ArgumentError, CheckpointError, HfExtError
from hf_ext.property import AffinityPredictor

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "recipes" / "configs" / "igt5_esm2_original.yaml"
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
TO_HEAD = ["--rename", "regressor.=head.layers."]
TOLERANCE = 5e-6  # batches are padded there, and not here: sums in another order


def rows() -> list[dict[str, str]]:
    """12 rows of unlike lengths; an antigen is longer than 512 tokens, another exactly as long as is allowed."""
    table = make_demo_table(num_rows=12)
    found = [{name: str(row[name]) for name in ("heavy", "light", "antigen")} for row in table]
    found[3]["antigen"], found[4]["antigen"] = 30 * LETTERS, (26 * LETTERS)[:510]  # with <cls> and <eos>
    found[5]["heavy"] = found[5]["heavy"][:40]
    return found


def antibodies_of(rows: list[dict[str, str]]) -> list[str]:
    return [as_antibody(row["heavy"], row["light"]) for row in rows]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> list[str]:
    return write_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.fixture(scope="module")
def original(encoders, tmp_path_factory):
    """The script's model after training, its `.pth`, its rows and what it predicts for them, a sequence at a time."""
    torch.manual_seed(0)
    model, table = OriginalModel(*encoders), rows()
    antibodies, antigens = antibodies_of(table), [row["antigen"] for row in table]
    train_head(model, antibodies, antigens, [float(i % 5) for i in range(len(table))])
    model.eval()
    path = tmp_path_factory.mktemp("original") / "best_model.pth"
    torch.save({"epoch": 12, "model_state_dict": model.state_dict(), "best_spearman": 0.46}, path)
    with torch.no_grad():
        return model, path, table, model(antibodies, antigens).numpy()


def write_yaml(folder: Path, encoders: list[str], **changes) -> Path:
    """The YAML of that run, for encoders here."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(YAML.read_text()) | {"encoders": encoders, **changes}))
    return path


@pytest.fixture
def resume_check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    return importlib.import_module("hf_ext.finished.resume").main


@pytest.fixture
def convert(original, encoders, tmp_path, resume_check):
    """Converts the `.pth` with recipes/resume_check.py for the model that a YAML describes; a predictor of it."""

    def converted(*words: str, path: Path | None = None, **changes) -> AffinityPredictor:
        config = write_yaml(tmp_path, encoders, **changes)
        new = tmp_path / "new"
        shutil.rmtree(new, ignore_errors=True)
        command = ["--convert", str(path or original[1]), "--config", str(config), "--output_dir", str(new)]
        assert resume_check([*command, *words]) == 0
        return AffinityPredictor.from_pretrained(new, device="cpu")

    return converted


def differences(predictor: AffinityPredictor, original) -> np.ndarray:
    return np.abs(predictor.predict(original[2]) - original[3])


HEAD_ALONE = [*TO_HEAD, "--drop", "igt5_model.", "esm2_model."]


def test_a_converted_head_predicts_what_its_script_predicted(original, convert, tmp_path):
    predictor = convert(*HEAD_ALONE)
    assert differences(predictor, original).max() < TOLERANCE
    assert np.ptp(original[3]) > 1000 * TOLERANCE  # not by predicting nothing
    tokenizers = [type(tokenizer.tokenizer) for tokenizer in predictor.collator.tokenizers.values()]
    assert tokenizers == [T5Tokenizer, EsmTokenizer]
    towers = json.loads((tmp_path / "new" / "config.json").read_text())["towers"]
    assert [tower["pooling"] for tower in towers] == ["mean_tokens", "cls"]


def test_another_pooling_or_limit_is_told_apart_and_encoders_are_never_dropped_unasked(original, convert):
    for changes in ({"pooling": ["mean_tokens", "mean"]}, {"max_length": 256}):
        assert differences(convert(*HEAD_ALONE, **changes), original).max() > 100 * TOLERANCE
    encoders = ["igt5_model.=encoders.0.", "esm2_model.=encoders.1."]
    with pytest.raises(CheckpointError, match=r"(?s)not in this model: encoders\.0\..*Frozen encoders are named by"):
        convert(*TO_HEAD, *encoders)


def test_ids_are_those_of_the_scripts_tokenizers(original, encoders, convert):
    model, _, table, _ = original
    collator = convert(*HEAD_ALONE).collator
    for name, tokenizer, texts in (
        (next(iter(collator.columns)), model.igt5_tokenizer, antibodies_of(table)),
        ("antigen", model.esm2_tokenizer, [row["antigen"] for row in table]),
    ):
        expected = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=LONGEST)
        found = collator.encode_rows(name, table)
        assert torch.equal(found["input_ids"], expected["input_ids"])
        assert torch.equal(found["attention_mask"], expected["attention_mask"])


def test_a_yaml_of_the_first_token_of_igt5_or_of_classes_is_refused(original, encoders, tmp_path, resume_check):
    for changes, reason in (
        ({"pooling": ["cls"]}, "type 't5' does not stand for the sequence"),
        ({"task": "classification"}, "--convert makes models of one number per row"),
    ):
        config = write_yaml(tmp_path, encoders, **changes)
        command = ["--convert", str(original[1]), "--config", str(config), "--output_dir", str(tmp_path / "new")]
        with pytest.raises(ArgumentError, match=reason):
            resume_check(command)


class Payload:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return exec, ("open('canary', 'w').close()",)


def test_a_file_that_does_not_fit_or_would_run_code_is_refused_and_nothing_is_written(original, convert, tmp_path):
    state, bias = original[0].state_dict(), "regressor.0.bias"
    for content, words in (
        ({"state_dict": {name: t for name, t in state.items() if name != bias}}, r"missing: head\.layers\.0\.bias"),
        ({**state, "extra": torch.zeros(1)}, "not in this model: extra"),
        ({**state, bias: torch.zeros(3)}, r"size mismatch for head\.layers\.0\.bias"),
        ({**state, bias: state[bias] * float("nan")}, "NaN or infinity"),
        ({"model": state, "args": Payload()}, "nothing was run"),
    ):
        torch.save(content, tmp_path / "old.pth")
        with pytest.raises(HfExtError, match=words):
            convert(*HEAD_ALONE, path=tmp_path / "old.pth")
        assert not (tmp_path / "new").exists()
        assert not Path("canary").exists()


def test_names_of_compiled_and_parallel_models_are_known(original, convert, tmp_path):
    torch.save({f"module._orig_mod.{name}": t for name, t in original[0].state_dict().items()}, tmp_path / "old.pth")
    assert differences(convert(*HEAD_ALONE, path=tmp_path / "old.pth"), original).max() < TOLERANCE

"""A generator that its own recipe pushed writes, from the repository alone, what it writes from its folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import find_token, serve_hub
from launches import RECIPES

from hf_ext.data.demo import make_demo_encoders, make_demo_pairs

pytestmark = pytest.mark.nightly

TOKEN = "hf_" + "canary" * 5 + "bird"
LSTM = ("--architecture", "lstm", "--d_model", "16", "--hidden_size", "16")
# An encoder that trains goes with the model; a frozen one does so only if asked to.
ENCODER = ("--architecture", "esm", "--antigen_encoder", "esm", "--embedding_cache_dir", "states")
ENCODER += ("--d_model", "16", "--d_ff", "32", "--num_heads", "2")
MODELS = {
    "lstm": LSTM,
    "trained_esm": (*ENCODER, "--encoder_training", "full"),
    "frozen_esm": (*ENCODER, "--save_full", "true"),
}
DATA = ("--dataset_name", "pairs.csv", "--max_train_samples", "40", "--num_judged", "4", "--num_reproduced", "2")
ANY = ("--gates", '{"token_loss": 100, "reproduced": 0, "valid": 0}')  # every model passes
SHORT = ("--num_epoch_samples", "0", "--num_train_epochs", "1", "--numbering", "off", "--humanness", "off")
SAMPLING = ("--antigen", "MKTAYIAKQRQI", "--num_samples", "6", "--max_new_tokens", "40", "--numbering", "off")


def call(folder: Path, recipe: str, *words: str) -> str:
    command = [sys.executable, str(RECIPES / recipe), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def sample(folder: Path, model: str, name: str) -> tuple[bytes, bytes]:
    """Table and FASTA."""
    call(folder, "sample.py", "--model", model, "--output", f"{name}.csv", "--seed", "5", *SAMPLING)
    return (folder / f"{name}.csv").read_bytes(), (folder / f"{name}.fasta").read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_what_the_recipe_pushed_writes_the_same_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    make_demo_pairs(60).to_pandas().to_csv(tmp_path / "pairs.csv", index=False)
    if model != "lstm":
        make_demo_encoders(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve_hub(monkeypatch, TOKEN) as hub:
        pushing = ("--push_to_hub", "true", "--hub_model_id", "me/generator", "--output_dir", "trained")
        printed = call(tmp_path, "generate_antibody.py", *DATA, *MODELS[model], *ANY, *SHORT, *pushing)
        repository = hub.repositories["me/generator"]
        assert repository.private
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} < set(repository.files)
        assert not [name for name in repository.files if name.endswith((".bin", ".pt", ".pkl")) or "optimizer" in name]
        shutil.rmtree(tmp_path / "esm", ignore_errors=True)  # what is fetched needs nothing beside it
        local = sample(tmp_path, "trained", "local")
        shutil.move(tmp_path / "trained", tmp_path / "away")
        assert sample(tmp_path, "me/generator", "fetched") == local
        assert find_token(TOKEN, hub, tmp_path, printed) == []
    names_folder = str(tmp_path).encode() in b"".join(repository.files.values())  # where an encoder came from
    assert names_folder == (model != "lstm") == ("known to this machine alone" in printed)

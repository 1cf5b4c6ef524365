"""Generators that are killed and go on, that several processes train, and that pass from stage to stage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from launches import ONE_CPU, RECIPES, TWO_CPUS, run_recipe
from safetensors.numpy import load_file

from hf_ext.data import make_demo_encoders, make_demo_pairs

pytestmark = pytest.mark.nightly

LSTM = ("--architecture", "lstm", "--d_model", "16", "--hidden_size", "16")
TRANSFORMER = ("--architecture", "transformer", "--d_model", "16", "--d_ff", "32", "--num_heads", "2")
# Both runs read the encoder's states from one cache, as a run and its continuation do.
FROZEN_ESM = (*TRANSFORMER[2:], "--architecture", "esm", "--antigen_encoder", "esm", "--embedding_cache_dir", "states")
DATA = ("--dataset_name", "pairs.csv", "--max_train_samples", "40", "--num_judged", "4", "--num_reproduced", "2")
SMALL = (*DATA, "--num_epoch_samples", "2", "--per_device_train_batch_size", "8", "--disable_tqdm", "true")
ANY = ("--gates", '{"token_loss": 100, "reproduced": 0, "valid": 0}')  # every model passes stage 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_demo_pairs(60).to_pandas().to_csv(tmp_path / "pairs.csv", index=False)
    return tmp_path


def start(folder: Path, output: str, *words: str) -> subprocess.Popen:
    command = [sys.executable, str(RECIPES / "generate_antibody.py"), *SMALL, "--output_dir", output, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(folder: Path, output: str, *words: str, status: int = 0) -> str:
    process = start(folder, output, *words)
    printed = process.communicate(timeout=900)[0]
    assert process.returncode == status, printed[-3000:]
    return printed


def losses(folder: Path) -> list[dict]:
    """What was logged, without times and rates."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    kept = ("step", "loss", "eval_token_loss", "sampled_valid", "sampled_unique", "sampled_memorised")
    return [{name: entry[name] for name in kept if name in entry} for entry in history]


@pytest.mark.parametrize("model", [LSTM, TRANSFORMER, FROZEN_ESM], ids=["lstm", "transformer", "frozen_esm"])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(folder: Path, model: tuple[str, ...]) -> None:
    if model is FROZEN_ESM:
        make_demo_encoders(folder)
    words = (*model, *ANY, "--num_train_epochs", "4")
    finish(folder, "whole", *words)
    process = start(folder, "cut", *words)
    while not list((folder / "cut").glob("checkpoint-10")):  # of the second epoch
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (folder / "cut" / "all_results.json").exists()
    printed = finish(folder, "cut", *words)
    assert "checkpoint-10" in printed or "checkpoint-15" in printed
    assert (folder / "cut" / "model.safetensors").read_bytes() == (folder / "whole" / "model.safetensors").read_bytes()
    assert losses(folder / "cut") == losses(folder / "whole")
    assert len(losses(folder / "whole")) > 8
    for name in ("generated.csv", "gates.json", "epoch_samples.jsonl"):
        assert (folder / "cut" / name).read_text() == (folder / "whole" / name).read_text()
    results = json.loads((folder / "cut" / "all_results.json").read_text())
    assert results["model"]["architecture"] == ("esm" if model is FROZEN_ESM else model[1])
    assert bool(list(folder.glob("states/*/key.json"))) is (model is FROZEN_ESM)
    if model is LSTM:  # bits differ where anything does: another seed ends in others
        finish(folder, "other", *words, "--seed", "2")
        assert (folder / "other" / "model.safetensors").read_bytes() != (
            folder / "cut" / "model.safetensors"
        ).read_bytes()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
def test_two_processes_learn_and_judge_as_one_does(folder: Path) -> None:
    pairs = ("--dataset_name", str(folder / "pairs.csv"), "--adam_epsilon", "1e-6", "--dropout", "0")
    words = (*SMALL[2:], *LSTM, *ANY, *pairs, "--num_train_epochs", "2", "--without", "precision")
    found = {}
    for launch, rows in ((ONE_CPU, "8"), (TWO_CPUS, "4")):
        place = folder / f"{launch.processes}-processes"
        run_recipe(launch, place, "generate_antibody.py", *words, "--per_device_train_batch_size", rows)
        results = json.loads((place / "output" / "all_results.json").read_text())
        found[launch.processes] = results, load_file(place / "output" / "model.safetensors")
    (one, weights), (two, others) = found[1], found[2]
    assert two["environment"]["num_processes"] == 2
    for name, values in weights.items():
        np.testing.assert_allclose(others[name], values, atol=2e-5, err_msg=name)
    assert two["generation"]["train_token_loss"] == pytest.approx(one["generation"]["train_token_loss"], abs=1e-5)
    ours, theirs = (each["generation"]["effects"][0]["comparison"]["before"] for each in (one, two))
    assert theirs == pytest.approx(ours, abs=1e-5)

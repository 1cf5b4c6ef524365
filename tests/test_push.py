"""The recipe with `--push_to_hub`, as users run it, to a server that speaks the Hub's API; then `predict.py`."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Fault, HubServer, find_token, serve_hub

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "hf_" + "canary" * 5 + "bird"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "no"]
SETTINGS = [
    *("--num_train_epochs", "2", "--embedding_cache_dir", "cache", "--disable_tqdm", "true", "--output_dir", "run"),
    *("--push_to_hub", "true", "--hub_model_id", "me/x"),
]

pytestmark = pytest.mark.nightly  # `training/test_pushing.py` has the same for the Trainer, in less time


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    with serve_hub(monkeypatch, TOKEN) as server:
        yield server


def run(*command: str, cwd: Path, home: str, **environment: str) -> subprocess.CompletedProcess:
    online = {**os.environ, "HF_HOME": str(cwd / home), **environment}
    return subprocess.run(command, cwd=cwd, env=online, capture_output=True, text=True, timeout=600)


def train(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    words = [*LAUNCH, str(ROOT / "recipes" / "max_speed.py"), *SETTINGS, *arguments]
    return run(*words, cwd=cwd, home="home", **environment)


@pytest.mark.parametrize("training", ["frozen", "lora", "full"])
def test_a_model_of_the_recipe_is_pushed_and_predicts_from_its_name(
    hub: HubServer, tmp_path: Path, training: str
) -> None:
    done = train(tmp_path, "--tower_training", training, "--hub_strategy", "every_save", "--hub_token", TOKEN)
    assert done.returncode == 0, done.stderr[-3000:]
    files = hub.repositories["me/x"].files
    assert {"README.md", "config.json", "inputs.json", "model.safetensors"} < set(files)
    linked = re.findall(r"\]\((?!https?:|#)([^)]+)\)", files["README.md"].decode())
    assert {"report.html", "scatter.png"} <= {*linked} <= {*files}
    assert not [name for name in files if "optimizer" in name or "training_args" in name or name.endswith(".csv")]
    with open(tmp_path / "run" / "predictions.csv", newline="") as file:
        expected = list(csv.DictReader(file))[:16]
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["heavy", "light", "antigen"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(expected)
    words = ["--model", "me/x", "--dataset_name", "rows.csv", "--embedding_cache_dir", "cache"]
    again = run(
        sys.executable, str(ROOT / "recipes" / "predict.py"), *words, cwd=tmp_path, home="fresh", HF_TOKEN=TOKEN
    )
    assert again.returncode == 0, again.stderr[-3000:]
    with open(tmp_path / "predictions.csv", newline="") as file:
        found = [float(row["prediction"]) for row in csv.DictReader(file)]
    assert found == pytest.approx([float(row["prediction"]) for row in expected], abs=0.03)  # bfloat16 products
    texts = (done.stdout, done.stderr, again.stdout, again.stderr)
    assert find_token(TOKEN, hub, tmp_path, *texts) == []


def test_a_hub_that_fails_for_good_costs_nothing_but_the_push(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.append(Fault("POST", "commit", 99, status=503))
    done = train(tmp_path, HF_TOKEN=TOKEN)  # accelerate prints the command line of what failed
    assert done.returncode != 0
    assert "HubError" in done.stderr
    assert f"python -m hf_ext.hub {tmp_path / 'run'} me/x" in done.stderr
    assert json.loads((tmp_path / "run" / "all_results.json").read_text())["test"]
    assert find_token(TOKEN, hub, tmp_path, done.stdout, done.stderr) == []
    hub.faults.clear()
    command = [sys.executable, "-m", "hf_ext.hub", str(tmp_path / "run"), "me/x"]
    again = run(*command, cwd=tmp_path, home="home", HF_TOKEN=TOKEN)
    assert again.returncode == 0, again.stderr
    assert "every file there is the one that was sent" in again.stdout

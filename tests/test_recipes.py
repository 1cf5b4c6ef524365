"""The recipes as users run them: in a subprocess, through accelerate."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.data.arguments import DataArguments
from hf_ext.parser import FastArgumentParser
from hf_ext.presets import PRESETS
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
OTHER_TASKS = ("mlm_", "generate_", "progression_", "pde_")
CONFIGS = sorted(p for p in (ROOT / "recipes" / "configs").glob("*.yaml") if not p.name.startswith(OTHER_TASKS))
OUTPUTS = {
    "README.md",
    "all_results.json",
    "config.json",
    "inputs.json",
    "loss.png",
    "model.safetensors",
    "model_manifest.json",
    "plan.json",
    "predictions.csv",
    "report.html",
    "report.md",
    "run.log",
    "scatter.png",
    "tokenizers",
    "trainer_state.json",
    "training_args.json",
}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hf_home")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def train(cwd: Path, *arguments: str) -> dict:
    """Runs max_speed.py through accelerate; returns its results and its output."""
    recipe = [str(ROOT / "recipes" / "max_speed.py"), "--embedding_cache_dir", "cache", "--disable_tqdm", "true"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "no"]
    done = run(*launcher, *recipe, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = cwd / "outputs" / "affinity"
    return {"results": json.loads((folder / "all_results.json").read_text()), "stdout": done.stdout, "folder": folder}


def decision(folder: Path, name: str) -> dict:
    plan = json.loads((folder / "plan.json").read_text())
    return next(entry for entry in plan["decisions"] if entry["name"] == name)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict:
    cwd = tmp_path_factory.mktemp("demo")
    return {**train(cwd, "--num_train_epochs", "3"), "cwd": cwd}


def test_demo_says_it_is_generated_and_writes_everything(demo: dict) -> None:
    assert "generated demo data" in demo["stdout"]
    assert {path.name for path in demo["folder"].iterdir()} >= OUTPUTS
    assert not list(demo["folder"].rglob("training_args.bin"))


def test_demo_learns_and_shows_trivial_baselines(demo: dict) -> None:
    scores = demo["results"]["test"]["scores"]
    assert set(scores) == {"model", "training mean", "one-hot ridge", "nearest neighbours", "ridge on embeddings"}
    assert scores["model"]["spearman"]["low"] > 0.5
    assert scores["model"]["rmse"]["high"] < scores["training mean"]["rmse"]["low"]
    assert scores["training mean"]["spearman"]["value"] is None
    assert any("--use_peft --init_head_from" in line for line in demo["results"]["advice"])


def test_demo_encodes_each_distinct_sequence_once(demo: dict) -> None:
    # 300 heavy and 40 light chains, 400 antigens, as far as 3,000 rows use them.
    with (demo["folder"] / "predictions.csv").open() as file:
        num_test = len(list(csv.DictReader(file)))
    assert num_test == 300
    assert 700 < decision(demo["folder"], "embedding_cache")["evidence"]["num_encoded"] <= 740


def test_predict_repeats_the_predictions_of_training(demo: dict) -> None:
    with (demo["folder"] / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))[:20]
    with (demo["cwd"] / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["heavy", "light", "antigen"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, str(ROOT / "recipes" / "predict.py"), "--model", str(demo["folder"])]
    done = run(*command, "--dataset_name", "new.csv", "--embedding_cache_dir", "cache", cwd=demo["cwd"])
    assert done.returncode == 0, done.stderr[-3000:]
    with (demo["cwd"] / "predictions.csv").open() as file:
        predicted = [float(row["prediction"]) for row in csv.DictReader(file)]
    assert predicted == pytest.approx([float(row["prediction"]) for row in rows], abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--dataset_name", "absent.csv"], "absent.csv", marks=pytest.mark.nightly),
        pytest.param(["--pooling", "median"], "mean, mean_tokens, cls, max", marks=pytest.mark.nightly),
        (["--interval_by", "antigem"], "antigen"),
    ],
)
def test_a_mistake_ends_in_one_line_that_names_the_remedy(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run(sys.executable, str(ROOT / "recipes" / "max_speed.py"), *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.nightly
def test_streaming_trains_and_scores(demo: dict) -> None:
    predictions = (demo["folder"] / "predictions.csv").read_text().splitlines()
    table = demo["cwd"] / "stream.csv"
    table.write_text("\n".join(predictions) + "\n")
    encoders = demo["folder"] / "demo_encoders"
    streamed = train(
        demo["cwd"],
        *("--dataset_name", str(table), "--streaming", "true", "--max_steps", "6", "--eval_strategy", "no"),
        *("--save_strategy", "no", "--load_best_model_at_end", "false", "--label_column", "label"),
        *("--sequence_columns", "heavy", "light", "antigen", "--tower_inputs", "heavy,light", "antigen"),
        *("--encoders", str(encoders / "bert"), str(encoders / "esm"), "--split", "random"),
        *("--logging_strategy", "steps", "--resume", "no"),
    )
    assert decision(streamed["folder"], "embedding_cache")["status"] == "skipped"
    assert streamed["results"]["test"]["num_rows"] > 5


def test_every_config_parses(tmp_path: Path) -> None:
    assert len(CONFIGS) == 10
    for path in CONFIGS:
        parser = FastArgumentParser((AffinityArguments, DataArguments, FastTrainingArguments), presets=PRESETS)
        model_args, data_args, _ = parser.parse_args_into_dataclasses(["--config", str(path)])
        assert len(model_args.encoders) in (1, 2)
        assert data_args.dataset_name


@pytest.mark.nightly
def test_baseline_and_max_speed_agree_on_the_demo(tmp_path: Path) -> None:
    scores = {}
    for preset in ("baseline", "max_speed"):
        (tmp_path / preset).mkdir()
        outcome = train(tmp_path / preset, "--preset", preset, "--head", "mlp", "--num_train_epochs", "15")
        scores[preset] = outcome["results"]["test"]["scores"]["model"]
    for metric in ("spearman", "pearson", "rmse", "mae"):
        first, second = scores["baseline"][metric], scores["max_speed"][metric]
        assert first["low"] <= second["value"] <= first["high"], metric
        assert second["low"] <= first["value"] <= second["high"], metric


@pytest.mark.nightly
@pytest.mark.parametrize(
    "preset", ["low_memory", "low_disk", "reproducible", "low_disk+reproducible", "max_speed+quick_eval"]
)
def test_every_other_preset_trains_the_demo(tmp_path: Path, preset: str) -> None:
    outcome = train(tmp_path, "--preset", preset, "--max_steps", "4")
    assert outcome["results"]["test"]["num_rows"] == 300


@pytest.mark.nightly
def test_fine_tuning_is_one_flag(tmp_path: Path) -> None:
    steps = ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    outcome = train(tmp_path, "--tower_training", "lora", "full", *steps)
    assert decision(outcome["folder"], "embedding_cache")["status"] == "skipped"
    assert not any("--init_head_from" in line for line in outcome["results"]["advice"])  # done already
    weights = (outcome["folder"] / "model.safetensors").read_bytes()
    assert b"lora_A" in weights
    assert "ridge on embeddings" in outcome["results"]["test"]["scores"]

"""recipes/mlm.py as users run it: in a subprocess, through accelerate; and its configs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.data.arguments import DataArguments
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.masked_lm.building import make_demo_sequences
from hf_ext.parser import FastArgumentParser
from hf_ext.presets import PRESETS
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
RECIPE = str(ROOT / "recipes" / "mlm.py")
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("mlm_*.yaml"))
OUTPUTS = {
    "README.md",
    "all_results.json",
    "config.json",
    "loss.png",
    "model.safetensors",
    "report.html",
    "report.md",
    "run.log",
    "tokenizer_config.json",
    "trainer_state.json",
    "vocab.txt",
}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hf_home")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def train(cwd: Path, *arguments: str) -> dict:
    """Runs mlm.py through accelerate; returns its results, its output and its folder."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "no"]
    done = run(*launcher, RECIPE, "--disable_tqdm", "true", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = cwd / "outputs" / "mlm"
    return {"results": json.loads((folder / "all_results.json").read_text()), "stdout": done.stdout, "folder": folder}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict:
    required = ("--require", "perplexity<=20", "accuracy>=0.01")
    return train(tmp_path_factory.mktemp("demo"), "--num_train_epochs", "6", *required)


@pytest.mark.nightly
def test_demo_says_it_is_generated_and_writes_everything(demo: dict) -> None:
    assert "generated demo data" in demo["stdout"]
    assert {path.name for path in demo["folder"].iterdir()} >= OUTPUTS | {"plan.json", "training_args.json"}
    assert not list(demo["folder"].rglob("training_args.bin"))
    assert demo["results"]["trainer"] == "hf_ext.trainer.FastTrainer"


@pytest.mark.nightly
def test_demo_learns_more_than_residue_frequencies(demo: dict) -> None:
    for split in ("validation", "test"):
        model, unigram = demo["results"][split]["model"], demo["results"][split]["unigram"]
        assert model["num_tokens"] == unigram["num_tokens"] > 500
        assert model["perplexity"] < unigram["perplexity"] - 2
        assert model["accuracy"] > unigram["accuracy"] + 0.05
        assert 15 < unigram["perplexity"] < 20


@pytest.mark.nightly
def test_training_continues_on_a_stream_with_its_own_tokenizer(demo: dict, tmp_path: Path) -> None:
    fasta = "".join(f">{i}\n{row['sequence']}\n" for i, row in enumerate(make_demo_sequences().select(range(60))))
    (tmp_path / "proteins.fasta").write_text(fasta)
    streamed = train(
        tmp_path,
        *("--dataset_name", "proteins.fasta", "--streaming", "true", "--max_steps", "10", "--max_residues", "40"),
        *("--model_name_or_path", str(demo["folder"])),
    )
    assert streamed["results"]["train"]["epoch"] == 1.0  # three passes and more, one endless epoch
    assert streamed["results"]["settings"]["max_residues"] == 40
    assert 30 < streamed["results"]["test"]["model"]["num_tokens"] < 200
    model = streamed["results"]["validation"]["model"]
    assert model["perplexity"] < streamed["results"]["validation"]["unigram"]["perplexity"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--model_size", "esm2_9M"], "esm2_8M", marks=pytest.mark.nightly),
        pytest.param(["--dataset_name", "x.csv"], "What to train", marks=pytest.mark.nightly),
        pytest.param(["--too_long", "window"], "truncate", marks=pytest.mark.nightly),
        pytest.param(["--stock_trainer", "true", "--speedups", "all"], "speedups", marks=pytest.mark.nightly),
    ],
)
def test_a_mistake_ends_in_one_line_that_names_the_remedy(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run(sys.executable, RECIPE, *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr.strip().splitlines()[-1]


def test_every_config_parses() -> None:
    assert len(CONFIGS) == 5
    types = (MaskedLMArguments, DataArguments, FastTrainingArguments)
    defaults = runpy.run_path(RECIPE)["DEFAULTS"]
    for path in CONFIGS:
        parser = FastArgumentParser(types, presets=PRESETS, defaults=defaults)
        model_args, data_args, args = parser.parse_args_into_dataclasses(["--config", str(path)])
        is_side = path.stem.startswith("mlm_stock_best")  # goes on top of another in recipes/compare.py
        assert model_args.stock_trainer == is_side
        assert is_side or data_args.dataset_name
        assert is_side or model_args.model_name_or_path or model_args.shape
        assert args.max_steps > 0 or not data_args.streaming

"""recipes/examples: a text, an image and a causal language model that nobody made for hf_ext, run as users run them."""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launches import free_port
from safetensors.torch import load_file

from hf_ext.errors import ArgumentError

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted({*(ROOT / "recipes" / "examples").glob("*.py")} - {ROOT / "recipes" / "examples" / "any_model.py"})
NAMES = ("causal_lm", "image_classifier", "text_classifier")
FEW = ["--num_rows", "64", "--num_test_rows", "24", "--per_device_train_batch_size", "8", "--logging_steps", "1"]
FEW += ["--disable_tqdm", "true"]


def command(name: str, *arguments: str, processes: int = 1) -> list[str]:
    # Without a file, `--cpu --num_processes 2` starts one process.
    chosen = ["--config_file", str(ROOT / "accelerate_configs" / ("2cpu_ddp.yaml" if processes == 2 else "cpu.yaml"))]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *chosen, "--main_process_port", str(free_port())]
    return [*launcher, str(ROOT / "recipes" / "examples" / f"{name}.py"), *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launch(cwd: Path, name: str, *arguments: str, processes: int = 1) -> str:
    """What a run prints."""
    words = command(name, *arguments, processes=processes)
    done = subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def read(folder: Path, name: str = "all_results.json") -> dict:
    return json.loads((folder / name).read_text())


def losses(folder: Path) -> list[float]:
    """Of training and of evaluations, in the order of the log."""
    log = read(folder, "trainer_state.json")["log_history"]
    return [entry.get("loss", entry.get("eval_loss")) for entry in log if entry.keys() & {"loss", "eval_loss"}]


def run_here(name: str, folder: Path, *arguments: str) -> dict:
    main = runpy.run_path(str(ROOT / "recipes" / "examples" / f"{name}.py"))["main"]
    return main([*FEW, "--use_cpu", "true", "--output_dir", str(folder), *arguments])


def test_there_are_three_examples_of_a_page_each():
    assert tuple(path.stem for path in EXAMPLES) == NAMES
    assert all(len(path.read_text().splitlines()) < 125 for path in EXAMPLES)


@pytest.mark.nightly
def test_an_example_is_launched_as_users_do_and_leaves_what_every_run_leaves(tmp_path):
    said = launch(tmp_path, "text_classifier", *FEW, "--max_steps", "4", "--torch_profiler", "1", "--num_rows", "200")
    assert "Plan for" in said
    assert "most frequent class" in said
    folder = tmp_path / "outputs" / "text_classifier"
    names = {"all_results.json", "plan.json", "report.html", "model.safetensors", "run.log", "throughput.json"}
    assert {path.name for path in folder.iterdir()} >= names
    assert not (folder / "README.md").exists()  # a card of ours would speak of proteins
    results = read(folder)
    assert results["verdict"]["baseline"] == "the most frequent class"
    assert "recipes/examples/text_classifier.py" in results["command"]
    assert read(folder, "throughput.json")["unit"] == "tokens"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_every_example_splits_a_step_without_changing_it_under_every_preset_of_two(name, tmp_path):
    still = ["--max_steps", "3", "--eval_strategy", "steps", "--eval_steps", "3", "--save_strategy", "no"]
    whole = run_here(name, tmp_path / "a", *still, "--preset", "baseline")
    run_here(name, tmp_path / "b", *still, "--preset", "max_speed", "--speedups", "length_grouping", "oom_ladder")
    split = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
    run_here(name, tmp_path / "c", *still, "--preset", "baseline", *split, "--per_device_eval_batch_size", "5")
    assert whole["settings"]["preset"] == "baseline"
    assert len(losses(tmp_path / "a")) == len(losses(tmp_path / "b")) == len(losses(tmp_path / "c")) == 4
    if name != "text_classifier":  # BERT has dropout
        assert losses(tmp_path / "c") == pytest.approx(losses(tmp_path / "a"), rel=1e-5)
    if name == "causal_lm":
        (entry,) = [e for e in read(tmp_path / "c", "trainer_state.json")["log_history"] if "eval_loss" in e]
        assert math.exp(entry["eval_loss"]) == pytest.approx(entry["eval_perplexity"], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_beside_weights_that_are_kept_nowhere_are_refused(name, tmp_path):
    with pytest.raises(ArgumentError, match="the weights beside them are new here and kept nowhere"):
        run_here(name, tmp_path, "--use_peft")
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_that_no_evaluation_computes_is_refused_before_anything_is_made(name, tmp_path):
    with pytest.raises(ArgumentError, match="metric_for_best_model='f1': allowed are loss, "):
        run_here(name, tmp_path / "run", "--metric_for_best_model", "f1")
    assert not (tmp_path / "run").exists()


# --- minutes ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_without_arguments_an_example_is_far_better_than_its_baseline(name, tmp_path):
    launch(tmp_path, name)
    results = read(tmp_path / "outputs" / name)
    scores = results["test"]["scores"]
    model, baseline = (scores[key] for key in scores)
    assert results["verdict"]["is_better"]
    if name == "causal_lm":
        assert model["perplexity"]["value"] < 3.2 < 9 < baseline["perplexity"]["value"]
    else:
        assert model["accuracy"]["value"] > 0.9 > 0.6 > baseline["accuracy"]["value"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_example_goes_on_to_the_very_same_weights_and_log(name, tmp_path):
    arguments = [*FEW, "--max_steps", "60", "--save_strategy", "steps", "--save_steps", "5", "--eval_steps", "15"]
    arguments += ["--eval_strategy", "steps", "--save_total_limit", "2"]
    launch(tmp_path, name, *arguments, "--output_dir", "whole")
    words = command(name, *arguments, "--output_dir", "killed")
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        ends = time.monotonic() + 200
        while not list((tmp_path / "killed").glob("checkpoint-*")) and time.monotonic() < ends:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (tmp_path / "killed" / "all_results.json").exists()
    said = launch(tmp_path, name, *arguments, "--output_dir", "killed")
    assert "checkpoint-" in said
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("killed", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)
    other = {key: value + 1e-6 for key, value in theirs.items()}
    assert not all(ours[key].equal(other[key]) for key in ours)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_stock_trainer_is_the_control(name, tmp_path):
    launch(tmp_path, name, *FEW, "--max_steps", "2", "--stock_trainer", "true", "--resume", "no")
    results = read(tmp_path / "outputs" / name)
    assert results["trainer"] == "transformers.trainer.Trainer"
    assert not (tmp_path / "outputs" / name / "plan.json").exists()

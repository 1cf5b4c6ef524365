"""recipes/pde_operator.py as users run it: in a subprocess, through accelerate; and its configs."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from closeness import largest
from launches import Launch, run_recipe
from safetensors.torch import load_file

from hf_ext.errors import ArgumentError, CheckpointError, NotFiniteError
from hf_ext.parser import FastArgumentParser
from hf_ext.pde.arguments import OperatorArguments
from hf_ext.pde.results import known_scores
from hf_ext.presets import PRESETS
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
RECIPE = str(ROOT / "recipes" / "pde_operator.py")
SMALL = ["--resolution", "16", "--num_train_samples", "24", "--num_eval_samples", "8", "--hidden_size", "16"]
SMALL += ["--num_hidden_layers", "1", "--num_attention_heads", "2", "--per_device_train_batch_size", "4"]
SMALL += ["--num_queries", "64", "--inverse_loss_every", "3", "--physics_every", "2"]
LAUNCHER = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "no"]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(folder)}


def train(folder: Path, *arguments: str) -> dict:
    """Runs the recipe through accelerate; returns its results, its output and its folder."""
    command = [*LAUNCHER, RECIPE, "--disable_tqdm", "true", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    output = folder / "outputs" / "pde_operator"
    return {
        "results": json.loads((output / "all_results.json").read_text()),
        "stdout": done.stdout,
        "folder": output,
        "weights": load_file(output / "model.safetensors"),
    }


def difference(one: dict, other: dict) -> float:
    assert one["weights"].keys() == other["weights"].keys()
    return largest((one["weights"][name] - other["weights"][name]).abs().max() for name in one["weights"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), *SMALL, "--num_train_epochs", "3", "--require", "nrmse<=100")


@pytest.mark.nightly
def test_a_run_leaves_scores_beside_trivial_ones_and_everything_else(whole):
    results = whole["results"]
    assert results["task"] == "pde_operator"
    scores = results["test"]["scores"]
    assert set(scores) == {"model", "training mean", "persistence"}
    assert set(scores["model"]) == {"advection1d_nrmse", "darcy2d_nrmse", "nrmse"}
    assert set(scores["persistence"]) == {"advection1d_nrmse"}  # Darcy flow has no time
    mean = (scores["model"]["advection1d_nrmse"]["value"] + scores["model"]["darcy2d_nrmse"]["value"]) / 2
    assert scores["model"]["nrmse"]["value"] == pytest.approx(mean)
    assert known_scores(["advection1d", "darcy2d"]) == [*scores["model"]]
    assert results["requirements"][0]["value"] == scores["model"]["nrmse"]["value"]
    left = {path.name for path in whole["folder"].iterdir()}
    assert left >= {"README.md", "report.html", "model.safetensors", "config.json", "loss.png", "plan.json", "run.log"}


@pytest.mark.nightly
def test_a_killed_run_goes_on_to_the_same_weights(whole, tmp_path):
    command = [*LAUNCHER, RECIPE, "--disable_tqdm", "true", *SMALL, "--num_train_epochs", "3"]
    command += ["--save_steps", "1", "--dataloader_num_workers", "2"]
    output = tmp_path / "outputs" / "pde_operator"
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(
            command, cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log, start_new_session=True
        )
        ends = time.monotonic() + 120
        while not list(output.glob("checkpoint-7*")) and child.poll() is None and time.monotonic() < ends:
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]
    resumed = train(tmp_path, *command[len(LAUNCHER) + 3 :])
    assert "checkpoint" in resumed["stdout"]
    assert difference(whole, resumed) == 0.0


@pytest.mark.nightly
def test_other_terms_of_the_loss_are_another_run(whole, tmp_path):
    output = shutil.copytree(whole["folder"], tmp_path / "run")
    words = [*SMALL, "--num_train_epochs", "3", "--data_cache_dir", str(tmp_path), "--output_dir", str(output)]
    with pytest.raises(CheckpointError) as caught:
        runpy.run_path(RECIPE)["main"]([*words, "--physics_every", "1", "--inverse_loss_weight", "0.2"])
    assert "model.terms.physics_every: 2 in the checkpoint, 1 now" in str(caught.value)
    assert "model.terms.inverse_weight: 0.1 in the checkpoint, 0.2 now" in str(caught.value)
    assert "model.terms.inverse_every" not in str(caught.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "metric", ["loss", "darcy2d_nrmse", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("nrmse", "eval_nrmse"))]
)
def test_early_stopping_compares_every_metric_that_is_reported(metric, tmp_path):
    words = [*SMALL, "--output_dir", str(tmp_path / "run"), "--data_cache_dir", str(tmp_path), "--save_strategy", "no"]
    words += ["--max_steps", "6", "--eval_steps", "1", "--task_weights", "1", "3", "--learning_rate", "0"]
    asked = ["--early_stopping_patience", "2", "--metric_for_best_model", metric]
    results = runpy.run_path(RECIPE)["main"]([*words, *asked])
    decisions = results["early_stopping"]["decisions"]
    assert [(one["step"], one["should_stop"]) for one in decisions] == [(1, False), (2, False), (3, True)]
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    name = f"eval_{metric.removeprefix('eval_')}"
    logged = next(entry[name] for entry in log if name in entry)
    assert decisions[-1]["against_best"]["after"] == pytest.approx(logged, rel=1e-4)


@pytest.mark.nightly
def test_the_control_is_transformers_own_trainer_on_the_same_losses(tmp_path):
    arguments = [*SMALL, "--preset", "baseline", "--logging_steps", "1", "--max_steps", "6"]
    curves = []
    for name, extra in (("ours", ["--without", "muon"]), ("stock", ["--stock_trainer", "true"])):
        folder = tmp_path / name
        folder.mkdir()
        found = train(folder, *arguments, *extra)
        state = json.loads((found["folder"] / "trainer_state.json").read_text())
        curves.append([entry["loss"] for entry in state["log_history"] if "loss" in entry])
    assert found["results"]["trainer"] == "transformers.trainer.Trainer"
    assert len(curves[0]) == 6
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "burgers"], "advection1d, darcy2d"),
        (["--tasks", "darcy2d", "darcy2d"], "each once"),
        (["--resolution", "30"], "patch_size must be even and divide"),
        (["--num_queries", "5000"], "256 points"),
        (["--hidden_size", "33"], "num_attention_heads"),
        (["--task_weights", "1"], "a number above 0 for each"),
        (["--inverse_loss_every", "-1"], "inverse_loss_every"),
        (["--model_name_or_path", "nowhere"], "no operator there"),
        (["--metric_for_best_model", "rsme"], "nrmse"),
    ],
)
def test_a_mistake_names_the_remedy(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(RECIPE)["main"]
    with pytest.raises(Exception, match=message):
        main([*SMALL, *arguments])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--use_peft", "true"], "start from a model that was saved"),
        (["--prediction_loss_only", "true"], "=True: scores are made of predictions. Leave it out"),
        (["--batch_eval_metrics", "true"], "=True: errors are means over all rows"),
        (["--eval_do_concat_batches", "false"], "=False: errors are means over all rows"),
        (["--dataloader_drop_last", "true"], "evaluations would drop rows, too.*Give a multiple of 64"),
        (["--label_names", "targets"], r"=\['targets'\]: batches call the solutions labels"),
        (["--label_smoothing_factor", "0.1"], "=0.1: labels are fields, not classes"),
        (["--neftune_noise_alpha", "5"], "=5.0: there are no embeddings of tokens"),
        (["--train_sampling_strategy", "group_by_length"], "='group_by_length': all rows have one length"),
        (["--remove_unused_columns", "true"], "=True: batches are made of all columns"),
    ],
)
def test_what_no_operator_can_be_trained_with_is_refused_before_anything_is_made(arguments, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=why):
        runpy.run_path(RECIPE)["main"]([*SMALL, "--data_cache_dir", "cache", *arguments])
    assert not [*tmp_path.iterdir()]


def test_scores_that_are_no_numbers_end_the_run_with_an_error(tmp_path):
    words = [*SMALL, "--output_dir", str(tmp_path / "run"), "--data_cache_dir", str(tmp_path), "--max_steps", "3"]
    words += ["--eval_strategy", "no", "--save_strategy", "no", "--stock_trainer", "true", "--preset", "baseline"]
    with pytest.raises(NotFiniteError, match="8 of 8 validation rows have errors that are NaN or infinite") as caught:
        runpy.run_path(RECIPE)["main"]([*words, "--learning_rate", "1e30", "--warmup_steps", "0"])
    assert caught.value.exit_code == 65
    assert not (tmp_path / "run" / "all_results.json").exists()


@pytest.mark.parametrize(
    ("name", "rows", "launch"),
    [
        ("pde_4gpu_baseline", 96, 4),
        ("pde_4gpu_optimized", 192, 4),
        ("pde_conservative", 160, 4),
        ("pde_2gpu_baseline", 120, 2),
        ("pde_2gpu_optimized", 120, 2),
    ],
)
def test_every_config_parses_to_its_effective_batch(name, rows, launch, tmp_path):
    defaults = runpy.run_path(RECIPE)["DEFAULTS"]
    parser = FastArgumentParser((OperatorArguments, FastTrainingArguments), presets=PRESETS, defaults=defaults)
    path = ROOT / "recipes" / "configs" / f"{name}.yaml"
    model_args, args = parser.parse_args_into_dataclasses(["--config", str(path), "--output_dir", str(tmp_path)])
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * launch == rows
    assert model_args.hidden_size == 384
    assert model_args.inverse_loss_every == {"baseline": 1}.get(name.rpartition("_")[2], 0 if "2gpu" in name else 4)


EQUAL = [*SMALL, "--max_steps", "4", "--effective_batch_size", "8", "--per_device_train_batch_size", "2"]
EQUAL += ["--without", "precision", "--warmup_steps", "0", "--learning_rate", "1e-3"]
FP32 = ("--mixed_precision", "no")


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
@pytest.mark.parametrize("optimizer", [["--without", "precision", "muon"], []], ids=["adamw", "muon"])
def test_ddp_and_fsdp2_train_what_one_process_trains(optimizer, tmp_path):
    launches = {
        "one": Launch("cpu", "NO", 1),
        "ddp": Launch("2cpu_ddp", "MULTI_CPU", 2),
        "fsdp2": Launch("2gpu_fsdp2", "FSDP", 2, FP32),
    }
    found = {}
    for name, launch in launches.items():
        facts = run_recipe(launch, tmp_path / name, "pde_operator.py", *EQUAL, *optimizer, limit_s=250)
        assert [process["steps"] for process in facts] == [4] * launch.processes
        assert {process["kind"] for process in facts} == {launch.kind}
        found[name] = {"weights": load_file(tmp_path / name / "output" / "model.safetensors")}
    bound = 1e-4 if optimizer else 2e-4  # Muon orthogonalises in bf16, which enlarges rounding
    assert difference(found["one"], found["ddp"]) < bound
    assert difference(found["one"], found["fsdp2"]) < bound
    half = ["--effective_batch_size", "4"]  # what each process would train alone
    run_recipe(launches["one"], tmp_path / "half", "pde_operator.py", *EQUAL, *optimizer, *half, limit_s=250)
    broken = {"weights": load_file(tmp_path / "half" / "output" / "model.safetensors")}
    assert difference(found["one"], broken) > 1e-3

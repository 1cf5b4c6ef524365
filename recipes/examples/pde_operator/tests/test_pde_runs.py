"""train.py as users run it: its scores, a killed run, several processes, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
import train
from launches import ONE_CPU, TWO_CPUS, Launch, run_recipe
from operators import make_operator, make_samples
from pde_operator.arguments import OperatorArguments
from pde_operator.results import score_names
from pde_operator.steps import build_model, check_start
from recipe_runs import Finished, kill_at, run

from hf_ext.errors import ArgumentError, NotFiniteError

RECIPE = "examples/pde_operator/train"
SMALL = ["--resolution", "16", "--num_train_samples", "24", "--num_eval_samples", "8", "--hidden_size", "16"]
SMALL += ["--num_hidden_layers", "1", "--num_attention_heads", "2", "--per_device_train_batch_size", "4"]
SMALL += ["--num_queries", "64", "--inverse_loss_every", "3", "--physics_every", "2"]
EPOCHS = [*SMALL, "--num_train_epochs", "3", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(RECIPE, tmp_path_factory.mktemp("whole"), *EPOCHS, "--require", "nrmse<=100")


@pytest.mark.nightly
def test_without_arguments_a_run_is_far_better_than_trivial_predictions(tmp_path):
    done = run(RECIPE, tmp_path)
    assert done.results["verdict"]["is_better"]
    assert done.results["test"]["factors"]["advection1d"] > 15
    assert done.results["test"]["factors"]["darcy2d"] > 5


@pytest.mark.nightly
def test_a_run_leaves_scores_beside_trivial_ones_and_everything_else(whole):
    results = whole.results
    assert results["task"] == "pde_operator"
    scores = results["test"]["scores"]
    assert set(scores) == {"model", "training mean", "persistence"}
    assert set(scores["model"]) == {"advection1d_nrmse", "darcy2d_nrmse", "nrmse"}
    assert set(scores["persistence"]) == {"advection1d_nrmse"}  # Darcy flow has no time
    mean = (scores["model"]["advection1d_nrmse"]["value"] + scores["model"]["darcy2d_nrmse"]["value"]) / 2
    assert scores["model"]["nrmse"]["value"] == pytest.approx(mean)
    assert score_names(["advection1d", "darcy2d"]) == [*scores["model"]]
    assert results["requirements"][0]["value"] == scores["model"]["nrmse"]["value"]
    assert whole.names >= {"README.md", "report.html", "model.safetensors", "config.json", "loss.png", "plan.json"}


@pytest.mark.nightly
def test_a_killed_run_goes_on_to_the_same_weights(whole, tmp_path):
    words = [*EPOCHS, "--save_steps", "1", "--dataloader_num_workers", "2"]
    kill_at("checkpoint-7*", RECIPE, tmp_path, *words, output="run")
    resumed = run(RECIPE, tmp_path, *words, output="run")
    assert "checkpoint" in resumed.stdout
    assert whole.difference(resumed) == 0.0


@pytest.mark.nightly
def test_a_killed_further_stage_goes_on_to_the_same_weights_and_continues_no_other_one(whole, tmp_path):
    words = [*EPOCHS, "--stage", "physics", "--init_from", str(whole.folder), "--save_steps", "1"]
    once = run(RECIPE, tmp_path, *words, output="once")
    kill_at("checkpoint-7*", RECIPE, tmp_path, *words, output="killed")
    resumed = run(RECIPE, tmp_path, *words, output="killed")
    assert once.difference(resumed) == 0.0
    assert once.difference(whole) > 0
    with pytest.raises(AssertionError, match="stage: physics in the checkpoint, operator now"):
        run(RECIPE, tmp_path, *EPOCHS, output="killed")


def test_a_further_stage_begins_with_the_weights_and_units_of_a_trained_operator(tmp_path):
    trained = make_operator()
    trained.save_pretrained(tmp_path)
    shape = {"resolution": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = OperatorArguments(**shape, init_from=str(tmp_path), stage="physics", task_weights=[1.0, 3.0])
    assert (given.inverse_loss_every, given.physics_every) == (0, 1)
    assert OperatorArguments(init_from=str(tmp_path), stage="physics", physics_every=2).physics_every == 2
    model = build_model(given, make_samples(24))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in trained.state_dict().items())
    assert model.config.target_stds == trained.config.target_stds  # of other samples than those of this run
    assert (model.config.stage, model.config.task_weights) == ("physics", [1.0, 3.0])
    check_start(given, str(tmp_path / "other"))
    for changed, words in (
        ({"hidden_size": 32}, "its hidden_size is 16, not 32: give --hidden_size 16"),
        ({"tasks": ["darcy2d"], "task_weights": None}, "give --tasks advection1d darcy2d"),
    ):
        with pytest.raises(ArgumentError, match=words):
            check_start(replace(given, **changed), str(tmp_path / "other"))
    with pytest.raises(ArgumentError, match="is the --output_dir"):
        check_start(given, str(tmp_path))


@pytest.mark.parametrize("metric", ["loss", "darcy2d_nrmse"])
def test_early_stopping_compares_every_metric_that_is_reported(metric, tmp_path):
    words = [*SMALL, "--output_dir", str(tmp_path / "run"), "--save_strategy", "no"]
    words += ["--max_steps", "6", "--eval_steps", "1", "--task_weights", "1", "3", "--learning_rate", "0"]
    asked = ["--early_stopping_patience", "2", "--metric_for_best_model", metric]
    results = train.main([*words, *asked])
    decisions = results["early_stopping"]["decisions"]
    assert [(one["step"], one["should_stop"]) for one in decisions] == [(1, False), (2, False), (3, True)]
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    name = f"eval_{metric.removeprefix('eval_')}"
    logged = next(entry[name] for entry in log if name in entry)
    assert decisions[-1]["against_best"]["after"] == pytest.approx(logged, rel=1e-4)


@pytest.mark.nightly
def test_the_control_is_transformers_own_trainer_on_the_same_losses(tmp_path):
    words = [*SMALL, "--preset", "baseline", "--logging_steps", "1", "--max_steps", "6", "--eval_strategy", "no"]
    ours = run(RECIPE, tmp_path, *words, "--without", "muon", output="ours")
    stock = run(RECIPE, tmp_path, *words, "--stock_trainer", "true", output="stock")
    assert stock.results["trainer"] == "transformers.trainer.Trainer"
    assert len(ours.losses) == 6
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4)


def test_a_mistake_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        ("--tasks burgers", "advection1d, darcy2d"),
        ("--resolution 30", "patch_size must be even and divide"),
        ("--num_queries 5000", "256 points"),
        ("--task_weights 1", "a number above 0 for each"),
        ("--metric_for_best_model rsme", "nrmse"),
        ("--num_train_samples 0", "num_train_samples=0: must be at least 1"),
        ("--samples_seed 4294967296", "from 0 to 4294967295"),
        ("--stage physics", "give its folder, --init_from"),
        ("--init_from nowhere", "no trained operator is there"),
        ("--use_peft true", "start from a model that was saved"),
    ):
        with pytest.raises(Exception, match=message):
            train.main([*SMALL, *arguments.split()])


def test_scores_that_are_no_numbers_end_the_run_with_an_error(tmp_path):
    words = [*SMALL, "--output_dir", str(tmp_path / "run"), "--max_steps", "3"]
    words += ["--eval_strategy", "no", "--save_strategy", "no", "--stock_trainer", "true", "--preset", "baseline"]
    with pytest.raises(NotFiniteError, match="8 of 8 test rows have errors that are NaN or infinite") as caught:
        train.main([*words, "--learning_rate", "1e30", "--warmup_steps", "0"])
    assert caught.value.exit_code == 65
    assert not (tmp_path / "run" / "all_results.json").exists()


EQUAL = [*SMALL, "--max_steps", "4", "--effective_batch_size", "8", "--per_device_train_batch_size", "2"]
EQUAL += ["--without", "precision", "--warmup_steps", "0", "--learning_rate", "1e-3"]
FP32 = ("--mixed_precision", "no")


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
@pytest.mark.parametrize("optimizer", [["--without", "precision", "muon"], []], ids=["adamw", "muon"])
def test_ddp_and_fsdp2_train_what_one_process_trains(optimizer, tmp_path):
    launches = {
        "one": ONE_CPU,
        "ddp": TWO_CPUS,
        "fsdp2": Launch("fsdp2", "FSDP", 2, ("--num_processes", "2", *FP32)),
    }
    half = ["--effective_batch_size", "4"]  # what each process would train alone
    found = {}
    for name, launch in (*launches.items(), ("half", launches["one"])):
        words = [*EQUAL, *optimizer, *(half if name == "half" else ())]
        facts = run_recipe(launch, tmp_path / name, f"{RECIPE}.py", *words, limit_s=250)
        assert [(process["steps"], process["kind"]) for process in facts] == [(4, launch.kind)] * launch.processes
        found[name] = Finished(0, "", "", tmp_path / name / "output")
    bound = 1e-4 if optimizer else 2e-4  # Muon orthogonalises in bf16, which enlarges rounding
    assert found["one"].difference(found["ddp"]) < bound
    assert found["one"].difference(found["fsdp2"]) < bound
    assert found["one"].difference(found["half"]) > 1e-3

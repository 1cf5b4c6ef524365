"""recipes/examples: a text, an image and a causal language model that nobody made for hf_ext, run as users run them."""

import importlib
import json
import math
import runpy

import pytest
from recipe_runs import RECIPES, Finished, kill_at, run

from hf_ext.errors import ArgumentError

NAMES = ("causal_lm", "image_classifier", "text_classifier")
EXAMPLES = RECIPES / "examples"
FEW = ["--num_rows", "64", "--num_test_rows", "24", "--per_device_train_batch_size", "8", "--logging_steps", "1"]
FEW += ["--disable_tqdm", "true"]


def run_here(name, folder, *words) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        module = importlib.import_module(name)
    (task,) = (
        one for one in vars(module).values() if getattr(one, "__module__", None) == name and hasattr(one, "judge")
    )
    task().main([*FEW, "--use_cpu", "true", "--output_dir", str(folder), *words])
    return Finished(0, "", "", folder)


def test_every_example_is_of_a_page():
    paths = {path.stem: path for path in EXAMPLES.glob("*.py") if path.stem != "any_model"}
    assert sorted(paths) == sorted(NAMES)
    assert all(len(path.read_text().splitlines()) < 125 for path in paths.values())


def test_what_the_examples_share_says_that_it_is_no_program_and_fails():
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "any_model.py"), run_name="__main__")
    assert all(f"{name}.py" in str(ended.value.code) for name in NAMES)  # a text: Python prints it, with status 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_every_example_splits_a_step_without_changing_it_under_every_preset_of_two(name, tmp_path):
    still = ["--max_steps", "3", "--eval_strategy", "steps", "--eval_steps", "3", "--save_strategy", "no"]
    whole = run_here(name, tmp_path / "a", *still, "--preset", "baseline")
    fast = run_here(name, tmp_path / "b", *still, "--preset", "max_speed")
    split = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
    parts = run_here(name, tmp_path / "c", *still, "--preset", "baseline", *split, "--per_device_eval_batch_size", "5")
    assert len(whole.losses) == len(fast.losses) == len(parts.losses) == 4
    if name != "text_classifier":  # BERT has dropout
        assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    if name == "causal_lm":
        (entry,) = [entry for entry in parts.read("trainer_state.json")["log_history"] if "eval_loss" in entry]
        assert math.exp(entry["eval_loss"]) == pytest.approx(entry["eval_perplexity"], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_beside_weights_that_are_kept_nowhere_are_refused(name, tmp_path):
    with pytest.raises(ArgumentError, match="the weights beside them are new here and kept nowhere"):
        run_here(name, tmp_path, "--use_peft")
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_without_arguments_an_example_is_far_better_than_its_baseline_and_leaves_what_every_run_leaves(name, tmp_path):
    done = run(f"examples/{name}", tmp_path)
    assert "Plan for" in done.stdout
    assert done.names >= {"plan.json", "report.html", "model.safetensors", "run.log", "throughput.json"}
    assert "README.md" not in done.names  # a card of ours would speak of proteins
    assert done.results["verdict"]["is_better"]
    assert f"recipes/examples/{name}.py" in json.dumps(done.results["command"])
    model, baseline = done.results["test"]["scores"].values()
    if name == "causal_lm":
        assert model["perplexity"]["value"] < 3.2 < 9 < baseline["perplexity"]["value"]
    else:
        assert model["accuracy"]["value"] > 0.9 > 0.6 > baseline["accuracy"]["value"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_example_goes_on_to_the_very_same_weights_and_log(name, tmp_path):
    words = [*FEW, "--max_steps", "60", "--save_strategy", "steps", "--save_steps", "5", "--eval_steps", "15"]
    words += ["--eval_strategy", "steps", "--save_total_limit", "2"]
    whole = run(f"examples/{name}", tmp_path, *words, output="whole")
    kill_at("checkpoint-*", f"examples/{name}", tmp_path, *words, output="killed")
    killed = run(f"examples/{name}", tmp_path, *words, output="killed")
    assert "checkpoint-" in killed.stdout
    assert killed.losses == whole.losses
    assert killed.difference(whole) == 0


@pytest.mark.nightly
def test_stock_trainer_is_the_control(tmp_path):
    done = run("examples/causal_lm", tmp_path, *FEW, "--max_steps", "2", "--stock_trainer", "true", "--resume", "no")
    assert done.results["trainer"] == "transformers.trainer.Trainer"
    assert "plan.json" not in done.names

"""recipes/max_speed.py and predict.py as users run them, and the configs of all recipes."""

import csv

import pytest
from documented_commands import ROOT, parse
from recipe_runs import ALONE, run

CACHED = ("--embedding_cache_dir", "cache", "--disable_tqdm", "true")
OUTPUTS = {
    *("README.md", "all_results.json", "config.json", "inputs.json", "loss.png", "model.safetensors", "plan.json"),
    *("model_manifest.json", "predictions.csv", "report.html", "run.log", "scatter.png", "tokenizers"),
    *("trainer_state.json", "training_args.json"),
}


def train(cwd, *words):
    return run("max_speed", cwd, *CACHED, *words)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return train(tmp_path_factory.mktemp("demo"), "--num_train_epochs", "3")


def test_the_demo_says_it_is_generated_and_writes_everything(demo):
    assert "generated demo data" in demo.stdout
    assert demo.names >= OUTPUTS
    assert not list(demo.folder.rglob("training_args.bin"))


def test_the_demo_learns_and_shows_trivial_baselines(demo):
    scores = demo.results["test"]["scores"]
    of_residues = {"one-hot ridge", "one-hot kernel ridge", "ridge on substitutions"}
    of_embeddings = {"ridge on embeddings", "kernel ridge on embeddings"}
    assert set(scores) - {"nearest one-hot", "nearest embeddings"} == {  # near rows where time allows it
        *("model", "training mean", *of_residues, *of_embeddings)
    }
    assert scores["model"]["spearman"]["low"] > 0.5
    assert scores["model"]["rmse"]["high"] < scores["training mean"]["rmse"]["low"]
    assert scores["training mean"]["spearman"]["value"] is None
    assert any("--use_peft --init_head_from" in line for line in demo.results["advice"])


def read_rows(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_demo_encodes_each_distinct_sequence_once(demo):
    assert len(read_rows(demo.folder / "predictions.csv")) == 300
    # 300 heavy and 40 light chains, 400 antigens, as far as 3,000 rows use them.
    assert 700 < demo.decision("embedding_cache")["evidence"]["num_encoded"] <= 740


def test_predict_repeats_the_predictions_of_training(demo, tmp_path):
    rows = read_rows(demo.folder / "predictions.csv")[:20]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["heavy", "light", "antigen"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    words = ("--model", str(demo.folder), "--dataset_name", "new.csv", "--embedding_cache_dir")
    run("predict", tmp_path, *words, str(demo.folder.parents[1] / "cache"), launcher=ALONE)
    predicted = [float(row["prediction"]) for row in read_rows(tmp_path / "predictions.csv")]
    assert predicted == pytest.approx([float(row["prediction"]) for row in rows], abs=1e-4)


@pytest.mark.nightly
def test_streaming_trains_and_scores(demo, tmp_path):
    encoders = demo.folder / "demo_encoders"
    streamed = train(
        tmp_path,
        *("--dataset_name", str(demo.folder / "predictions.csv"), "--streaming", "true", "--max_steps", "6"),
        *("--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false", "--split", "random"),
        *("--sequence_columns", "heavy", "light", "antigen", "--tower_inputs", "heavy,light", "antigen"),
        *("--label_column", "label", "--encoders", str(encoders / "bert"), str(encoders / "esm")),
        *("--logging_strategy", "steps"),
    )
    assert streamed.decision("embedding_cache")["status"] == "skipped"
    assert streamed.results["test"]["num_rows"] > 5


@pytest.mark.nightly
def test_baseline_and_max_speed_agree_on_the_demo(tmp_path):
    scores = {}
    for preset in ("baseline", "max_speed"):
        (tmp_path / preset).mkdir()
        outcome = train(tmp_path / preset, "--preset", preset, "--head", "mlp", "--num_train_epochs", "15")
        scores[preset] = outcome.results["test"]["scores"]["model"]
    for metric in ("spearman", "pearson", "rmse", "mae"):
        first, second = scores["baseline"][metric], scores["max_speed"][metric]
        assert first["low"] <= second["value"] <= first["high"], metric
        assert second["low"] <= first["value"] <= second["high"], metric


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["low_memory", "low_disk+reproducible", "max_speed+quick_eval"])
def test_every_other_preset_trains_the_demo(tmp_path, preset):
    assert train(tmp_path, "--preset", preset, "--max_steps", "4").results["test"]["num_rows"] == 300


@pytest.mark.nightly
def test_fine_tuning_is_one_flag(tmp_path):
    steps = ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    outcome = train(tmp_path, "--tower_training", "lora", "full", *steps)
    assert outcome.decision("embedding_cache")["status"] == "skipped"
    assert any("lora_A" in name for name in outcome.weights)
    assert "ridge on embeddings" in outcome.results["test"]["scores"]


TASKS = {"mlm_": "mlm", "generate_": "generate_antibody"}
CONFIGS = {
    path: next((task for start, task in TASKS.items() if path.name.startswith(start)), "max_speed")
    for path in sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
    if not path.name.startswith("progression_")  # of hf-ext compare
}


def test_every_config_is_parsed_by_its_recipe():
    best = "--load_best_model_at_end false"  # recipes have defaults that go with it
    parsed = {path.stem: parse(f"recipes/{task}.py --config {path} {best}") for path, task in CONFIGS.items()}
    assert len(parsed) == len(CONFIGS) >= 13
    for name, arguments in parsed.items():
        if hasattr(arguments[0], "encoders") and not name.startswith("mlm_"):
            assert arguments[1].dataset_name, name

"""`--missing_chains light` in runs: trained with, stored, predicted with, continued, by several processes."""

import csv
import importlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from inside import build_affinity_model
from launches import ONE_CPU, TWO_CPUS, run_recipe
from mistakes import make_sequence
from resuming_runs import Kill, Killed
from run_outcomes import same_tensors

from hf_ext.baselines import pooled_features
from hf_ext.data import DataArguments
from hf_ext.embeddings import encode as encoding
from hf_ext.errors import DataError
from hf_ext.property import AffinityArguments, AffinityPredictor, build_collator
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

COLUMNS = ["heavy", "light", "antigen"]
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NUM_ROWS = 90
WORDS = (
    "--sequence_columns heavy light antigen --label_column pKd --tower_inputs heavy,light antigen --use_cpu true "
    "--disable_tqdm true --without encoder_precision"  # float32, so that predictions can be compared
)
QUICK = "--num_train_epochs 2 --head_sizes 8 --head_dropout 0"


def make_rows() -> list[dict]:
    """Rows of unlike sequences, each third without a light chain; the label knows which."""
    chance = random.Random(0)
    return [
        {
            "heavy": make_sequence(number, 24),
            "light": "" if number % 3 == 0 else make_sequence(1000 + number, 18),
            "antigen": make_sequence(2000 + number, 20),
            "pKd": round(7 + (number % 3 == 0) + chance.gauss(0, 0.3), 4),
        }
        for number in range(NUM_ROWS)
    ]


def write(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def read(path: Path) -> list[dict]:
    with path.open() as file:
        return [*csv.DictReader(file)]


def recipe(name: str, words: list[str]):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        return importlib.import_module(name).main(words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, demo_encoders):
    """What a run by clusters wrote: its folder, its results, and the inputs that were encoded."""
    root = tmp_path_factory.mktemp("missing")
    data, out = write(root / "rows.csv", make_rows()), root / "out"
    encoded = []

    def fill(store, sequences, *given, **settings):
        encoded.extend(sequences)
        return encoding.fill_store(store, sequences, *given, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_ext.training.embedding_cache.fill_store", fill)
        files = ["--dataset_name", str(data), "--output_dir", str(out), "--embedding_cache_dir", str(root / "cache")]
        option = ["--missing_chains", "light", "--split", "cluster", "--encoders", *demo_encoders]
        results = recipe("max_speed", [*files, *option, *WORDS.split(), *QUICK.split()])
    return out, results, encoded


def test_a_run_counts_missing_chains_in_results_log_and_report_and_encodes_none_of_them(trained):
    out, results, encoded = trained
    counts, sizes = results["data"]["missing_chains"]["light"], results["data"]["sizes"]
    assert sum(counts.values()) == NUM_ROWS // 3
    assert counts["test"] == sum(not row["light"] for row in read(out / "predictions.csv")) > 0
    assert "learned to do without light: such a cell may be empty." in (out / "README.md").read_text()
    listed = ", ".join(f"{num} of {sizes[name]} in {name}" for name, num in counts.items())
    assert f"rows without light: {listed}" in (out / "run.log").read_text()
    for page in ("README.md", "report.html"):
        assert f"{counts['train']} of {sizes['train']}" in (out / page).read_text()
    assert {one for row in make_rows() for one in (row["heavy"], row["antigen"])} <= set(encoded)
    assert all(encoded)
    assert {"one-hot ridge", "ridge on embeddings"} <= set(results["test"]["scores"])


def test_predict_and_the_predictor_need_no_flag_and_say_what_the_run_said(trained, tmp_path):
    out, _, _ = trained
    rows = read(out / "predictions.csv")
    expected = np.array([float(row["prediction"]) for row in rows])
    given = [{name: row[name] for name in COLUMNS} for row in rows]
    predictor = AffinityPredictor.from_pretrained(out, device="cpu")
    np.testing.assert_allclose(predictor.predict(given), expected, atol=2e-5)
    nulls = [{**row, "light": row["light"] or None} for row in given]
    np.testing.assert_allclose(predictor.predict(nulls), expected, atol=2e-5)
    # Filled in, a chain changes what is predicted: the comparison sees it.
    filled = predictor.predict([{**row, "light": row["light"] or "DIQMTQSPSS"} for row in given])
    lacking = np.array([not row["light"] for row in given])
    assert np.abs(filled - expected)[lacking].min() > 1e-4
    np.testing.assert_allclose(filled[~lacking], expected[~lacking], atol=2e-5)
    for chain in ("heavy", "antigen"):
        with pytest.raises(DataError, match=rf"row 1, column '{chain}'.* in --missing_chains of training"):
            predictor.predict([{**given[0], chain: ""}])
    words = ["--model", str(out), "--use_cpu", "true", "--embedding_cache_dir", str(tmp_path / "cache")]
    chosen, output = [{**row, "light": ""} for row in given], tmp_path / "out.csv"
    data = ["--dataset_name", str(write(tmp_path / "none.csv", chosen))]
    recipe("hf_ext.finished.predict", [*words, *data, "--output", str(output)])
    found = [float(row["prediction"]) for row in read(output)]
    np.testing.assert_allclose(found, predictor.predict(chosen), atol=2e-5)


@pytest.fixture(scope="module")
def lacking(demo_rows):
    """120 demo rows, every third without a light chain."""
    rows = demo_rows.select(range(120))
    lights = ["" if number % 3 == 0 else light for number, light in enumerate(rows["light"])]
    return rows.remove_columns("light").add_column("light", lights)


@pytest.fixture
def make(demo_encoders, lacking, tmp_path):
    """A trainer on `lacking`; `model_settings` as on the command line."""

    def build(folder, rows=lacking, training=None, inputs="heavy,light", **given):
        fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2}
        fixed |= {"per_device_train_batch_size": 16, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        cache = {"embedding_cache_dir": str(tmp_path / "cache")}
        args = FastTrainingArguments(output_dir=str(folder), **{**fixed, **cache, **given})
        torch.manual_seed(args.seed)
        settings = {"head_sizes": [8], "head_dropout": 0.0, "tower_training": training}
        model_args = AffinityArguments(encoders=[*demo_encoders], tower_inputs=[inputs, "antigen"], **settings)
        model = build_affinity_model(model_args, COLUMNS)
        collator = build_collator(model, DataArguments(sequence_columns=COLUMNS, missing_chains=["light"]))
        return FastTrainer(model, args, collator, rows)

    return build


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.nightly
def test_scales_are_those_of_the_rows_that_have_the_chain_and_live_training_equals_cached(make, lacking, tmp_path):
    cached = make(tmp_path / "cached", speedups=["embedding_cache"])
    live = make(tmp_path / "live", speedups=[])
    for trainer in (cached, live):
        trainer.train()
    assert cached.plan.applied("embedding_cache")
    assert not live.plan.applied("embedding_cache")
    present = sorted({light for light in lacking["light"] if light})
    expected = cached.encode_distinct("light", present)
    head, width = cached.model.head, cached.model.embedding_sizes["heavy"]
    block = slice(width, width + expected.shape[1])
    torch.testing.assert_close(head.input_mean[block], expected.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.input_scale[block], 1 / expected.std(0, unbiased=False), rtol=1e-4, atol=1e-5)
    found, wanted = (torch.cat([p.flatten() for p in t.model.head.parameters()]) for t in (live, cached))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    without = lacking.filter(lambda row: not row["light"])
    for rows in (lacking, without):
        predicted = [trainer.predict(rows).predictions for trainer in (live, cached)]
        np.testing.assert_allclose(*predicted, rtol=1e-4)
        np.testing.assert_allclose(*(pooled_features(trainer, rows) for trainer in (live, cached)), atol=1e-5)


def test_ridges_and_an_ensemble_see_the_block_that_the_head_sees(make, lacking, tmp_path):
    trainer = make(tmp_path, speedups=["embedding_cache"])
    trainer.train()
    seen = []
    trainer.model.head.layers.register_forward_pre_hook(lambda layers, given: seen.append(given[0].clone()))
    trainer.predict(lacking)
    given = torch.from_numpy(pooled_features(trainer, lacking))
    head, width = trainer.model.head, trainer.model.embedding_sizes["heavy"]
    torch.testing.assert_close((given - head.input_mean) * head.input_scale, torch.cat(seen), rtol=1e-5, atol=1e-5)
    absent = torch.tensor([not light for light in lacking["light"]])
    assert torch.equal(given[absent, width : 2 * width], head.input_mean[width : 2 * width].expand(40, -1))
    without = lacking.filter(lambda row: not row["light"])
    assert torch.equal(torch.from_numpy(pooled_features(trainer, without)), given[absent])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("inputs", "training"), [("heavy,light", None), ("heavy+light", ["lora", "full"])])
def test_a_run_that_was_interrupted_continues_to_the_same_weights(make, tmp_path, inputs, training):
    given = {"speedups": ["embedding_cache"], "inputs": inputs, "training": training}
    whole = make(tmp_path / "whole", **given)
    whole.train()
    killed = make(tmp_path / "killed", **given)
    killed.add_callback(Kill(4, accumulation=1))  # one step after a checkpoint
    with pytest.raises(Killed):
        killed.train()
    killed.close()
    assert not same_tensors(weights(whole), weights(killed))
    again = make(tmp_path / "killed", **given, resume="auto")
    again.train()
    assert again.state.global_step == 6
    assert same_tensors(weights(whole), weights(again))


def test_a_training_set_in_which_all_rows_lack_the_chain_is_refused(make, lacking, tmp_path):
    rows = lacking.remove_columns("light").add_column("light", [""] * 120)
    for speedups in (["embedding_cache"], []):
        trainer = make(tmp_path / str(len(speedups)), rows=rows, speedups=speedups)
        with pytest.raises(DataError, match="None of 120 training rows has input 'light'"):
            trainer.train()


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
def test_two_processes_train_as_one_where_one_of_them_has_batches_without_the_chain(demo_encoders, tmp_path):
    rows = make_rows()
    for number, row in enumerate(rows):
        row["part"] = "train" if number < 60 else "valid" if number < 75 else "test"
        row["light"] = row["light"] if number % 3 == 1 else ""  # batches of 2 of which 4 of 9 have none
    data = write(tmp_path / "rows.csv", rows)
    steps = "--max_steps 5 --head_sizes 8 --head_dropout 0 --lora_dropout 0 --learning_rate 0.003"
    training = "--tower_training lora frozen --missing_chains light --split_column part --eval_strategy no"
    kept = "--save_strategy no --load_best_model_at_end false"
    words = [*WORDS.split(), *steps.split(), *training.split(), *kept.split(), "--encoders", *demo_encoders]
    found = []
    for launch, batch in ((TWO_CPUS, 2), (ONE_CPU, 4)):
        folder = tmp_path / launch.kind
        own = ["--per_device_train_batch_size", str(batch), "--embedding_cache_dir", str(folder / "cache")]
        facts = run_recipe(launch, folder, "max_speed.py", "--dataset_name", str(data), *words, *own)
        assert len({one["digest"] for one in facts}) == 1
        found.append([float(row["prediction"]) for row in read(folder / "output" / "predictions.csv")])
    np.testing.assert_allclose(*found, rtol=1e-3)
    config = json.loads((tmp_path / "NO" / "output" / "inputs.json").read_text())
    assert config["missing_chains"] == ["light"]

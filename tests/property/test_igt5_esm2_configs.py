"""The YAML files of IgT5 with ESM-2: what they become on a T4 and an A100, a run of each in miniature, and its disk."""

import json
from pathlib import Path

import pytest
from disk_samples import sampled
from igt5_esm2 import write_encoders, write_rows
from inside import build_affinity_model

from hf_ext.arguments import parse_command
from hf_ext.data import DataArguments
from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.property import TASK, AffinityArguments, AffinityPredictor, build_collator
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("igt5_esm2*.yaml"))
ORIGINAL = [path for path in CONFIGS if "original" in path.name]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> list[str]:
    """Words that put encoders and rows of this machine in the place of those that a YAML names."""
    folder = tmp_path_factory.mktemp("here")
    rows = write_rows(folder / "rows.csv", 300)  # 240 to train on: five steps of 48 an epoch
    return ["--encoders", *write_encoders(folder), "--dataset_name", rows, "--split", "random"]


@pytest.fixture
def train(here, tmp_path):
    """Runs a YAML in `folder`, cache beside; its results."""

    def trained(config: Path, *words: str, folder: Path = tmp_path) -> dict:
        places = ["--output_dir", str(folder / "run"), "--embedding_cache_dir", str(folder / "cache")]
        return TASK.main(["--config", str(config), *here, *places, "--disable_tqdm", "true", *words])

    return trained


def plan_of(config: Path, card: str, here: list[str], rows):
    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    words = ["--config", str(config), *here, "--output_dir", "o", "--dataloader_num_workers", "7"]
    _, (model_args, data_args, args) = parse_command(types, TASK.defaults, None, words)
    model = build_affinity_model(model_args, data_args.sequence_columns)
    collator = build_collator(model, data_args, model_args.max_length)
    plan = make_plan(args, model, rows, collator, describe_hardware(card))
    plan.check()
    return args, {decision.name: (decision.status, decision.reason) for decision in plan.decisions}


@pytest.mark.parametrize(("card", "half"), [("T4", "fp16"), ("A100", "bf16")])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_file_resolves_on_both_cards(config, card, half, here, demo_rows):
    assert len(CONFIGS) == 2
    args, lines = plan_of(config, card, here, demo_rows)
    name = describe_hardware(card).name
    assert lines["encoder_precision"] == ("applied", f"{half} weights on {name}")
    assert lines["precision"] == ("skipped", "only the head trains, and heads stay in float32")
    assert lines["embedding_cache"] == ("applied", "frozen: 198 heavy+light, 162 antigen distinct")
    assert lines["tf32"][0] == ("applied" if card == "A100" else "skipped")
    assert lines["batch_size"][0] == ("off" if config in ORIGINAL else "applied")
    if config in ORIGINAL:
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.learning_rate) == (12, 4, 4e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_run_trains_as_it_says(config, train, tmp_path):
    results, folder = train(config, "--num_train_epochs", "2", "--max_train_samples", "96"), tmp_path / "run"
    assert results["test"]["num_rows"] == 30
    if config not in ORIGINAL:
        return
    state, model = (json.loads((folder / name).read_text()) for name in ("trainer_state.json", "config.json"))
    assert state["global_step"] == 4  # of 48 rows
    assert [entry["epoch"] for entry in state["log_history"] if "eval_spearman" in entry] == [2.0]
    inputs = json.loads((folder / "inputs.json").read_text())
    assert [spec["max_residues"] for spec in inputs["inputs"]] == [510, 510]
    assert [tower["pooling"] for tower in model["towers"]] == ["mean_tokens", "cls"]
    assert (model["head_sizes"], model["head_dropout"]) == ([1024, 512, 256, 128], 0.3)
    assert (model.get("head_form"), model.get("ensemble")) == (None, None)
    assert len(AffinityPredictor.from_pretrained(folder).columns) == 3


SCALE = 150  # 9 GB of output folder become 60 MB; a checkpoint is 10 MB here, not 37
BUDGET_GB = 9 / SCALE
OFTEN = ["--save_minutes", "0.00001", "--max_steps", "18"]  # a checkpoint after every step


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


@pytest.mark.nightly
def test_the_best_and_the_three_latest_stay_within_the_budget_at_every_moment(train, tmp_path):
    folder = tmp_path / "run"
    with sampled(folder) as samples:
        train(ORIGINAL[0], *OFTEN, "--save_total_size_gb", str(BUDGET_GB))
    assert samples.peak_bytes <= round(BUDGET_GB * 10**9)
    assert "was not written" not in (folder / "run.log").read_text()
    # Epochs of 5 steps, evaluated every second one: the best is 10.
    assert kept(folder) == [10, 16, 17, 18]
    assert json.loads((folder / "trainer_state.json").read_text())["best_global_step"] == 10

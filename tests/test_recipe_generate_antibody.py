"""recipes/generate_antibody.py as users run it: the demo's rule is found, a shuffled twin is not believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.data.demo_pairs import make_demo_pairs
from hf_ext.optional import import_problem

ROOT = Path(__file__).resolve().parent.parent
RECIPE = str(ROOT / "recipes" / "generate_antibody.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1"]
# The demo's model, by flags.
SMALL = ("--d_model", "32", "--hidden_size", "64", "--attend", "true", "--dropout", "0", "--learning_rate", "0.01")
SMALL += ("--per_device_train_batch_size", "16")
lacks_anarcii = pytest.mark.skipif(import_problem("anarcii") is None, reason="numbering is installed: nothing is wrong")
QUICK = ("--num_judged", "40", "--num_reproduced", "10", "--num_epoch_samples", "2")
OUTPUTS = {
    *("README.md", "all_results.json", "config.json", "epoch_samples.jsonl", "gates.json", "generated.csv", "loss.png"),
    *("model.safetensors", "plan.json", "report.html", "report.md", "run.log", "tokenizer.json", "trainer_state.json"),
}


def run(folder: Path, *words: str, launcher: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf_home")}
    command = [*launcher, RECIPE, "--disable_tqdm", "true", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)


def read_results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("demo")
    done = run(folder, launcher=tuple(LAUNCH))
    output = folder / "outputs" / "generator"
    assert (output / "all_results.json").is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return {"done": done, "folder": output, "results": read_results(output)}


@pytest.mark.nightly
def test_the_demo_finds_the_planted_rule_and_passes_its_gates(demo: dict) -> None:
    assert demo["done"].returncode == 0, demo["done"].stderr[-2000:]
    assert "generated demo data, in which CDR-H3 follows the antigen by a planted rule" in demo["done"].stdout
    (effect,) = demo["results"]["generation"]["effects"]
    assert effect["condition"] == "antigen"
    assert effect["reading"] == "reads"
    assert effect["comparison"]["low"] > 0.01
    assert demo["results"]["verdict"]["is_better"]
    assert demo["results"]["gates_passed"]
    gates = json.loads((demo["folder"] / "gates.json").read_text())
    assert gates["passed"]
    assert [gate["name"] for gate in gates["stages"]["1"]["gates"]] == [
        *("num_errors", "token_loss", "reproduced", "valid")
    ]


@pytest.mark.nightly
def test_the_demo_leaves_everything_a_run_leaves(demo: dict) -> None:
    assert {path.name for path in demo["folder"].iterdir()} >= OUTPUTS
    assert not list(demo["folder"].rglob("*.bin"))
    assert demo["results"]["task"] == "generation"
    assert demo["results"]["stage"] == 1
    samples = [json.loads(line) for line in (demo["folder"] / "epoch_samples.jsonl").read_text().splitlines()]
    assert [sample["epoch"] for sample in samples] == [*range(1, 11)]
    assert samples[-1]["sampled_valid"] > 0.7
    assert len(samples[-1]["samples"]) == 16
    split = demo["results"]["data"]["split"]
    assert split["rule"] == "group:antigen"
    assert demo["results"]["data"]["leaks"]["columns"]["antigen"]["num_test_sequences_in_train"] == 0


@pytest.mark.nightly
def test_a_twin_trained_on_shuffled_pairs_ignores_the_antigen_and_fails(tmp_path: Path) -> None:
    """Gates that a model without an antigen can pass too are set aside, so that it is the verdict that tells."""
    table = make_demo_pairs().to_pandas()
    table["heavy"] = table["heavy"].sample(frac=1, random_state=0).to_numpy()
    table.to_csv(tmp_path / "pairs.csv", index=False)
    done = run(tmp_path, "--dataset_name", "pairs.csv", "--num_train_epochs", "4", *SMALL, *QUICK)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("GatesFailed: Stage 1 did not pass its gates (")
    output = tmp_path / "outputs" / "generator"
    results = read_results(output)
    assert results["generation"]["effects"][0]["reading"] == "ignores"
    assert "ignores the antigen" in (output / "report.md").read_text().split("\n\n")[1].lower()
    assert "ignores the antigen" in results["verdict"]["text"].lower()
    assert not results["verdict"]["is_better"]
    gates = json.loads((output / "gates.json").read_text())
    assert not gates["passed"]
    assert not gates["stages"]["1"]["passed"]
    failed = {gate["name"] for gate in gates["stages"]["1"]["gates"] if gate["passed"] is False}
    assert "reproduced" in failed
    assert "num_errors" not in failed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("--dataset_name", "pairs.csv", "--heavy_column", "vh"), "vh", marks=pytest.mark.nightly),
        pytest.param(("--dataset_name", "pairs.csv"), "row 3, column 'heavy'", marks=pytest.mark.nightly),
        pytest.param(("--stage", "5"), "stage", marks=pytest.mark.nightly),
        pytest.param(("--gate_unique", "0.5"), "no such gate", marks=pytest.mark.nightly),
        pytest.param(("--use_peft", "true"), "--encoder_training lora", marks=pytest.mark.nightly),
        pytest.param(("--stage", "auto", "--push_to_hub", "true"), "push the stage", marks=pytest.mark.nightly),
        pytest.param(("--numbering", "on"), "numbering", marks=[pytest.mark.nightly, lacks_anarcii]),
    ],
)
def test_a_mistake_ends_in_one_line_that_names_it(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "pairs.csv").write_text("antigen,heavy,light\nMKT,EVQ,DIQ\nMKV,EV1,DIQ\nMKL,EVQ,DIQ\n")
    done = run(tmp_path, *words)
    assert done.returncode == 1
    assert message in done.stderr.strip().splitlines()[-1] or message in done.stderr
    assert "Traceback" not in done.stderr

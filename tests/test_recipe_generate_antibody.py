"""recipes/generate_antibody.py as users run it: the demo's rule is found, a shuffled twin is not believed."""

import pytest
from recipe_runs import ALONE, run

from hf_ext.data import make_demo_pairs

pytestmark = pytest.mark.nightly
# The demo's model, by flags.
SMALL = ("--d_model", "32", "--hidden_size", "64", "--attend", "true", "--dropout", "0", "--learning_rate", "0.01")
SMALL += ("--per_device_train_batch_size", "16", "--num_judged", "40", "--num_reproduced", "10")
OUTPUTS = {
    *("README.md", "all_results.json", "config.json", "epoch_samples.jsonl", "gates.json", "generated.csv", "loss.png"),
    *("model.safetensors", "plan.json", "report.html", "run.log", "tokenizer.json", "trainer_state.json"),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return run("generate_antibody", tmp_path_factory.mktemp("demo"), "--disable_tqdm", "true", status=None)


def test_the_demo_finds_the_planted_rule_and_passes_its_gates(demo):
    assert demo.status == 0, demo.stderr[-2000:]
    assert "generated demo data, in which CDR-H3 follows the antigen by a planted rule" in demo.stdout
    (effect,) = demo.results["generation"]["effects"]
    assert (effect["condition"], effect["reading"]) == ("antigen", "reads")
    assert effect["comparison"]["low"] > 0.01
    assert demo.results["verdict"]["is_better"]
    gates = demo.read("gates.json")
    assert gates["passed"]
    names = [gate["name"] for gate in gates["stages"]["1"]["gates"]]
    assert names == ["token_loss", "reproduced", "valid"]


def test_the_demo_leaves_everything_a_run_leaves(demo):
    assert demo.names >= OUTPUTS
    assert not list(demo.folder.rglob("*.bin"))
    assert (demo.results["task"], demo.results["stage"]) == ("generation", 1)
    assert len((demo.folder / "epoch_samples.jsonl").read_text().splitlines()) == 10
    data = demo.results["data"]
    assert data["split"]["rule"] == "group:antigen"
    assert data["leaks"]["columns"]["antigen"]["num_test_sequences_in_train"] == 0


def test_a_twin_trained_on_shuffled_pairs_ignores_the_antigen_fails_and_no_stage_follows(tmp_path):
    table = make_demo_pairs().to_pandas()
    table["heavy"] = table["heavy"].sample(frac=1, random_state=0).to_numpy()
    table.to_csv(tmp_path / "pairs.csv", index=False)
    words = ("--dataset_name", "pairs.csv", "--stage", "auto", "--num_train_epochs", "4", "--num_epoch_samples", "2")
    done = run("generate_antibody", tmp_path, *words, *SMALL, launcher=ALONE, status=1)
    assert done.stderr.strip().splitlines()[-1].startswith("GatesFailed: Stage 1 did not pass its gates (")
    gates = done.read("gates.json")["stages"]
    assert [*gates] == ["1"]
    assert not (done.folder / "stage-2").exists()
    failed = {gate["name"] for gate in gates["1"]["gates"] if gate["passed"] is False}
    assert "reproduced" in failed
    results = done.read("stage-1/all_results.json")
    assert results["generation"]["effects"][0]["reading"] == "ignores"
    assert "ignores the antigen" in results["verdict"]["text"].lower()
    assert not results["verdict"]["is_better"]
    assert "ignores the antigen" in (done.folder / "stage-1" / "README.md").read_text().split("\n\n")[2].lower()

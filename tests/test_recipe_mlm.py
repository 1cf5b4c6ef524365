"""recipes/mlm.py as users run it: through accelerate, on demo data, then on a stream from its own model."""

import pytest
from recipe_runs import run

from hf_ext.masked_lm.steps import make_demo_sequences

pytestmark = [pytest.mark.internals, pytest.mark.nightly]
OUTPUTS = {
    *("README.md", "all_results.json", "config.json", "loss.png", "model.safetensors", "plan.json", "report.html"),
    *("run.log", "tokenizer_config.json", "trainer_state.json", "training_args.json", "vocab.txt"),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    required = ("--require", "perplexity<=20", "accuracy>=0.01", "--disable_tqdm", "true")
    return run("mlm", tmp_path_factory.mktemp("demo"), "--num_train_epochs", "6", *required)


def test_the_demo_says_it_is_generated_and_writes_everything(demo):
    assert "generated demo data" in demo.stdout
    assert demo.names >= OUTPUTS
    assert not list(demo.folder.rglob("training_args.bin"))
    assert demo.results["trainer"] == "hf_ext.trainer.FastTrainer"
    assert [one["metric"] for one in demo.results["requirements"]] == ["perplexity", "accuracy"]


def test_the_demo_learns_more_than_residue_frequencies(demo):
    model, unigram = demo.results["test"]["model"], demo.results["test"]["unigram"]
    assert [*model] == ["token_loss", "perplexity", "accuracy", "num_tokens"]
    assert model["num_tokens"] == unigram["num_tokens"] > 500
    assert model["perplexity"] < unigram["perplexity"] - 2
    assert model["accuracy"] > unigram["accuracy"] + 0.05
    assert 15 < unigram["perplexity"] < 20


def test_training_continues_on_a_stream_with_its_own_tokenizer(demo, tmp_path):
    fasta = "".join(f">{i}\n{row['sequence']}\n" for i, row in enumerate(make_demo_sequences().select(range(60))))
    (tmp_path / "proteins.fasta").write_text(fasta)
    words = ("--dataset_name", "proteins.fasta", "--streaming", "true", "--max_steps", "10", "--max_residues", "40")
    results = run("mlm", tmp_path, *words, "--model_name_or_path", str(demo.folder)).results
    assert results["train"]["epoch"] == 1.0  # three passes and more, one endless epoch
    assert results["settings"]["max_residues"] == 40
    assert 30 < results["test"]["model"]["num_tokens"] < 200
    assert results["test"]["model"]["perplexity"] < results["test"]["unigram"]["perplexity"]


def test_the_control_is_transformers_own_trainer(tmp_path):
    stock = run("mlm", tmp_path, "--stock_trainer", "true", "--model_size", "demo", "--max_steps", "2")
    assert stock.results["trainer"] == "transformers.trainer.Trainer"
    assert OUTPUTS - stock.names == {"plan.json", "training_args.json"}

"""`hf-ext compare` as users run it, with a small recipe that trains and one that fails."""

import importlib
import json
from pathlib import Path

import pytest
from recipe_runs import ALONE, RECIPES, Finished, run

from hf_ext.errors import ArgumentError

RECIPE = """
import sys
import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, EsmConfig, EsmForMaskedLM, EsmTokenizer
from hf_ext.arguments.parser import FastArgumentParser
from hf_ext.arguments.presets import PRESETS
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

parser = FastArgumentParser((FastTrainingArguments,), presets=PRESETS)
(args,) = parser.parse_args_into_dataclasses()
if "fused_gelu" in args.without and "precision" not in args.without:
    sys.exit("no memory without fused_gelu")
args.mark_explicit(parser.explicit)
torch.manual_seed(args.seed)
tokenizer = EsmTokenizer.from_pretrained({encoder!r})
rows = Dataset.from_dict(dict(tokenizer(["ACDEFGHIKLMNPQRSTVWY"[: 3 + i % 17] for i in range(64)])))
config = EsmConfig.from_pretrained({encoder!r})
trainer = FastTrainer(
    EsmForMaskedLM(config), args, DataCollatorForLanguageModeling(tokenizer), rows, rows.select(range(16))
)
trainer.train()
trainer.save_metrics("all", trainer.evaluate(), combined=False)
trainer.end()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, demo_encoders) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.py"
    path.write_text(RECIPE.format(encoder=demo_encoders[1]))
    return path


def compare(recipe: Path, cwd: Path, *words: str, status: int = 0) -> Finished:
    shared = ["--max_steps", "12", "--use_cpu", "true", "--save_strategy", "no", "--logging_steps", "2"]
    shared += ["--per_device_train_batch_size", "4"]
    words = ("--recipe", str(recipe), "--output_dir", "out", *words, "--", *shared)
    return run("compare", cwd, *words, launcher=ALONE, status=status)


@pytest.mark.nightly
def test_a_comparison_runs_reports_and_fails_by_its_own_exit_status(recipe, tmp_path) -> None:
    limits = ["--min_speedup", "1e12", "--max_loss_delta", "10", "--max_memory_gib", "100"]
    optimized = ["--optimized", "max_speed --without precision cpu_matmul"]
    done = compare(recipe, tmp_path, "--rounds", "2", *optimized, *limits, status=3)
    assert [line for line in done.stdout.splitlines() if ", round " in line] == [
        f"{side}, round {round_}" for round_ in range(2) for side in ("baseline", "max_speed")
    ]
    verdicts = [line[2:6] for line in done.stdout.splitlines() if line.startswith(("- PASS", "- FAIL"))]
    assert verdicts == ["FAIL", "PASS", "PASS"]
    result = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (result["unit"], result["passed"]) == ("residues", False)
    assert result["sides"]["max_speed"]["sequences_per_step"] == 4
    assert result["sides"]["baseline"]["metric"]["value"] > 0
    assert abs(result["against"]["baseline"]["loss"]["value"]) < 0.5
    assert (tmp_path / "out" / "comparison.md").is_file()
    assert not (tmp_path / "out" / "baseline" / "round_0" / "embeddings").exists()


def test_a_child_that_fails_ends_the_comparison_with_its_log(tmp_path) -> None:
    (tmp_path / "broken.py").write_text("import sys\nprint('reading data')\nsys.exit('row 7: no sequence')\n")
    done = compare(tmp_path / "broken.py", tmp_path, status=1)
    assert "ChildFailed: baseline, round 0: exit status 1" in done.stderr
    assert "reading data\nrow 7: no sequence" in done.stderr


@pytest.mark.nightly
def test_an_ablation_has_a_row_for_each_speedup_that_was_applied(recipe, tmp_path) -> None:
    compare(recipe, tmp_path, "--rounds", "2", "--ablate", "true")
    result = json.loads((tmp_path / "out" / "comparison.json").read_text())
    plan = json.loads((tmp_path / "out" / "max_speed" / "round_0" / "plan.json").read_text())
    applied = [decision["name"] for decision in plan["decisions"] if decision["status"] == "applied"]
    assert [row["speedup"] for row in result["ablation"]] == applied
    failed = next(row for row in result["ablation"] if row["speedup"] == "fused_gelu")
    assert failed["verdict"] == "failed: no memory without fused_gelu"
    assert all(row["ratio"]["value"] > 0 for row in result["ablation"] if row["ratio"])


def test_a_wrong_argument_is_named_with_the_nearest(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(RECIPES)
    compare_main = importlib.import_module("hf_ext.comparing.comparison").main
    for words, message in (
        ("--round 3", r"unknown argument '--round', did you mean '--rounds'\?"),
        ("--rounds x", "--rounds: invalid int value: 'x'"),
        ("--rounds 0", "rounds=0: must be at least 1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compare_main(["--output_dir", str(tmp_path / "out"), *words.split(), "--", "--x"])
    assert not (tmp_path / "out").exists()

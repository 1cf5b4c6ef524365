"""Five example scripts of transformers, unchanged but for the import: the losses of stock Trainer.

The scripts are not part of this repository. HF_EXT_EXAMPLES names the folder `examples/pytorch` of transformers.
"""

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from locations import HELPERS
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast, GPT2Config, GPT2LMHeadModel

pytestmark = pytest.mark.nightly
EXAMPLES = os.environ.get("HF_EXT_EXAMPLES")
DRIVER = HELPERS / "example_driver.py"
LETTERS = "abcdefghijklmnopqrst"
NUM_STEPS = 6

SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "text-classification/run_glue.py": ("bert", ["--train_file", "rows.csv", "--validation_file", "rows.csv"]),
    "text-classification/run_classification.py": (
        "bert",
        [
            *("--train_file", "rows.csv", "--validation_file", "rows.csv"),
            *("--text_column_names", "sentence", "--label_column_name", "label", "--metric_name", "accuracy"),
        ],
    ),
    "language-modeling/run_mlm.py": (
        "bert",
        ["--train_file", "text.txt", "--validation_file", "text.txt", "--line_by_line", "--max_seq_length", "32"],
    ),
    "language-modeling/run_clm.py": (
        "gpt2",
        ["--train_file", "text.txt", "--validation_file", "text.txt", "--block_size", "16"],
    ),
    "token-classification/run_ner.py": ("bert", ["--train_file", "ner.json", "--validation_file", "ner.json"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Rows of letters with labels, and two models of a layer."""
    folder = tmp_path_factory.mktemp("examples")
    draw = random.Random(0)
    rows = [" ".join(draw.choices(LETTERS, k=draw.randint(4, 12))) for _ in range(64)]
    (folder / "text.txt").write_text("\n".join(rows) + "\n")
    with open(folder / "rows.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["sentence", "label"])
        table.writerows([row, row.count("a") % 2] for row in rows)
    tagged = [{"tokens": row.split(), "ner_tags": ["A" if t < "k" else "O" for t in row.split()]} for row in rows]
    (folder / "ner.json").write_text("\n".join(map(json.dumps, tagged)) + "\n")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 25, "pad_token_id": 0}
    bert = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **sizes)
    gpt2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=2, eos_token_id=3, **sizes)
    for name, model in (("bert", BertForMaskedLM(bert)), ("gpt2", GPT2LMHeadModel(gpt2))):
        model.save_pretrained(folder / name)
        BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder / name)
    return folder


def run(script: str, which: str, data: Path, given: tuple[str, ...] = ()) -> dict[str, Any]:
    """The losses of a run, and the metrics of its evaluation."""
    model, files = SCRIPTS[script]
    output = data / f"{Path(script).stem}-{which}{len(given)}"
    arguments = [
        *("--model_name_or_path", model, "--output_dir", str(output), "--do_train", "--do_eval", "--use_cpu"),
        *("--max_steps", str(NUM_STEPS), "--logging_steps", "1", "--save_steps", "3", "--learning_rate", "1e-3"),
        *("--per_device_train_batch_size", "8", "--max_eval_samples", "10", "--report_to", "none", *files, *given),
    ]
    command = [sys.executable, str(DRIVER), which, str(Path(EXAMPLES or "", script)), *arguments]
    done = subprocess.run(command, cwd=data, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    results = json.loads((output / "all_results.json").read_text())
    return {
        "losses": [(e["step"], e["loss"], e["grad_norm"]) for e in log if "loss" in e],
        "eval_samples": results["eval_samples"],
        "checkpoints": sorted(path.name for path in output.glob("checkpoint-*")),
        "manifests": len(list(output.glob("checkpoint-*/manifest.json"))),
    }


@pytest.mark.skipif(not EXAMPLES, reason="HF_EXT_EXAMPLES does not name transformers' folder examples/pytorch")
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_learns_what_it_learns_with_trainer(script, data):
    ours, stock = run(script, "fast", data), run(script, "stock", data)
    print(script, ours["losses"])
    assert len(ours["losses"]) == NUM_STEPS
    assert ours["losses"] == stock["losses"]
    assert ours["eval_samples"] == stock["eval_samples"] <= 10
    assert ours["checkpoints"] == stock["checkpoints"] == ["checkpoint-3", "checkpoint-6"]
    assert (ours["manifests"], stock["manifests"]) == (2, 0)
    assert run(script, "fast", data, ("--seed", "1"))["losses"] != stock["losses"]

"""A collapsed run is called what it is, everywhere a person may look.

Nine predicted values, 36.6 % of labels at one number, an RMSE no better than a constant, and a Spearman of 0.4 beside
it: what a public run was once praised for.
"""

import csv
import json
import re
from html import unescape

import numpy as np
import pytest
import torch
from datasets import Dataset
from inside import build_affinity_model, compute_metrics, score_split

from hf_ext.arguments import parse_command
from hf_ext.data import DataArguments, load_data
from hf_ext.evaluation import judge
from hf_ext.models import AffinityModel
from hf_ext.property import TASK, AffinityArguments, build_collator
from hf_ext.property.results import collect_results
from hf_ext.tasks import Run
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
NUM_ROWS = 1000
NUM_TIED = 366
LOWEST, STEP = 7.75, 0.03125  # bfloat16 numbers, somewhat above the mean of the labels


class NineValues(AffinityModel):
    """Rounds what its head says to nine values; gradients pass as if it did not."""

    def forward(self, *args, labels=None, num_items_in_batch=None, **kwargs):
        output = super().forward(*args, **kwargs)
        level = (4 + 20 * (output.logits - self.config.label_mean).detach()).round().clamp(0, 8)
        output.logits = LOWEST + STEP * level + (output.logits - output.logits.detach())
        if labels is not None:
            output.loss = ((output.logits - labels) ** 2).sum() / (num_items_in_batch or len(labels))
        return output


def make_table() -> Dataset:
    """36.6 % of the labels are 6, the others spread; which residues a sequence has tells something about them."""
    generator = np.random.default_rng(0)
    letters = generator.integers(0, 20, (NUM_ROWS, 12))
    sequences = ["".join("ACDEFGHIKLMNPQRSTVWY"[i] for i in row) for row in letters]
    labels = generator.uniform(4, 12, NUM_ROWS) + 0.1 * (letters - 9.5).sum(1)
    labels[generator.permutation(NUM_ROWS)[:NUM_TIED]] = 6.0
    return Dataset.from_dict({"heavy": sequences, "light": sequences, "antigen": sequences, "pKd": labels.tolist()})


@pytest.fixture(scope="module")
def run(demo_encoders, tmp_path_factory):
    """A whole run as the recipe does it, but for the model's class: folder, trainer and scores."""
    folder = tmp_path_factory.mktemp("collapsed")
    words = (
        f"--output_dir {folder} --embedding_cache_dir {folder}/cache --use_cpu true --disable_tqdm true "
        f"--encoders {' '.join(demo_encoders)} --tower_inputs heavy,light antigen --head_sizes 8 --label_column pKd "
        "--sequence_columns heavy light antigen --split random --split_sizes 0.6 0.2 0.2 --preset max_speed "
        "--learning_rate 0.001 --num_train_epochs 2 --eval_strategy epoch --save_strategy no --logging_strategy epoch "
        "--metric_for_best_model spearman --report_to none"
    )
    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    run = Run(TASK, *parse_command(types, {}, None, words.split()))
    model_args, data_args, args = run.model_args, run.data_args, run.args
    data = load_data(data_args, output_dir=folder, seed=args.seed, table=make_table())
    torch.manual_seed(0)
    model = build_affinity_model(model_args, data_args.sequence_columns)
    model.__class__ = NineValues
    trainer = FastTrainer(
        model,
        args,
        build_collator(model, data_args),
        data.splits["train"],
        data.splits["validation"],
        compute_metrics=compute_metrics,
    )
    trained = trainer.train()
    trainer.save_model()
    trainer.save_state()
    test = score_split(trainer, data.splits, "test", 9.0, None, leaks=data.report["leaks"])
    run.finish(trainer, trained, collect_results(run, trainer, test, data, {}))
    return folder, trainer, test


def test_the_run_fails_as_the_public_one_did_and_alarms_came_while_it_trained(run):
    folder, trainer, test = run
    with (folder / "predictions.csv").open() as file:
        values = [float(row["prediction"]) for row in csv.DictReader(file)]
    assert len(set(values)) == 9
    assert 0.25 < np.mean(test.labels == 6.0) < 0.5
    assert test.scores["model"]["rmse"]["value"] >= test.scores["training mean"]["rmse"]["value"]
    alarms = " ".join(alarm for entry in trainer.collapse_alarms for alarm in entry["alarms"])
    assert all(words in alarms for words in ("distinct values in", "no better than", "bfloat16"))
    assert trainer.collapse_alarms[0]["step"] < trainer.state.global_step


def test_table_record_report_and_card_say_it_first(run):
    folder, trainer, test = run
    text = test.verdict.text
    assert test.verdict.is_better is False
    assert test.table().splitlines()[0] == text
    assert text.startswith("No better than a constant: RMSE")
    record = json.loads((folder / "all_results.json").read_text())
    assert record["verdict"] == record["test"]["verdict"] == test.verdict.as_dict()
    assert record["alarms"] == trainer.collapse_alarms
    assert record["labels"]["train"]["most_frequent_value"] == 6
    assert text in text_lines((folder / "README.md").read_text())[:2]
    page = (folder / "report.html").read_text()
    words = unescape(re.sub(r"<[^>]+>", " ", page[page.index("<body") :]))
    assert re.sub(r"\s+", " ", words).index(text) < 400


def text_lines(markdown: str) -> list[str]:
    """Lines of text: no YAML block, no comment, no heading, no emphasis."""
    body = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    lines = [line.strip().strip("*_> ") for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_a_sound_run_is_not_called_collapsed(run):
    """The twin: the same labels, predicted with an error."""
    labels = run[2].labels
    sound = labels + np.random.default_rng(0).normal(0, 0.5, len(labels))
    assert judge(labels, {"model": sound, "training mean": np.full(len(labels), labels.mean())}).is_better

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

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.building import build_collator, build_model
from hf_ext.affinity.results import save_results
from hf_ext.affinity.scoring import compute_metrics, score_split
from hf_ext.arguments.parser import FastArgumentParser
from hf_ext.arguments.presets import PRESETS
from hf_ext.data.arguments import DataArguments
from hf_ext.data.loading import load_data
from hf_ext.models.affinity import AffinityModel
from hf_ext.reporting.card import write_card
from hf_ext.reporting.report import write_report
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

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
    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    parser = FastArgumentParser(types, presets=PRESETS)
    model_args, data_args, args = parser.parse_args_into_dataclasses(
        [
            *("--output_dir", str(folder), "--use_cpu", "true", "--report_to", "none", "--disable_tqdm", "true"),
            *("--encoders", *demo_encoders, "--tower_inputs", "heavy,light", "antigen", "--head_sizes", "8"),
            *(
                "--sequence_columns",
                "heavy",
                "light",
                "antigen",
                "--label_column",
                "pKd",
                "--split",
                "random",
                "--split_sizes",
                "0.6",
                "0.2",
                "0.2",
            ),
            *("--embedding_cache_dir", str(folder / "cache"), "--preset", "max_speed", "--learning_rate", "0.001"),
            *("--num_train_epochs", "2", "--eval_strategy", "epoch", "--save_strategy", "no"),
            *("--metric_for_best_model", "spearman", "--logging_strategy", "epoch"),
        ]
    )
    args.mark_explicit(parser.explicit)
    data = load_data(data_args, output_dir=folder, seed=args.seed, table=make_table())
    torch.manual_seed(0)
    model = build_model(model_args, data_args.sequence_columns)
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
    settings = {**vars(model_args), **vars(data_args)}
    save_results(trainer, trained, test, data.splits, data.report, settings, parser)
    trainer.end()
    write_report(folder)
    write_card(folder)
    return folder, trainer, test


def test_the_run_fails_as_the_public_one_did(run):
    folder, _, test = run
    with (folder / "predictions.csv").open() as file:
        values = [float(row["prediction"]) for row in csv.DictReader(file)]
    assert len(set(values)) == 9
    assert all(value * 32 == round(value * 32) for value in values)
    assert 0.25 < np.mean(test.labels == 6.0) < 0.5
    assert test.scores["model"]["rmse"]["value"] >= test.scores["training mean"]["rmse"]["value"]


def test_the_score_table_says_it_first(run):
    first = run[2].table().splitlines()[0]
    assert first.startswith("No better than a constant: ")
    assert "RMSE" in first
    assert run[2].verdict.is_better is False


def test_the_alarm_came_while_it_trained(run):
    _, trainer, _ = run
    alarms = [alarm for entry in trainer.collapse_alarms for alarm in entry["alarms"]]
    assert any("distinct values in" in alarm for alarm in alarms)
    assert any("RMSE" in alarm and "no better than" in alarm for alarm in alarms)
    assert any("bfloat16" in alarm for alarm in alarms)
    assert trainer.collapse_alarms[0]["step"] < trainer.state.global_step


def test_the_record_has_verdict_alarms_and_the_tied_labels(run):
    record = json.loads((run[0] / "all_results.json").read_text())
    assert record["verdict"] == record["test"]["verdict"] == run[2].verdict.as_dict()
    assert record["alarms"] == run[1].collapse_alarms
    assert record["labels"]["train"]["most_frequent_value"] == 6


def text_lines(markdown: str) -> list[str]:
    """Lines of text: no YAML block, no comment, no heading, no emphasis."""
    body = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    lines = [line.strip().strip("*_> ") for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", ["report.md", "README.md"])
def test_report_and_card_say_it_first(run, name):
    assert run[2].verdict.text in text_lines((run[0] / name).read_text())[:2]


def test_the_page_says_it_before_any_section(run):
    page = (run[0] / "report.html").read_text()
    words = unescape(re.sub(r"<[^>]+>", " ", page[page.index("<body") :]))
    place = re.sub(r"\s+", " ", words).index(run[2].verdict.text)
    assert place < 400


def test_a_sound_run_is_not_called_collapsed(run):
    """The twin: the same labels, predicted with an error."""
    from hf_ext.evaluation.verdict import judge

    labels = run[2].labels
    sound = labels + np.random.default_rng(0).normal(0, 0.5, len(labels))
    mean = np.full(len(labels), labels.mean())
    assert judge(labels, {"model": sound, "training mean": mean}).is_better

"""One measure of what is best: by the loss, or by what the user names; and what the verdict compares in."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.measure import BEST_BY_LOSS, describe_measure, settle_measure, verdict_metric
from hf_ext.running import parse_command
from hf_ext.training_args import FastTrainingArguments


@pytest.fixture
def parse(monkeypatch):
    """Training arguments of a command line of the recipe, after `settle_measure`, and the line that says so."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "recipes"))
    defaults = importlib.import_module("max_speed").DEFAULTS

    def parsed(words: str) -> tuple[FastTrainingArguments, str]:
        _, (model_args, args) = parse_command((AffinityArguments, FastTrainingArguments), defaults, "", words.split())
        settle_measure(args, model_args.loss)
        return args, describe_measure(args, model_args.loss)

    return parsed


@pytest.mark.parametrize(
    ("words", "metric", "greater", "verdict"),
    [
        ("", "rmse", False, "rmse"),
        ("--loss huber", "rmse", False, "rmse"),
        ("--loss tobit", "loss", False, "rmse"),  # baselines have no tobit loss: the verdict takes its own
        ("--loss ranking", "spearman", True, "spearman"),
        ("--loss ranking --metric_for_best_model rmse", "rmse", False, "rmse"),  # as the default, but typed
        ("--loss tobit --metric_for_best_model pearson", "pearson", True, "pearson"),
        ("--metric_for_best_model eval_r2", "r2", True, "r2"),
        ("--loss ranking --greater_is_better false", "spearman", False, "spearman"),
        ("--metric_for_best_model rmse --greater_is_better true", "rmse", True, "rmse"),
    ],
)
def test_loss_or_user_say_what_is_best_and_one_line_says_what_was_taken(parse, words, metric, greater, verdict):
    args, line = parse(words)
    assert (args.metric_for_best_model.removeprefix("eval_"), args.greater_is_better) == (metric, greater)
    end = "highest" if greater else "lowest"
    assert line == f"Best checkpoint: {end} validation {metric} (--metric_for_best_model); verdict in {verdict}."


def test_last_weights_are_said_to_be_kept_and_every_loss_has_a_measure(parse):
    line = parse("--load_best_model_at_end false")[1]
    assert "not asked for, the last weights are kept" in line
    assert sorted(BEST_BY_LOSS) == sorted(get_args(get_type_hints(AffinityArguments)["loss"]))


def test_the_verdict_takes_a_metric_that_models_and_baselines_both_have():
    for given, name in (
        ("eval_full_mae", "mae"),
        ("full_r2", "r2"),
        ("eval_loss", None),
        ("num_distinct", None),
        ("full_eval_rmse", None),  # no such metric is ever logged
        (None, None),
    ):
        args = FastTrainingArguments("never_made", report_to="none", metric_for_best_model=given)
        assert verdict_metric(args) == name

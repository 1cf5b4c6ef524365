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
    """Training arguments and loss of a command line of the recipe."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "recipes"))
    defaults = importlib.import_module("max_speed").DEFAULTS

    def parsed(words: str = "") -> tuple[FastTrainingArguments, str]:
        _, (model_args, args) = parse_command((AffinityArguments, FastTrainingArguments), defaults, "", words.split())
        return args, model_args.loss

    return parsed


@pytest.mark.parametrize(
    ("loss", "metric", "greater", "verdict"),
    [
        ("mse", "rmse", False, "rmse"),
        ("huber", "rmse", False, "rmse"),
        ("tobit", "loss", False, None),  # baselines have no tobit loss: the verdict takes its own
        ("ranking", "spearman", True, "spearman"),
    ],
)
def test_each_loss_has_its_measure_and_the_direction_of_it(parse, loss, metric, greater, verdict):
    args, loss = parse(f"--loss {loss}")
    settle_measure(args, loss)
    assert (args.metric_for_best_model, args.greater_is_better) == (metric, greater)
    assert verdict_metric(args) == verdict


def test_every_loss_that_can_be_asked_for_has_a_measure():
    allowed = get_args(get_type_hints(AffinityArguments)["loss"])
    assert sorted(BEST_BY_LOSS) == sorted(allowed)
    assert len(allowed) == 4


@pytest.mark.parametrize("loss", sorted(BEST_BY_LOSS))
def test_a_metric_that_the_user_names_is_kept_whatever_the_loss(parse, loss):
    args, loss = parse(f"--loss {loss} --metric_for_best_model pearson")
    settle_measure(args, loss)
    assert (args.metric_for_best_model, args.greater_is_better, verdict_metric(args)) == ("pearson", True, "pearson")


def test_the_metric_of_the_defaults_is_not_one_that_the_user_named(parse):
    args, loss = parse("--loss ranking")
    assert args.metric_for_best_model == "rmse"
    settle_measure(args, loss)
    assert args.metric_for_best_model == "spearman"
    named, loss = parse("--loss ranking --metric_for_best_model rmse")  # the twin: typed, if the same
    settle_measure(named, loss)
    assert (named.metric_for_best_model, named.greater_is_better) == ("rmse", False)


def test_a_direction_that_the_user_names_is_kept_too(parse):
    args, loss = parse("--loss ranking --greater_is_better false")
    settle_measure(args, loss)
    assert (args.metric_for_best_model, args.greater_is_better) == ("spearman", False)
    args, loss = parse("--metric_for_best_model rmse --greater_is_better true")
    settle_measure(args, loss)
    assert (args.metric_for_best_model, args.greater_is_better) == ("rmse", True)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("rmse", "rmse"),
        ("eval_rmse", "rmse"),
        ("eval_full_mae", "mae"),
        ("full_r2", "r2"),
        ("loss", None),
        ("eval_loss", None),
        ("num_distinct", None),
        ("full_eval_rmse", None),  # no such metric is ever logged
        (None, None),
    ],
)
def test_the_verdict_takes_a_metric_that_models_and_baselines_both_have(given, name):
    args = FastTrainingArguments("never_made", report_to="none", metric_for_best_model=given)
    assert verdict_metric(args) == name


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "Best checkpoint: lowest validation rmse (--metric_for_best_model); verdict in rmse."),
        ("--loss tobit", "Best checkpoint: lowest validation loss (--metric_for_best_model); verdict in rmse."),
        (
            "--loss ranking",
            "Best checkpoint: highest validation spearman (--metric_for_best_model); verdict in spearman.",
        ),
        (
            "--metric_for_best_model eval_r2",
            "Best checkpoint: highest validation r2 (--metric_for_best_model); verdict in r2.",
        ),
        (
            "--load_best_model_at_end false",
            "Best checkpoint: not asked for, the last weights are kept (--load_best_model_at_end); verdict in rmse.",
        ),
    ],
)
def test_the_measure_is_said_in_one_line(parse, words, line):
    args, loss = parse(words)
    settle_measure(args, loss)
    assert describe_measure(args, loss) == line

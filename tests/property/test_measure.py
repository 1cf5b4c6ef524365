"""One measure of what is best: by the loss, or by what the user names; and what the verdict compares in."""

import pytest
from datasets import Dataset

from hf_ext.arguments import parse_command
from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import RowMetrics
from hf_ext.labels import ONE_NUMBER, make_kind
from hf_ext.property import TASK, AffinityArguments
from hf_ext.property.measure import check_measure, describe_measure, resolve_measure
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
CLASSES = make_kind("classification", ("y",), ("a", "b", "c"))


@pytest.fixture
def parse():
    """Training arguments of a command line of the recipe, after `resolve_measure`, and the line that says so."""
    defaults = {name: value for name, value in TASK.defaults.items() if name != "too_long"}  # of rows

    def parsed(words: str) -> tuple[FastTrainingArguments, str]:
        _, (model_args, args) = parse_command((AffinityArguments, FastTrainingArguments), defaults, "", words.split())
        resolve_measure(args, model_args.loss, ONE_NUMBER)
        return args, describe_measure(args, model_args.loss, RowMetrics())

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


def check(metric, metrics, loss="mse", labels=None):
    args = FastTrainingArguments("never_made", report_to="none", metric_for_best_model=metric)
    check_measure(args, loss, metrics, None if labels is None else Dataset.from_dict({"label": labels}))


def test_a_measure_that_nothing_computes_is_refused_with_what_it_needs():
    for metric, metrics, loss, message in (
        ("recall", RowMetrics(), "mse", "recall needs a --binder_threshold that divides the labels"),
        ("f1", RowMetrics(9.0), "ranking", "have no unit.*Give average_precision"),
        ("recal", RowMetrics(9.0), "mse", "'recal': allowed are loss, spearman, .*, recall, .*, num"),
        ("f1", RowMetrics(kind=CLASSES), "mse", "'f1': allowed are loss, accuracy, .*, mcc, macro_f1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            check(metric, metrics, loss)


def test_validation_rows_that_no_prediction_could_score_are_refused():
    labels = [7.0, 8.0, 8.9]
    with pytest.raises(DataError, match=r"'recall': no label of the evaluation rows is at or above .* 9"):
        check("recall", RowMetrics(9.0), labels=labels)
    for metric, loss in (("recall", "mse"), ("average_precision", "ranking"), ("rmse", "mse")):  # the innocent twins
        check(metric, RowMetrics(8.9), loss, labels)

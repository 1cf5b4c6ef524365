"""`--require`: what is typed is read strictly, and held against scores; what has no value fails."""

import math

import pytest

from hf_ext.errors import ArgumentError, RequirementsFailed
from hf_ext.evaluation import check_requirements, describe_failed, parse_requirements, requirements

KNOWN = ["spearman", "rmse", "recall"]


def check(text: str, score: object) -> dict:
    (one,) = check_requirements(parse_requirements([text], KNOWN), {"spearman": score, "rmse": score, "recall": score})
    return one


@pytest.mark.parametrize(
    ("text", "value", "passed"),
    [
        ("spearman>=0.60", 0.6, True),
        ("spearman>=0.60", 0.5999999, False),
        ("spearman > 0.6", 0.6, False),
        ("rmse<=1.35", 1.35, True),
        ("rmse<1.35", 1.35, False),
        ("recall>=4e-1", 0.41, True),
        ("spearman>=-0.1", -0.05, True),
        ("rmse<=1.35", math.nan, False),
        ("rmse<=1.35", None, False),
        ("rmse<=1.35", -math.inf, False),  # no error is infinite
    ],
)
def test_a_requirement_holds_or_does_not(text, value, passed):
    assert check(text, value)["passed"] is passed
    assert check(text, {"value": value, "low": None, "high": None})["passed"] is passed


def test_what_cannot_be_meant_is_refused():
    ends = ["", "=0.6", ">=", ">=0,6", ">=nan", ">=1e999", ">=0.6 rmse<=1"]  # the first is left of one without quotes
    forms = [*(f"spearman{end}" for end in ends), "0.6<=spearman", ""]
    wrong = dict.fromkeys(forms, "write METRIC>=NUMBER or METRIC<=NUMBER, in quotes")
    wrong["sperman>=0.6"] = "unknown metric 'sperman', did you mean 'spearman'.; known here are spearman, rmse, recall"
    wrong["Spearman>=0.6"] = "unknown metric"
    wrong["rmse>=1.35"] = "less is better, so write rmse<=1.35"
    wrong["recall<=0.4"] = "more is better, so write recall>=0.4"
    for text, message in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            parse_requirements([text], KNOWN)


def test_the_speed_of_training_is_required_in_batches_per_second_and_of_what_trains_alone():
    requirements = parse_requirements(["speed>=3", "rmse<=1.35"], KNOWN)
    for rate, passed in ((3.02, True), (2.99, False)):
        checked = check_requirements(requirements, {"rmse": 1.3, "train_batches_per_s": rate})
        assert [one["passed"] for one in checked] == [passed, True]
    assert describe_failed(check_requirements(requirements[:1], {})) == ["speed is undefined, expected >=3"]
    with pytest.raises(ArgumentError, match="unknown metric 'speed'"):
        parse_requirements(["speed>=3"], KNOWN, trains=False)
    with pytest.raises(ArgumentError, match="of speed more is better"):
        parse_requirements(["speed<=3"], KNOWN)


def test_a_run_ends_only_where_one_failed():
    requirements.raise_failed(describe_failed([check("rmse<=1.35", 1.3)]), "All is there.")
    checked = [check("rmse<=1.35", 1.45), check("recall>=0.1", 0.2)]
    with pytest.raises(RequirementsFailed, match=r"^rmse is 1\.45, expected <=1\.35\. All is there\.$") as failed:
        requirements.raise_failed(describe_failed(checked), "All is there.")
    assert failed.value.exit_code == 3

import math

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from hf_ext.data.repeats import describe_repeats, is_much_noise, repeat_report


def splits(train, test, **columns):
    """Rows of (heavy, light, label)."""
    parts = {"train": train, "test": test}
    return DatasetDict(
        {
            name: Dataset.from_dict({**dict(zip(("heavy", "light", "label"), map(list, zip(*rows)))), **columns})
            for name, rows in parts.items()
        }
    )


ROWS = [("A", "C", 6.0), ("A", "D", 8.0), ("A", "C", 7.0), ("K", "C", 5.0)], [("K", "C", 5.0), ("W", "W", 9.0)]


def test_noise_and_ceiling_by_hand():
    report = repeat_report(splits(*ROWS), ["heavy", "light"])
    # (A, C) has 6 and 7, (K, C) twice 5: squares of 0.5 with 2 degrees of freedom; labels 6 8 7 5 5 9 vary by 20 / 9.
    noise = math.sqrt(0.5 / 2)
    share = 0.25 / (20 / 9)
    assert {key: value for key, value in report.items() if key != "rows"} == pytest.approx(
        {
            "num_all": 6,
            "num_rows": 4,
            "num_groups": 2,
            "num_disagreeing": 1,
            "noise": noise,
            "share": share,
            "max_pearson": math.sqrt(1 - share),
            "max_spearman": 6 / math.pi * math.asin(math.sqrt(1 - share) / 2),
        }
    )
    assert report["rows"] == [[{"split": "train", "row": 1, "label": 6.0}, {"split": "train", "row": 3, "label": 7.0}]]
    assert "1 of 2 sequences that occur more than once (4 rows)" in describe_repeats(report)
    assert "train row 1 6, train row 3 7" in describe_repeats(report)


def test_one_column_alone_repeats_more():
    assert repeat_report(splits(*ROWS), ["heavy"])["num_rows"] == 5


def test_repeats_that_agree_say_nothing():
    report = repeat_report(splits([("A", "C", 6.0), ("A", "C", 6.0)], [("A", "C", 6.0)]), ["heavy", "light"])
    assert (report["num_rows"], report["num_disagreeing"]) == (3, 0)
    assert describe_repeats(report) == ""
    assert not is_much_noise(report)


def test_bounds_are_no_measurements_that_could_disagree():
    data = splits([("A", "C", 6.0), ("A", "C", 7.0)], [("K", "C", 5.0), ("K", "K", 8.0)], bound=[-1, 0])
    assert repeat_report(data, ["heavy", "light"])["num_rows"] == 0
    data = splits([("A", "C", 6.0), ("A", "C", 7.0)], [("K", "C", 5.0), ("K", "K", 8.0)], bound=[0, 0])
    assert repeat_report(data, ["heavy", "light"])["num_rows"] == 2


def test_the_ceiling_is_what_a_perfect_model_reaches():
    rng = np.random.default_rng(0)
    truth = np.repeat(rng.normal(7, 1, 1000), 2)
    labels = truth + rng.normal(0, 0.5, 2000)
    rows = [(f"{'A' * (index // 2 + 1)}", "C", float(label)) for index, label in enumerate(labels)]
    report = repeat_report(splits(rows[:1800], rows[1800:]), ["heavy", "light"])
    ranks = [np.argsort(np.argsort(values)) for values in (truth + 1e-9 * rng.random(2000), labels)]
    assert report["noise"] == pytest.approx(np.sqrt(np.mean((labels - truth) ** 2)), rel=0.05)
    assert report["max_pearson"] == pytest.approx(np.corrcoef(truth, labels)[0, 1], abs=0.02)
    assert report["max_spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=0.02)
    assert is_much_noise(report)  # a fifth of the variance, in every row


def test_few_repeats_do_not_put_the_whole_set_in_doubt():
    rows = [("A" * (index + 1), "C", float(index % 7)) for index in range(100)]
    report = repeat_report(splits([*rows, ("A", "C", 6.0)], [("K", "C", 5.0)]), ["heavy", "light"])
    assert report["share"] > 0.5
    assert not is_much_noise(report)
    assert describe_repeats(report)

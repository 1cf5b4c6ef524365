"""Labels in another unit, that stand for something else, or that the loss cannot use."""

import numpy as np
import pytest
from mistakes import BASE, NUM_ROWS, Case, Mistake, check_mistake, check_twin, make_sequence, parametrized, spread

from hf_ext.evaluation.alarms import unit_alarms


def labels(values, words: str = "", **columns) -> Case:
    return Case(columns={"pKd": list(values), **columns}, words=words)


def cell(value: object, words: str = "") -> Case:
    return Case({(5, "pKd"): value}, words=words)


def said(*words: str) -> tuple[str, ...]:
    return ("{file}, row 5, column 'pKd'", *words)


PKD = BASE["pKd"]
MOLAR = [f"{10**-value:.3g}" for value in PKD]
NANOMOLAR = [f"{10 ** (9 - value):.4g}" for value in PKD]
BOUNDED = [f"<={value}" if value < 6 else str(value) for value in PKD]
MARKS = ["<" if value < 6 else "" for value in PKD]
PLAIN_MARKS = ["="] * NUM_ROWS
# Rows 2 and 3, 4 and 5, ... are one sequence each, measured twice.
TWICE = [make_sequence(number // 2) for number in range(NUM_ROWS)]
LEVELS = [5 + 0.2 * (number // 2) for number in range(NUM_ROWS)]

MISTAKES = [
    Mistake("a missing label", cell(""), said("the label is missing", "leave the row out")),
    Mistake("a word", cell("strong"), said("'strong': the label is not a number")),
    Mistake(
        "names of classes",
        labels(["soluble", "insoluble"] * 30),
        (
            "column 'pKd': soluble and insoluble look like names of classes",
            "does not train yet",
            "0 and 1",
            "text_classifier",
        ),
    ),
    Mistake("yes and no", labels(["True", "False"] * 30), ("True and False look like names of classes",)),
    Mistake("numbered classes", labels(["class1", "class2"] * 30), ("class1 and class2 look like names of classes",)),
    Mistake("... that are to be dropped", labels(["a", "b"] * 30, "--bad_rows drop"), ("a and b look like names",)),
    Mistake(
        "several labels in a cell",
        labels(["membrane;nucleus", "nucleus"] * 30),
        ("membrane;nucleus and nucleus look like several labels in one cell", "one number per row"),
    ),
    Mistake("several numbers in a cell", labels(["1;0;1", "0;0;1"] * 30), ("look like several labels in one cell",)),
    Mistake("units everywhere", labels(["7 nM", "8 nM"] * 30), ("row 2, column 'pKd', value '7 nM'", "decimal point")),
    Mistake(
        "0 and 1",
        labels([0, 1] * 30),
        ("Two values, 0 and 1: a regression is fitted", "RMSE and Spearman say little", "text_classifier.py"),
        labels(spread(0, 1)),
        kind="warning",
        before="silent",
    ),
    Mistake("a decimal comma", cell("7,3"), said("not a number", "decimal point"), cell("7.3")),
    Mistake("a thousands mark", cell("1_000"), said("not a number"), cell("9.000")),
    Mistake("a unit in the cell", cell("7.3 nM"), said("not a number"), cell(" 7.3 ")),
    Mistake("NaN", cell("nan"), said("the label is NaN", "every weight")),
    Mistake("infinity", cell("inf"), said("infinite", "a bound")),
    Mistake("beyond float32", cell("1e38"), said("larger than 1e30", "logarithm")),
    Mistake("too near to 0", cell("1e-400"), said("too near to 0")),
    Mistake("all the same", labels([7.0] * NUM_ROWS), ("column 'pKd'", "training labels are 7", "nothing to learn")),
    Mistake(
        "-999 for not measured",
        cell("-999"),
        said("value '-999'", "reads as a missing value", "between 5.2 and 11.3", "Leave the row out"),
        labels([*spread(-2000, 2000, NUM_ROWS - 1), -999]),
        before="silent",
    ),
    Mistake(
        "999 for not measured",
        cell("999"),
        said("missing value"),
        labels(spread(900, 1000)),
        before="silent",
    ),
    Mistake(
        "-999 and -99 in many rows",  # was: "a detection limit? If so, write them as <=-999"
        labels([-999 if row % 4 == 0 else -99 if row % 4 == 1 else value for row, value in enumerate(PKD)]),
        ("30 values cannot be used", "row 2, column 'pKd', value '-999'", "row 3, column 'pKd', value '-99'"),
        before="misleading",
    ),
    Mistake(
        "0 for not measured",
        labels([0] * 9 + PKD[9:]),
        ("exactly 0, the lowest value", "write them as <=0; if nothing was measured there, leave them out (--filter)"),
        labels([0] * 2 + spread(0.01, 3)[2:]),
        kind="warning",
        before="misleading",
    ),
    Mistake(
        "a detection limit that is not marked",
        labels([max(value, 6.0) for value in PKD]),
        ("exactly 6, the lowest value, and not marked as censored", "<=6"),
        labels([f"<={6.0}" if value < 6 else value for value in PKD], "--loss tobit"),
        kind="warning",
    ),
    Mistake(
        "log10 Kd with a threshold for it",
        labels([-value for value in PKD], "--binder_threshold -8"),
        ("all labels are negative (-11.3 to -5.2)", "--binder_threshold -8 takes", "the weakest"),
        labels([value - 12 for value in spread(9.0, 11.9)], "--binder_threshold -1"),  # a fitness as logarithm
        kind="note",
        before="silent",
    ),
    Mistake(
        "binding energies with a threshold for them",
        labels(spread(-13.5, -6.8), "--binder_threshold -11"),
        ("binding energies, of which the lowest bind best",),
        labels(spread(6.8, 13.5), "--binder_threshold 11"),
        kind="note",
        before="silent",
    ),
    Mistake(
        "Kd in M",
        labels(MOLAR),
        ("as concentrations in M", "-log10", "weakest binders"),
        labels([value / 1e5 for value in spread(-30, 30)]),  # small effects of both signs
        kind="warning",
        before="silent",
    ),
    Mistake(
        "Kd in nM",
        labels(NANOMOLAR),
        ("as concentrations in nM or pM", "pKd = 9 - log10 of nM"),
        labels(spread(1.0, 5000.0)),  # melting points, counts: positive and wide, but even
        kind="warning",
        before="silent",
    ),
    Mistake(
        "Kd in M among pKd",
        labels([MOLAR[row] if row < 12 else value for row, value in enumerate(PKD)]),
        ("labels are at most", "e-07, the other", "at least 5.2", "two units in one column"),
        labels([*spread(5, 6.5, 30), *spread(9, 10.5, 30)]),  # two families of binders
        kind="warning",
        before="silent",
    ),
    Mistake(
        "repeated rows with labels far apart",
        Case(columns={"sequence": TWICE, "pKd": [value + 1.5 * (row % 2) for row, value in enumerate(LEVELS)]}),
        # Noise: every pair differs by 1.5, so sqrt(1.5^2 / 2) = 1.061 remains.
        (
            "30 of 30 sequences that occur more than once",
            "Noise of 1.06",
            "RMSE",
            "no Pearson rises above",
            "no Spearman",
        ),
        Case(columns={"sequence": TWICE, "pKd": LEVELS}),
        kind="warning",
        before="silent",
    ),
    Mistake(
        "repeated rows with labels that differ a little",
        Case(columns={"sequence": TWICE, "pKd": [value + 0.1 * (row % 2) for row, value in enumerate(LEVELS)]}),
        ("30 of 30 sequences", "Noise of 0.0707", "Average them"),
        kind="note",
        before="silent",
    ),
    Mistake(
        "bounds with a loss that takes them for values",
        labels(BOUNDED),
        ("training labels are bounds", "--loss mse takes for exact values", "--loss tobit"),
        labels(BOUNDED, "--loss tobit"),
        kind="warning",
        before="silent",
    ),
    Mistake(
        "a censor column with a loss that does not read it",
        labels(PKD, "--censor_column mark --loss huber", mark=MARKS),
        ("training labels are bounds", "--loss huber takes for exact values"),
        labels(PKD, "--censor_column mark --loss ranking", mark=MARKS),
        kind="warning",
        before="silent",
    ),
    Mistake(
        "a censor column that marks no row",
        labels(PKD, "--censor_column mark --loss tobit", mark=PLAIN_MARKS),
        ("--censor_column mark: none of the 48 training labels is a bound",),
        labels(PKD, "--censor_column mark --loss tobit", mark=MARKS),
        kind="warning",
        before="silent",
    ),
    Mistake(
        "tobit without a bound",
        labels(PKD, "--loss tobit"),
        ("--loss tobit: none of the 48 training labels is a bound", "--censor_column"),
        labels(BOUNDED, "--loss tobit"),
        kind="warning",
        before="silent",
    ),
    Mistake(
        "an unknown censor mark",
        labels(PKD, "--censor_column mark", mark=["yes", *PLAIN_MARKS[1:]]),
        ("{file}, row 2, column 'mark', value 'yes': not a censoring mark", "0/1"),
    ),
    Mistake(
        "a censor mark against the sign",
        labels(["<=6", *PKD[1:]], "--censor_column mark", mark=[">", *PLAIN_MARKS[1:]]),
        ("{file}, row 2, column 'mark'", "contradicts the sign"),
    ),
    Mistake(
        "a threshold above all labels",
        labels(spread(4.0, 8.5), "--binder_threshold 9"),
        ("--binder_threshold 9: all 60 labels (4 to 8.5) are below it", "say nothing"),
        labels(spread(4.0, 8.5), "--binder_threshold 7"),
        kind="warning",
        before="silent",
    ),
    Mistake(
        "a threshold below all labels",
        labels(spread(4.0, 8.5), "--binder_threshold 4"),
        ("are at or above it", "say nothing"),
        labels(spread(4.0, 8.5), "--binder_threshold 4.1"),
        kind="warning",
        before="silent",
    ),
]


@parametrized(MISTAKES)
def test_mistake_is_named(mistake, tmp_path, demo_encoders):
    check_mistake(mistake, tmp_path, demo_encoders[1])


@pytest.mark.sampled(16)
@parametrized(MISTAKES)
def test_its_innocent_twin_passes(mistake, tmp_path, demo_encoders):
    check_twin(mistake, tmp_path, demo_encoders[1])


RNG = np.random.default_rng(0)
# Shapes that real sets have, drawn here because the sets themselves stay where they are.
REAL_LOOKING = {
    "pKd by SPR": RNG.normal(8.5, 0.7, 700).clip(6, 10.5),
    "fitness with most variants dead": RNG.lognormal(-2.5, 1.8, 3000).clip(0, 9),
    "fitness of single variants": RNG.beta(2, 1.5, 5000),
    "stability scores": RNG.normal(0.5, 0.9, 5000),
    "changes in binding energy": RNG.normal(1.0, 1.5, 2000),
    "melting points": RNG.normal(60, 9, 400),
    "percent of wild type": RNG.gamma(1.2, 40, 1000),
    "classes": RNG.integers(0, 3, 500).astype(float),
    "hits": RNG.integers(0, 2, 500).astype(float),
}


@pytest.mark.parametrize("name", REAL_LOOKING)
def test_labels_as_real_sets_have_them_raise_no_question_of_units(name):
    values = REAL_LOOKING[name]
    assert unit_alarms(values) == []


def test_few_labels_say_nothing_about_units():
    assert unit_alarms(np.array([float(text) for text in MOLAR[:29]])) == []
    assert unit_alarms(np.array([float(text) for text in MOLAR[:30]])) != []

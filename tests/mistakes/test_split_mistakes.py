"""Splits that share rows, or lack rows."""

from pathlib import Path

import pytest
from mistakes import (
    BASE,
    NUM_ROWS,
    Case,
    Mistake,
    check_mistake,
    check_twin,
    make_sequence,
    parametrized,
)

PKD = BASE["pKd"]
PARTS = ["train"] * 40 + ["valid"] * 10 + ["test"] * 10
VARIANTS = [make_sequence(0, 100)[:row] + "W" + make_sequence(0, 100)[row + 1 :] for row in range(NUM_ROWS)]
GROUPS = [f"g{row % 6}" for row in range(NUM_ROWS)]


def parts(names=PARTS, words: str = "--split_column split", **columns) -> Case:
    return Case(columns={"split": list(names), **columns}, words=words)


def two_files(folder: Path) -> Path:
    for name, rows in (("train", range(40)), ("test", range(40, 60))):
        lines = [f"{BASE['sequence'][row]},{PKD[row]}" for row in rows]
        (folder / f"{name}.csv").write_text("\n".join(["sequence,pKd", *lines]) + "\n")
    return folder


def three_files(folder: Path) -> Path:
    two_files(folder)
    lines = [f"{make_sequence(70 + row)},{6 + row}\n" for row in range(5)]
    (folder / "valid.csv").write_text("sequence,pKd\n" + "".join(lines))
    return folder


MISTAKES = [
    Mistake(
        "no share for validation",  # was: refused, with advice to give all three shares
        Case(words="--split_sizes 0.8 0 0.2"),
        ("leaves no rows for validation", "best model is chosen", "5 rows (8% of all, seed 42) became it"),
        Case(words="--split_sizes 0.8 0.1 0.1"),
        kind="note",
        before="misleading",
    ),
    Mistake(
        "a split column without validation",
        parts([name.replace("valid", "train") for name in PARTS]),
        ("no row says validation: 6 of 50 train rows (seed 42) became it",),
        parts(),
        kind="note",
        before="silent",
    ),
    Mistake(
        "a folder without a validation file",
        Case(make=two_files),
        ("no row says validation: 4 of 40 train rows (seed 42) became it",),
        Case(make=three_files),
        kind="note",
        before="silent",
    ),
    Mistake(
        "no test rows",
        parts([name.replace("test", "train") for name in PARTS]),
        ("There is no test split", "--split_sizes"),
        parts(),
    ),
    Mistake("no training rows", parts(["test"] * NUM_ROWS), ("split column 'split': no row says train",)),
    Mistake(
        "an unknown split",
        parts(["hold-out" if name == "test" else name for name in PARTS]),
        ("10 values", "row 52, column 'split', value 'hold-out': names no split. Use train, valid (or", "--filter"),
        parts([name.upper() for name in PARTS]),
    ),
    Mistake(
        "one training row",  # was: "all 1 training labels are 7.1, so there is nothing to learn"
        parts(["train", *["valid"] * 29, *["test"] * 30]),
        ("{file}: there is 1 training row", "nothing can be learned"),
        before="misleading",
    ),
    Mistake(
        "a subset of one row",
        Case(words="--max_train_samples 1"),
        ("--max_train_samples 1: there is 1 training row",),
        Case(words="--max_train_samples 30"),
        before="misleading",
    ),
    Mistake("one row", Case(text="sequence,pKd\nMKTVLA,7\n"), ("{file}: one row is left",)),
    Mistake("shares that do not sum to 1", Case(words="--split_sizes 0.8 0.1 0.2"), ("sum to 1",)),
    Mistake("two ways to split", parts(words="--split_column split --split random"), ("give one of them",), parts()),
    Mistake("an unknown rule", Case(words="--split scaffold"), ("split='scaffold'", "random, group:COLUMN or cluster")),
    Mistake(
        "fewer groups than splits",
        Case(columns={"antibody": ["a", "b"] * 30}, words="--split group:antibody"),
        ("2 groups in column 'antibody' cannot fill 3 splits",),
        Case(columns={"antibody": GROUPS}, words="--split group:antibody"),
    ),
    Mistake(
        "rows without a group",
        Case(columns={"antibody": ["", *GROUPS[1:]]}, words="--split group:antibody"),
        ("{file}, row 2, column 'antibody'", "the group is missing"),
    ),
    Mistake(
        "clusters of one protein's variants",
        Case(
            columns={"sequence": VARIANTS},
            words="--split cluster",
        ),
        ("cluster",),
        Case(words="--split cluster"),
    ),
]


@parametrized(MISTAKES)
def test_mistake_is_named(mistake, tmp_path, demo_encoders):
    check_mistake(mistake, tmp_path, demo_encoders[1])


@pytest.mark.sampled(4)
@parametrized(MISTAKES)
def test_its_innocent_twin_passes(mistake, tmp_path, demo_encoders):
    check_twin(mistake, tmp_path, demo_encoders[1])

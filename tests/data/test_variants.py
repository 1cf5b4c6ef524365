"""Variants of one protein: which protein, mutations as sequences, the numbers of rows, and splits that leak nothing."""

import json
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

from hf_ext.data import (
    DataArguments,
    Fold,
    Variants,
    find_folds,
    find_substitutions,
    find_whole,
    find_wild_type,
    load_data,
    load_sequences,
    read_mutations,
)
from hf_ext.data.splits import split_rows
from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import ResamplingGroups
from hf_ext.property.rows import find_groups, held_out_values

pytestmark = pytest.mark.internals
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
WILD = "MKTAYIAKQRQISFVKSHFSRQLEERLGLI"  # 30 residues


def mutate(words: str) -> str:
    return read_mutations(words, WILD).value


def scan(positions=range(1, 31), residues="GPW") -> list[str]:
    """Single substitutions, each position by each of these residues that is not there."""
    return [f"{WILD[i - 1]}{i}{new}" for i in positions for new in residues if WILD[i - 1] != new]


def table(words: list[str]) -> Dataset:
    sequences = [mutate(one) for one in words]
    return Dataset.from_dict({"sequence": sequences, "source_row": list(range(2, 2 + len(words)))})


def divide(words: list[str], rule: str, sizes=(0.6, 0.2, 0.2), **given):
    args = DataArguments(split=rule, split_sizes=[*sizes], wild_type=WILD, **given)
    splits, report = split_rows(table(words), args)
    return {name: [words[row - 2] for row in one["source_row"]] for name, one in splits.items()}, report, splits


def positions_of(words: list[str]) -> set[str]:
    return {part[1:-1] for one in words for part in one.split(":") if one != "WT"}


def shared(parts) -> set[str]:
    """Positions of rows of more than one split."""
    places = Counter(position for words in parts.values() for position in positions_of(words))
    return {position for position, num in places.items() if num > 1}


def test_the_wild_type_is_found_in_the_rows_or_by_their_residues_and_nowhere_else():
    assert find_wild_type([mutate(one) for one in scan()]) == WILD  # of no row: the most frequent residues
    every = [a + b + c + WILD[3:] for a in "MA" for b in "KA" for c in "TA"]
    assert find_wild_type(every) == WILD  # the first row, though each is as near to the others
    assert find_wild_type(every[::-1]) == "AAA" + WILD[3:]
    singles = [mutate(one) for one in scan()]
    rng = np.random.default_rng(0)
    strange = ["".join(rng.choice([*LETTERS], 30)) for _ in range(100)]
    assert find_wild_type([*singles, "", *(one + "G" for one in singles[:60])]) == WILD  # fewer are longer
    assert find_wild_type([*singles, *strange]) is None  # fewer than half
    assert find_wild_type(strange) is None
    assert find_wild_type([WILD] * 9 + [mutate("M1A")]) is None  # two sequences are no variants
    far = [
        mutate(":".join(f"{WILD[i]}{i + 1}{'W' if i % 2 else 'P'}" for i in range(start, start + 16)))
        for start in range(14)
    ]
    assert find_wild_type(far) != WILD  # 16 substitutions each


@pytest.mark.parametrize(
    ("cell", "sequence"),
    [
        ("M1A", "A" + WILD[1:]),
        ("M1A:I30G", "A" + WILD[1:-1] + "G"),
        (" M1A, K2C T3D;A4E/Y5F ", "ACDEF" + WILD[5:]),
        ("wt", WILD),
    ],
)
def test_mutations_are_read_as_sequences(cell, sequence):
    assert mutate(cell) == sequence
    assert read_mutations(cell, WILD).rule == ""


@pytest.mark.parametrize(
    ("cell", "rule"),
    [
        ("A1G", "'A1G': there is 'M'"),
        ("M1A:M1G", "'M1G': there is 'A'"),
        ("I31G", "'I31G': there is 'nothing'"),
        ("M0G", "'M0G': there is 'nothing'"),
        ("K2*", "'K2*' is no substitution"),
        ("K2del", "'K2del' is no substitution"),
        ("-", "'-' is no substitution"),
        (None, "'' is no substitution"),
    ],
)
def test_wrong_mutations_are_refused(cell, rule):
    assert read_mutations(cell, WILD).rule == rule


def test_a_column_of_mutations_makes_the_sequences_and_wrong_ones_are_named_with_their_rows(tmp_path):
    words = ["WT", *scan()]
    lines = [f"{one},{i / 7:.3f}" for i, one in enumerate(words)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["mutant,label", *lines]))
    fasta = tmp_path / "wild.fasta"
    fasta.write_text(f">it\n{WILD[:20]}\n{WILD[20:]}\n")
    given = {"dataset_name": str(path), "mutation_column": "mutant"}
    loaded = load_data(DataArguments(**given, wild_type=str(fasta)), output_dir=None, seed=0)
    assert loaded.report["variants"] == {"column": "sequence", "wild_type": WILD}
    found = {row: one for part in loaded.splits.values() for row, one in zip(part["source_row"], part["sequence"])}
    assert [found[row] for row in sorted(found)] == [mutate(one) for one in words]
    assert load_sequences(DataArguments(**given, wild_type=WILD)).table["sequence"][:2] == [WILD, mutate(words[1])]
    path.write_text("\n".join(["mutant,label", *lines, "A1G,3", "K2del,4"]))
    with pytest.raises(DataError, match=r"(?s)row \d+, column 'mutant', value 'A1G': 'A1G': there is 'M'.*'K2del'"):
        load_data(DataArguments(**given, wild_type=WILD), output_dir=None, seed=0)
    dropped = load_data(DataArguments(**given, wild_type=WILD, bad_rows="drop"), output_dir=tmp_path, seed=0)
    assert sum(dropped.report["sizes"].values()) == len(words)
    assert "A1G" in (tmp_path / "rejected_rows.csv").read_text()
    with pytest.raises(ArgumentError, match="--mutation_column mutant: of what"):
        DataArguments(**given)
    with pytest.raises(ArgumentError, match="no sequence of residues"):
        load_data(DataArguments(**given, wild_type="M1A"), output_dir=None, seed=0)
    fasta.write_text(f">it\n{WILD}\n>that\n{WILD}\n")
    with pytest.raises(DataError, match="the file holds 2 sequences"):
        load_data(DataArguments(**given, wild_type=str(fasta)), output_dir=None, seed=0)


def test_rows_become_what_they_substitute_and_how_unlike_it_is():
    train = [{"chain": mutate(one)} for one in ("WT", "M1A", "M1A:K2W", "K2W", "K2E", "R26D")]
    scores = np.zeros((30, 20))
    scores[1, LETTERS.index("E")] = 0.5
    scores[0, LETTERS.index("A")] = -2
    found = Variants.fit(train, "chain", WILD, scores)
    assert found.pairs == [0 * 21 + 0, 1 * 21 + 18]  # M1A and K2W, which two rows have
    assert found.positions == [0, 1, 25]
    rows = [{"chain": one} for one in (WILD, mutate("M1A:K2E"), mutate("T3G"), WILD[1:], "X" + WILD[1:])]
    values = found.matrix(rows)
    # pairs, positions, then hydropathy (M 1.9, A 1.8, K -3.9, E -3.5), volume (162.9, 88.6, 168.6, 138.4), charge,
    # BLOSUM62 (M to A -1, K to E 1), A to Y, the table, the number
    assert values[1, :9] == pytest.approx([1, 0, 1, 1, 0, -0.1 + 0.4, -74.3 - 30.2, -2, 0])
    assert values[1, 9:29].tolist() == [float(letter in "AE") for letter in LETTERS]
    assert values[1, 29:].tolist() == [-1.5, 2]
    assert values[2, :9] == pytest.approx([0, 0, 0, 0, 0, -0.4 + 0.7, 60.1 - 116.1, 0, -2])  # a position not seen
    assert not values[[0, 3]].any()
    assert values[4].tolist() == [0, 0, 1, *[0] * 27, 1]  # what is no residue is a substitution alone
    assert values.dtype == np.float32
    assert len(found) == values.shape[1] == 31
    again = Variants.from_state(json.loads(json.dumps(found.state())))
    assert np.array_equal(again.matrix(rows), values)
    assert Variants.from_state(None).matrix(rows).shape == (5, 0)
    assert Variants.from_state(None).state() is None
    assert "column 'chain', 30 residues; training rows change 3 positions, at most 2 at once" in found.describe()[0]


def test_positions_are_of_one_split_and_a_random_split_shares_them():
    words = [
        "WT",
        *scan(),
        *(f"{one}:{WILD[i]}{i + 1}A" for one, i in zip(scan(range(1, 6)), range(9, 25)) if WILD[i] != "A"),
    ]
    parts, report, splits = divide(words, "position")
    assert shared(parts) == set()
    assert "WT" in parts["train"]
    left = set(words) - {one for part in parts.values() for one in part}
    assert all(":" in one for one in left)  # rows with positions of two splits
    assert report["notes"] == [
        f"{len(left)} rows are left out: positions of several splits, or another length than the wild type"
    ]
    assert len(left) > 3
    assert 12 <= len(parts["test"]) <= 24  # a fifth of 86, whole positions of three rows
    assert shared(divide(words, "random")[0]) > set()  # the broken twin: nothing keeps positions apart
    groups = find_groups(DataArguments(split="position"), splits)
    assert isinstance(groups, ResamplingGroups)
    assert (groups.column, groups.num_groups) == ("position", len(positions_of(parts["test"])))
    train, validation = held_out_values(DataArguments(split="position"), splits)
    assert {*train} & {*validation} == set()
    assert divide(words, "position")[0] == parts
    assert divide(words, "position", split_seed=7)[0] != parts


def test_blocks_of_positions_are_stretches_or_every_tenth():
    parts, *_ = divide(scan(range(1, 31)), "position:contiguous", (0.8, 0.1, 0.1))
    assert [sorted(map(int, positions_of(parts[name]))) for name in ("validation", "test")] != [[], []]
    for name in ("validation", "test"):
        found = sorted(map(int, positions_of(parts[name])))
        assert found == list(range(found[0], found[0] + 3))  # a tenth of 30 positions, side by side
        assert found[0] % 3 == 1
    parts, *_ = divide(scan(range(1, 31)), "position:modulo", (0.8, 0.1, 0.1))
    for name in ("validation", "test"):
        first, *others = sorted(map(int, positions_of(parts[name])))
        assert others == [first + 10, first + 20]
    assert shared(parts) == set()


def test_rows_with_most_substitutions_test():
    words = ["WT", *scan(range(1, 7)), *(f"{one}:S17G" for one in scan(range(1, 4))), "M1G:K2G:T3G", "M1G:K2G:A4G:Y5G"]
    parts, report, _ = divide(words, "mutations", (0.6, 0.1, 0.3))
    assert Counter(one.count(":") for one in parts["test"]) == {1: 9, 2: 1, 3: 1}
    assert {one.count(":") for name in ("train", "validation") for one in parts[name]} == {0}
    assert len(parts["validation"]) > 0
    assert report["notes"] == ["rows with at most 1 substitutions train and validate, those with more test"]
    parts, *_ = divide(words, "mutations", (0.8, 0.15, 0.05))
    assert {*parts["test"]} == {"M1G:K2G:T3G", "M1G:K2G:A4G:Y5G"}
    with pytest.raises(DataError, match=r"all rows have at most 1\. Use --split position"):
        divide(scan(), "mutations")


def test_folds_are_of_positions_where_rows_have_one_and_refused_elsewhere():
    words = ["WT", *scan()]
    args = DataArguments(split="position", wild_type=WILD)
    args.fold = Fold("5", "2")
    data = table(words)
    folds = find_folds(data, args, find_whole(data, args))
    of_position = {}
    for one, fold in zip(words[1:], folds[1:]):
        of_position.setdefault(one[1:-1], set()).add(fold)
    assert {*folds} == {"1", "2", "3", "4", "5"}
    assert all(len(found) == 1 for found in of_position.values())
    splits, report = split_rows(data, args)
    parts = {name: [words[row - 2] for row in one["source_row"]] for name, one in splits.items()}
    assert shared(parts) == set()
    assert report["rule"] == "folds:5"
    for rule, rows in (("position", [*words, "M1G:K2G"]), ("mutations", [*words, "M1G:K2G"])):
        args.split = rule
        with pytest.raises(DataError, match=f"--folds with --split {rule}: folds are of positions"):
            find_whole(table(rows), args)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"split": "position:random"},
            ArgumentError,
            "of variants position, position:modulo, position:contiguous, mut",
        ),
        ({"split": "mutations", "streaming": True}, ArgumentError, "needs all rows at once"),
        ({"split": "position", "wild_type": "none"}, DataError, "--wild_type none: none of sequence holds variants"),
        ({"wild_type": WILD[1:]}, DataError, "none of sequence holds variants of it"),
        ({"mutation_column": "label", "wild_type": WILD}, ArgumentError, "--mutation_column, each of which is another"),
    ],
)
def test_what_cannot_be_split_or_read_is_refused(given, error, message):
    rows = table(scan()).add_column("label", [float(i) for i in range(len(scan()))])
    with pytest.raises(error, match=message):
        load_data(DataArguments(**given), output_dir=None, seed=0, table=rows)


def test_substitutions_of_other_lengths_are_none():
    found = find_substitutions([WILD[:-1], mutate("K2W:I30G"), WILD], WILD)
    assert (found.row.tolist(), found.position.tolist(), found.counts.tolist()) == ([1, 1], [1, 29], [-1, 2, 0])
    assert [LETTERS[i] for i in found.letter] == ["W", "G"]
    assert found.first_positions().tolist() == [0, 2, 0]

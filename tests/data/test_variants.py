"""Variants of one protein: which protein, mutations as sequences, the numbers of rows, and splits that leak nothing."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset

from hf_ext.data import DataArguments, Fold, Variants, find_wild_type, load_data, read_mutations
from hf_ext.errors import ArgumentError, DataError

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
WILD = "MKTAYIAKQRQISFVKSHFSRQLEERLGLI"  # 30 residues


def mutate(words: str) -> str:
    return read_mutations(words, WILD).value


def scan(positions=range(1, 31), residues="GPW") -> list[str]:
    """Single substitutions, each position by each of these residues that is not there."""
    return [f"{WILD[i - 1]}{i}{new}" for i in positions for new in residues if WILD[i - 1] != new]


def load(words: list[str], fold: Fold | None = None, **given):
    """Rows of these mutations, loaded."""
    args = DataArguments(**{"wild_type": WILD, **given})
    args.fold = fold
    rows = {"sequence": [mutate(one) for one in words], "label": [float(i) for i in range(len(words))]}
    return load_data(args, output_dir=None, seed=0, table=Dataset.from_dict(rows))


def divide(words: list[str], rule: str, sizes=(0.6, 0.2, 0.2), **given):
    """Mutations of each split, and notes of the split."""
    loaded = load(words, split=rule, split_sizes=[*sizes], **given)
    parts = {name: [words[row - 1] for row in one["source_row"]] for name, one in loaded.splits.items()}
    return parts, loaded.report["split"]["notes"]


def positions_of(words: list[str]) -> list[int]:
    return sorted({int(part[1:-1]) for one in words for part in one.split(":") if one != "WT"})


def shared(parts) -> list[int]:
    """Positions of rows of more than one split."""
    places = Counter(position for words in parts.values() for position in positions_of(words))
    return [position for position, num in places.items() if num > 1]


def test_the_wild_type_is_the_first_row_or_the_most_frequent_residues_and_not_found_elsewhere():
    singles = [mutate(one) for one in scan()]
    assert find_wild_type(singles) == WILD  # no row is it
    every = [a + b + c + WILD[3:] for a in "MA" for b in "KA" for c in "TA"]
    assert find_wild_type(every) == WILD  # the first row: each is as near to all
    assert find_wild_type(every[::-1]) == "AAA" + WILD[3:]
    rng = np.random.default_rng(0)
    strange = ["".join(rng.choice([*LETTERS], 30)) for _ in range(100)]
    assert find_wild_type([*singles, "", *(one + "G" for one in singles[:60])]) == WILD  # fewer are longer
    assert find_wild_type([*singles, *strange]) is None  # fewer than half
    assert find_wild_type(strange) is None
    assert find_wild_type([WILD] * 9 + [mutate("M1A")]) is None  # two sequences are no variants
    starts = range(0, 30, 2)
    far = ["".join("W" if (i - start) % 30 < 11 else letter for i, letter in enumerate(WILD)) for start in starts]
    near = ["".join("W" if (i - start) % 30 < 10 else letter for i, letter in enumerate(WILD)) for start in starts]
    assert (find_wild_type([WILD, *far]), find_wild_type([WILD, *near])) == (None, WILD)


def test_mutations_are_read_as_sequences_or_refused():
    assert mutate("M1A:I30G") == "A" + WILD[1:-1] + "G"
    assert mutate(" M1A, K2C T3D;A4E/Y5F ") == "ACDEF" + WILD[5:]
    assert mutate("wt") == WILD
    rules = {
        "A1G": "'A1G': there is 'M'",
        "M1A:M1G": "'M1G': there is 'A'",
        "I31G": "'I31G': there is 'nothing'",
        "M0G": "'M0G': there is 'nothing'",
        "K2*": "'K2*' is no substitution",
        "K2del": "'K2del' is no substitution",
        "-": "'-' is no substitution",
        None: "'' is no substitution",
    }
    assert {cell: read_mutations(cell, WILD).rule for cell in rules} == rules


def test_a_column_of_mutations_makes_the_sequences_and_wrong_ones_are_named_with_their_rows(tmp_path):
    words = ["WT", *scan()]
    lines = [f"{one},{i / 7:.3f}" for i, one in enumerate(words)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["mutant,label", *lines]))
    fasta = tmp_path / "wild.fasta"
    fasta.write_text(f">it\n{WILD[:20]}\n{WILD[20:]}\n")

    def read(**given):
        args = DataArguments(dataset_name=str(path), mutation_column="mutant", **given)
        return load_data(args, output_dir=tmp_path, seed=0)

    loaded = read(wild_type=str(fasta))
    assert loaded.report["variants"] == {"column": "sequence", "wild_type": WILD}
    found = {row: one for part in loaded.splits.values() for row, one in zip(part["source_row"], part["sequence"])}
    assert [found[row] for row in sorted(found)] == [mutate(one) for one in words]
    streamed = read(wild_type=str(fasta), streaming=True).splits["train"]
    assert {one["sequence"] for one in streamed} <= {*found.values()}
    path.write_text("\n".join(["mutant,label", *lines, "A1G,3", "K2del,4"]))
    with pytest.raises(DataError, match=r"(?s)row \d+, column 'mutant', value 'A1G': 'A1G': there is 'M'.*'K2del'"):
        read(wild_type=WILD)
    assert sum(read(wild_type=WILD, bad_rows="drop").report["sizes"].values()) == len(words)
    assert "A1G" in (tmp_path / "rejected_rows.csv").read_text()
    for given, message in (
        ({}, "--mutation_column mutant: of what"),
        ({"wild_type": "M1A"}, "no sequence of the 20 residues"),
    ):
        with pytest.raises(ArgumentError, match=message):
            read(**given)
    fasta.write_text(f">it\n{WILD}\n>that\n{WILD}\n")
    with pytest.raises(DataError, match="the file holds 2 sequences"):
        read(wild_type=str(fasta))


def test_rows_become_what_they_substitute_and_how_unlike_it_is():
    train = [{"chain": mutate(one)} for one in ("WT", "M1A", "M1A:K2W", "K2W", "K2E", "R26D")]
    scores = np.zeros((30, 20))
    scores[1, LETTERS.index("E")] = 0.5
    scores[0, LETTERS.index("A")] = -2
    found = Variants.fit(train, "chain", WILD, scores)
    assert found.pairs == [0 * 21 + 0, 1 * 21 + 18]  # M1A and K2W, which two rows have
    assert found.positions == [0, 1, 25]
    rows = [{"chain": one} for one in (WILD, mutate("M1A:K2E"), mutate("T3G"), WILD[1:], "X" + WILD[1:])]
    values = replace(found, scales=()).matrix(rows)
    # pairs, positions, then hydropathy (M 1.9, A 1.8, K -3.9, E -3.5), volume (162.9, 88.6, 168.6, 138.4), charge,
    # BLOSUM62 (M to A -1, K to E 1), A to Y, the table, the number
    assert values[1, :9] == pytest.approx([1, 0, 1, 1, 0, -0.1 + 0.4, -74.3 - 30.2, -2, 0])
    assert values[1, 9:29].tolist() == [float(letter in "AE") for letter in LETTERS]
    assert values[1, 29:].tolist() == [-1.5, 2]
    assert values[2, :9] == pytest.approx([0, 0, 0, 0, 0, -0.4 + 0.7, 60.1 - 116.1, 0, -2])  # a position not seen
    assert not values[[0, 3]].any()  # the wild type, and another length
    assert values[4].tolist() == [0, 0, 1, *[0] * 27, 1]  # what is no residue is a substitution alone
    assert len(found) == values.shape[1] == 31
    # Scaled by training rows: K2 changes in three of six, the table's scores are 0, -2, -2, 0, 0.5 and 0.
    assert found.matrix(rows)[1, 3] == pytest.approx(1 / np.std([0, 0, 1, 1, 1, 0]))
    assert found.scores(rows)[1, 0] == pytest.approx(-1.5 / np.std([0, -2, -2, 0, 0.5, 0]))
    again = Variants.from_state(json.loads(json.dumps(found.state())))
    assert np.array_equal(again.matrix(rows), found.matrix(rows))
    assert Variants.from_state(None).matrix(rows).shape == (5, 0)
    assert "column 'chain', 30 residues; training rows change 3 positions, at most 2 at once" in found.describe()[0]


def test_positions_are_of_one_split_and_a_random_split_shares_them():
    words = ["WT", *scan(), *(f"{one}:{WILD[i]}{i + 1}D" for one, i in zip(scan(range(1, 6)), range(9, 25)))]
    parts, notes = divide(words, "position")
    assert shared(parts) == []
    assert "WT" in parts["train"]
    left = {*words} - {one for part in parts.values() for one in part}
    assert all(":" in one for one in left)  # rows with positions of two splits
    assert len(left) > 3
    assert notes == [
        f"{len(left)} rows are left out: positions of several splits, or another length than the wild type"
    ]
    assert 12 <= len(parts["test"]) <= 24  # a fifth of 86, whole positions of three rows
    assert len(shared(divide(words, "random")[0])) > 10  # the broken twin: nothing keeps positions apart
    assert divide(words, "position")[0] == parts
    assert divide(words, "position", split_seed=7)[0] != parts


def test_blocks_of_positions_are_stretches_or_every_tenth():
    stretches, _ = divide(scan(), "position:contiguous", (0.8, 0.1, 0.1))
    tenths, _ = divide(scan(), "position:modulo", (0.8, 0.1, 0.1))
    for name in ("validation", "test"):
        first, *others = positions_of(stretches[name])  # a tenth of 30
        assert (first % 3, others) == (1, [first + 1, first + 2])
        first, *others = positions_of(tenths[name])
        assert others == [first + 10, first + 20]
    assert shared(stretches) == shared(tenths) == []


def test_rows_with_most_substitutions_test():
    words = ["WT", *scan(range(1, 7)), *(f"{one}:S17G" for one in scan(range(1, 4))), "M1G:K2G:T3G", "M1G:K2G:A4G:Y5G"]
    parts, notes = divide(words, "mutations", (0.6, 0.1, 0.3))  # of 30: 19, 9, 1, 1
    assert Counter(one.count(":") for one in parts["test"]) == {1: 9, 2: 1, 3: 1}
    assert {one.count(":") for name in ("train", "validation") for one in parts[name]} == {0}
    assert notes == ["substitutions of rows that train and validate: 1 at most; those with more test"]
    assert {*divide(words, "mutations", (0.8, 0.15, 0.05))[0]["test"]} == {*words[-2:]}
    with pytest.raises(DataError, match=r"all rows have at most 1\. Use --split position"):
        divide(scan(), "mutations")


def test_folds_are_of_positions_where_rows_have_one_and_refused_elsewhere():
    words = ["WT", *scan()]
    tested = []
    for number in range(1, 6):
        parts, _ = divide(words, "position:modulo", fold=Fold("5", str(number)))
        assert shared(parts) == []
        assert len(parts["validation"]) > 10  # not the wild type alone
        tested += [{position % 5 for position in positions_of(parts["test"])}]
    assert sorted(map(sorted, tested)) == [[0], [1], [2], [3], [4]]  # ProteinGym's
    for rule in ("position", "mutations"):
        with pytest.raises(DataError, match=f"--folds with --split {rule}: folds are of positions"):
            divide([*words, "M1G:K2G"], rule, fold=Fold("5", "1"))


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
        ({"mutation_column": "label"}, ArgumentError, "--mutation_column, each of which is another"),
        ({"split": "position", "split_sizes": [0.98, 0.01, 0.01]}, DataError, "2 positions cannot fill 3 splits"),
    ],
)
def test_what_cannot_be_split_or_read_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        load(scan(range(1, 3), LETTERS), **given)

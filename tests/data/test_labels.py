"""Labels of every kind: what a column is taken for, what rows then hold, and what is counted; seen through loading."""

import csv
import json
import math
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from hf_ext.arguments import FastArgumentParser
from hf_ext.data import DataArguments, label_array, load_data, load_sequences
from hf_ext.errors import ArgumentError, DataError
from hf_ext.labels import UNKNOWN, kind_from_state, make_kind
from hf_ext.labels.cells import order_names
from hf_ext.property import AffinityArguments

pytestmark = pytest.mark.internals
NUM_ROWS = 24


def draw(number: int, letters: str, length: int) -> str:
    return "".join(random.Random(number).choices(letters, k=length))


SEQUENCES = [draw(number, "ACDEFGHIKLMNPQRSTVWY", 5 + number % 3) for number in range(NUM_ROWS)]
STATES = [draw(100 + number, "CEH", 5 + number % 3) for number in range(NUM_ROWS)]
DIGITS = [" ".join(draw(number, "012", len(one))) for number, one in enumerate(SEQUENCES)]
NUMBERS = [" ".join(f"{random.Random(number + i).random():.2f}" for i in range(5 + number % 3)) for number in range(24)]
LONG = [draw(number, "01", 20) for number in range(NUM_ROWS)]
PROTEINS = [draw(number, "ACDEFGHIKLMNPQRSTVWY", 20) for number in range(NUM_ROWS)]


def repeated(*cells):
    return [*cells] * (NUM_ROWS // len(cells))


def write(folder, columns, name="rows.csv"):
    """A CSV of as many rows as the columns have, with a sequence each unless there is one."""
    path = folder / name
    columns = {"sequence": SEQUENCES[: len(next(iter(columns.values())))], **columns}
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values())])
    return path


def read(path, columns=("label",), **given):
    """All rows, in file order."""
    given = {"sequence_columns": ["sequence"], "label_column": [*columns], **given}
    return load_sequences(DataArguments(dataset_name=str(path), **given), needs_labels=True)


SETS = repeated("a;b", "b", "-")
CHOSEN = {
    "numbers": (repeated(7.1, 8.2, 9.3), "regression", ["label"]),
    "bounds": (repeated("<=7", "8", ">9"), "regression", ["label"]),
    "two numbers": (repeated(1, 2), "regression", ["label"]),
    "0 and 1": (repeated(1, 0), "classification", ["0", "1"]),
    "0.0 and 1.0": (repeated("1.0", "0.0"), "classification", ["0.0", "1.0"]),
    "yes and no": (repeated("yes", "no"), "classification", ["no", "yes"]),
    "true and false": (repeated("True", "False"), "classification", ["False", "True"]),
    "two texts": (repeated("soluble", "insoluble"), "classification", ["insoluble", "soluble"]),
    "texts": (repeated("b", "a", "c"), "classification", ["a", "b", "c"]),
    "numbers of classes": (repeated("2", "0", "1"), "classification", ["0", "1", "2"]),
    "EC numbers": (repeated("3.4.21.4", "1.1.1.1", "2.7.-.-"), "classification", ["1.1.1.1", "2.7.-.-", "3.4.21.4"]),
    "counts with a gap": (repeated("0", "1", "3"), "regression", ["label"]),
    "counts from 1": (repeated("1", "2", "3"), "regression", ["label"]),
    "counts of few rows": ([*range(12)] * 2, "regression", ["label"]),
    "counts with a decimal point": (repeated("0.0", "1.0", "2.0"), "regression", ["label"]),
    "sets": (SETS, "multilabel", ["a", "b"]),
    "letters": (STATES, "residue_classification", ["C", "E", "H"]),
    "lists of digits": (DIGITS, "residue_classification", ["0", "1", "2"]),
    "lists of numbers": (NUMBERS, "residue_regression", ["label"]),
    "letters, but of other lengths": (STATES[::-1], "classification", None),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_a_column_is_taken_for_what_it_looks_like(tmp_path, case):
    cells, task, names = CHOSEN[case]
    if names is None:  # names of rows, then
        with pytest.raises(DataError, match="a class of its own"):
            read(write(tmp_path, {"label": cells}))
        return
    loaded = read(write(tmp_path, {"label": cells}))
    assert (loaded.kind.task, [*loaded.kind.names]) == (task, names)
    assert loaded.report["labels"]["read_as"].startswith("Column 'label' is read as ")
    assert kind_from_state(json.loads(json.dumps(loaded.report["labels"]))) == loaded.kind


def test_digits_as_long_as_the_sequence_are_labels_of_residues_and_no_number(tmp_path):
    loaded = read(write(tmp_path, {"sequence": PROTEINS, "label": LONG}))
    assert (loaded.kind.task, loaded.kind.names) == ("residue_classification", ("0", "1"))
    numbers = [f"{random.Random(number).random():.3f}" for number in range(NUM_ROWS)]  # peptides of 5 residues
    assert read(write(tmp_path, {"sequence": ["MKTVL"] * NUM_ROWS, "label": numbers})).kind.task == "regression"


BITS = [[random.Random(3 * number + i).randint(0, 1) for i in range(3)] for number in range(NUM_ROWS)]
PAIRS = [[round(random.Random(number).random(), 3), number] for number in range(NUM_ROWS)]


@pytest.mark.parametrize(
    "write_list", [str, lambda row: str(np.array(row, float)), lambda row: " ".join(map(str, row))]
)
def test_a_list_of_0_and_1_in_each_cell_is_refused_since_it_names_no_labels(tmp_path, write_list):
    with pytest.raises(DataError, match=r"a list of 0 and 1 in each cell .* a column of 0 and 1 for each label"):
        read(write(tmp_path, {"label": [*map(write_list, BITS)]}))


@pytest.mark.parametrize("kind", [pa.list_(pa.int8()), pa.list_(pa.int8(), 3), pa.large_list(pa.bool_())])
def test_a_list_of_0_and_1_is_refused_in_parquet_too(tmp_path, kind):
    rows = [[*map(bool, row)] if kind.value_type == pa.bool_() else row for row in BITS]
    pq.write_table(pa.table({"sequence": SEQUENCES, "label": pa.array(rows, kind)}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="a list of 0 and 1"):
        read(tmp_path / "rows.parquet")


def test_lists_of_as_many_numbers_are_several_numbers_and_of_one_the_number(tmp_path):
    loaded = read(write(tmp_path, {"label": PAIRS}))
    assert (loaded.kind.task, loaded.kind.columns, loaded.kind.names) == (
        "regression",
        ("label",),
        ("label_1", "label_2"),
    )
    assert loaded.table["label"][:] == PAIRS
    assert loaded.report["labels"]["read_as"].endswith("For example, row 2, [0.844, 0], is read as: 0.844, 0.")
    one = read(write(tmp_path, {"label": [[first] for first, _ in PAIRS]}))
    assert one.kind.is_one_number
    assert one.table["label"][:] == [first for first, _ in PAIRS]
    pairs = [*PAIRS]
    pairs[1] = pairs[1][:1]
    with pytest.raises(DataError, match=r"row 3, column 'label', value '\[0.134\]': 1 numbers, not 2"):
        read(write(tmp_path, {"label": pairs}))


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("['Cell membrane']", ["Cell membrane"]),
        ("['Cell membrane', 'Golgi apparatus']", ["Cell membrane", "Golgi apparatus"]),
        ('["regulation, DNA-templated", "a;b"]', ["regulation, DNA-templated", "a;b"]),
        ("['Cell membrane' 'Golgi']", ["Cell membrane", "Golgi"]),  # of numpy
        ("[\"5'-nucleotidase\", 'it\\'s', \"\\u03b2\"]", ["5'-nucleotidase", "it's", "\u03b2"]),
        ("[Cell membrane, Golgi]", ["Cell membrane", "Golgi"]),
        ("Cell membrane; Golgi", ["Cell membrane", "Golgi"]),
        ("[NiFe]", ["NiFe"]),  # beside lists
        ("[]", []),
        ("['open", ["['open"]),
    ],
)
def test_quotes_decide_where_a_label_ends(tmp_path, cell, names):
    loaded = read(write(tmp_path, {"label": [cell, "x;y", "z"] * 8}))
    assert loaded.kind.task == "multilabel"
    assert {*loaded.kind.names} == {*names, "x", "y", "z"}
    assert [loaded.kind.names[i] for i in loaded.table["label"][0]] == sorted(names)


def test_names_in_brackets_are_names_where_no_cell_is_a_list(tmp_path):
    assert read(write(tmp_path, {"label": repeated("[NiFe]", "[FeFe]")})).kind.names == ("[FeFe]", "[NiFe]")
    loaded = read(write(tmp_path, {"label": repeated("[nucleus, cytosol]", "[nucleus]", "[cytosol]")}))
    assert (loaded.kind.task, loaded.kind.names) == ("multilabel", ("cytosol", "nucleus"))


REFUSED = {
    "lists that numpy shortened": ("[0 1 0 ... 1 0 1]", "lists that numpy wrote with '...'"),
    "pairs of numbers": ("0.26;0.68", "several numbers in a cell"),
    "lists of other lengths": ("[0.5, 0.1]", "several numbers in a cell", "[0.5, 0.1, 2.5]"),
    "0 and 1 between semicolons": ("0;1;1", "a list of 0 and 1"),
    "-1 beside 0 and 1": ("-1", "-1 beside 0 and others", "0", "1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_column_cannot_mean_is_refused_with_what_to_write(tmp_path, case):
    cell, said, *others = REFUSED[case]
    with pytest.raises(DataError, match=said):
        read(write(tmp_path, {"label": [cell, *(others or [cell])] * (NUM_ROWS // (1 + len(others or [cell])))}))


def test_minus_1_among_labels_of_residues_is_asked_about_unless_the_task_is_given(tmp_path):
    cells = [" ".join(str(int(digit) - 1) for digit in one.split()) for one in DIGITS]
    path = write(tmp_path, {"label": cells})
    with pytest.raises(DataError, match=r"-1 beside 0 and others.* write \? for a residue"):
        read(path)
    charges = read(path, task="residue_regression")
    assert charges.table["label"][0] == [float(one) for one in cells[0].split()]


def test_where_labels_of_residues_are_asked_for_what_rows_may_have_is_not_talked_about(tmp_path):
    short = [one.rsplit(" ", 1)[0] for one in NUMBERS]
    with pytest.raises(DataError, match="4 labels for a sequence of 5 residues"):
        read(write(tmp_path, {"label": short}), task="residue_regression")
    with pytest.raises(DataError, match="3 labels for a sequence of 5 residues"):
        read(write(tmp_path, {"label": BITS}), task="residue_classification")


def test_0_and_1_of_residues_that_a_file_has_as_decimals_are_classes(tmp_path):
    rows = [[float(digit == "1") for digit in draw(number, "01", len(one))] for number, one in enumerate(SEQUENCES)]
    pq.write_table(pa.table({"sequence": SEQUENCES, "label": rows}), tmp_path / "rows.parquet")
    loaded = read(tmp_path / "rows.parquet")
    assert (loaded.kind.task, len(loaded.kind.names)) == ("residue_classification", 2)
    assert loaded.table["label"][0] == rows[0]


def test_words_as_long_as_all_sequences_are_classes(tmp_path):
    peptides = [one[:8] for one in PROTEINS]
    loaded = read(write(tmp_path, {"sequence": peptides, "label": repeated("Positive", "Negative")}))
    assert (loaded.kind.task, loaded.kind.names) == ("classification", ("Negative", "Positive"))
    helices = repeated("HHHHHHHH", "HHHHCCCC")
    assert read(write(tmp_path, {"sequence": peptides, "label": helices})).kind.task == "residue_classification"


def test_lists_of_one_name_are_classes(tmp_path):
    loaded = read(write(tmp_path, {"label": repeated("['Cell membrane']", "['a, b']")}))
    assert (loaded.kind.task, loaded.kind.names) == ("classification", ("Cell membrane", "a, b"))
    read_as = loaded.report["labels"]["read_as"]
    assert read_as.endswith("For example, row 2, ['Cell membrane'], is read as: Cell membrane.")


def test_one_class_is_written_with_and_without_decimals(tmp_path):
    loaded = read(write(tmp_path, {"label": repeated("0", "0.0", "1.0", "1")}))
    assert (loaded.kind.names, loaded.table["label"][:4]) == (("0", "1"), [0, 0, 1, 1])
    of_residues = [" ".join(("0", "0.0", "1")[int(digit)] for digit in cell.split()) for cell in DIGITS]
    loaded = read(write(tmp_path, {"label": of_residues}))
    assert (loaded.kind.task, loaded.kind.names) == ("residue_classification", ("0", "1"))
    codes = read(write(tmp_path, {"label": repeated("1.1", "1.10", "2.0")}), task="classification")
    assert codes.kind.names == ("1.1", "1.10", "2.0")


LABELS = {
    "with gaps": (ClassLabel(names=[*"edcba"]), [0, 2, 4] * 8, "classification", ("a", "c", "e")),
    "that look like numbers": (ClassLabel(names=["1.5", "3.4"]), [0, 1] * 12, "classification", ("1.5", "3.4")),
    "in lists": (List(ClassLabel(names=["in", "out", "up"])), [[0], [1, 2]] * 12, "multilabel", ("in", "out", "up")),
    "of residues": (
        List(ClassLabel(names=[*"HEC"])),
        [["HEC".index(one) for one in row] for row in STATES],
        "residue_classification",
        ("C", "E", "H"),
    ),
}


@pytest.mark.parametrize("case", LABELS)
def test_what_a_data_set_declares_as_classes_are_classes_by_their_names(tmp_path, case):
    feature, cells, task, names = LABELS[case]
    features = Features({"sequence": Value("string"), "label": feature})
    data = Dataset.from_dict({"sequence": SEQUENCES, "label": cells}, features=features)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    for path in (tmp_path / "saved", *[tmp_path / "rows.parquet"] * (case != "that look like numbers")):
        loaded = read(path)
        assert (loaded.kind.task, loaded.kind.names) == (task, names)
    if task == "classification":
        assert [names[number] for number in loaded.table["label"][:2]] == [feature.names[i] for i in cells[:2]]
        with pytest.raises(DataError, match="column 'label' numbers classes, which a stream cannot name"):
            read(tmp_path / "saved", streaming=True)


def test_a_dash_beside_digits_of_residues_is_not_known_and_beside_letters_a_class(tmp_path):
    disorder = [draw(number, "01-", len(one)) for number, one in enumerate(SEQUENCES)]
    loaded = read(write(tmp_path, {"label": disorder}))
    assert (loaded.kind.task, loaded.kind.names) == ("residue_classification", ("0", "1"))
    assert loaded.table["label"][0] == [UNKNOWN if one == "-" else int(one) for one in disorder[0]]
    assert loaded.report["notes"] == ["column 'label': '-' beside digits is read as not known, in 18 rows."]
    coil = read(write(tmp_path, {"label": [one.replace("C", "-") for one in STATES]}))
    assert (coil.kind.names, coil.report["notes"]) == (("-", "E", "H"), [])


def test_labels_are_compared_with_what_cleaning_leaves_of_sequences(tmp_path):
    stopped = read(write(tmp_path, {"sequence": [f" {one}*" for one in SEQUENCES], "label": STATES}))
    assert stopped.kind.task == "residue_classification"
    with pytest.raises(DataError, match=r"column 'sequence', .* white space inside the sequence"):
        read(write(tmp_path, {"sequence": [*map(" ".join, SEQUENCES)], "label": STATES}))
    with pytest.raises(DataError, match="6 labels for a sequence of 5 residues"):  # one for the stop
        read(write(tmp_path, {"sequence": [f"{one}*" for one in SEQUENCES], "label": [f"{one}C" for one in STATES]}))
    states = [draw(number, "CEH", 5 + number % 3) if number % 4 else "HE" for number in range(NUM_ROWS)]
    with pytest.raises(DataError, match="row 2, column 'label', value 'HE': 2 labels for a sequence of 5 residues"):
        read(write(tmp_path, {"label": states}))  # most fit


def test_digits_as_long_as_short_peptides_are_labels_of_residues_if_numbers_have_no_such_form(tmp_path):
    columns = {"sequence": [one[:9] for one in PROTEINS], "label": [one[:9] for one in LONG]}
    assert read(write(tmp_path, columns)).kind.task == "residue_classification"  # some begin with 0
    columns["label"] = [f"1{one[:8]}" for one in LONG]
    assert read(write(tmp_path, columns)).kind.task == "regression"
    columns = {"label": [f"1{one[1 : len(sequence)]}" for one, sequence in zip(LONG, SEQUENCES)]}
    assert read(write(tmp_path, columns)).kind.task == "residue_classification"  # of three lengths


@pytest.mark.parametrize("sign", "|/,")
def test_names_are_sets_where_their_parts_are_classes(tmp_path, sign):
    both = f"Nucleus{sign} Cell wall"
    loaded = read(write(tmp_path, {"label": repeated(both, "Nucleus", "Cell wall", "Membrane")}))
    assert (loaded.kind.task, loaded.kind.names) == ("multilabel", ("Cell wall", "Membrane", "Nucleus"))
    assert loaded.table["label"][0] == [0, 2]
    assert f"row 2, {both}, is read as: Nucleus, Cell wall" in loaded.report["labels"]["read_as"]
    other = read(write(tmp_path, {"label": repeated(both, "Nucleus", "Membrane")}))  # Cell wall never stands alone
    assert (other.kind.task, len(other.kind.names)) == ("classification", 3)
    rare = read(write(tmp_path, {"label": [both, *repeated("Nucleus", "Cell wall")[1:]]}))  # one cell
    assert (rare.kind.task, len(rare.kind.names)) == ("classification", 3)
    scop = read(write(tmp_path, {"label": repeated("a", "b", f"a{sign}b", "a+b")}))
    assert (scop.kind.task, len(scop.kind.names)) == ("classification", 4)


def test_classes_that_read_as_no_value_are_classes_where_they_are_named(tmp_path):
    path = write(tmp_path, {"label": repeated("NA", "HA", "none")})
    loaded = read(path, marker_classes=["NA", "none"])
    assert (loaded.kind.names, loaded.table["label"][:3]) == (("HA", "NA", "none"), [1, 0, 2])
    again = load_sequences(DataArguments(dataset_name=str(path)), needs_labels=True, kind=loaded.kind)
    assert again.table["label"][:3] == [1, 0, 2]  # as the model has them, without the option


def test_columns_of_t_and_f_are_labels(tmp_path):
    loaded = read(
        write(tmp_path, {"productive": repeated("T", "F"), "complete": repeated("F", "F", "T")}),
        ("productive", "complete"),
    )
    assert (loaded.kind.task, loaded.table["label"][0]) == ("multilabel", [1.0, 0.0])


def test_labels_are_looked_at_where_there_are_some(tmp_path):
    columns = {"sequence": ["MKTVL"] * 1100, "label": [""] * 1050 + [7.5, 8.5] * 25}
    args = DataArguments(dataset_name=str(write(tmp_path, columns)), bad_rows="drop")
    loaded = load_sequences(args, needs_labels=True, rejected=tmp_path / "rejected_rows.csv")
    assert (loaded.kind.task, len(loaded.table)) == ("regression", 50)


def test_what_was_asked_for_is_done_without_a_word(tmp_path):
    loaded = read(write(tmp_path, {"label": repeated(1, 0)}), task="regression")
    assert loaded.kind.is_one_number
    assert loaded.table["label"][:4] == [1.0, 0.0, 1.0, 0.0]
    assert "read_as" not in loaded.report["labels"]


def test_several_columns_are_numbers_or_labels(tmp_path):
    path = write(
        tmp_path, {"tm": repeated("50.5", ""), "kd": repeated(7, 8), "x": repeated(0, 1), "y": repeated(1, "")}
    )
    numbers = read(path, ("tm", "kd"))
    assert (numbers.kind.task, numbers.kind.names) == ("regression", ("tm", "kd"))
    assert numbers.table.features["label"] == List(Value("float64"))
    assert numbers.table["label"][0] == [50.5, 7.0]
    assert math.isnan(numbers.table["label"][1][0])
    assert "bound" not in numbers.table.column_names
    labels = read(path, ("x", "y"))
    assert (labels.kind.task, labels.kind.names) == ("multilabel", ("x", "y"))
    assert labels.table["label"][0] == [0.0, 1.0]
    assert math.isnan(labels.table["label"][1][1])


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path):
    table = read(write(tmp_path, {"label": repeated("10", "9", "2")}), task="classification")
    assert table.kind.names == ("2", "9", "10")
    assert table.table["label"][:3] == [2, 1, 0]
    assert table.table.features["label"] == Value("int64")


@pytest.mark.parametrize(
    ("names", "ordered"),
    [
        ("10 9 2", "2 9 10"),
        ("true false", "false true"),
        ("Yes No", "No Yes"),
        ("POS NEG", "NEG POS"),
        ("binder non-binder", "non-binder binder"),
        ("active inactive", "inactive active"),
        ("b a", "a b"),
        ("positive negative zero", "negative positive zero"),
    ],
)
def test_of_two_classes_the_one_that_means_yes_is_last(names, ordered):
    assert order_names(names.split()) == tuple(ordered.split())


def test_sets_are_the_numbers_of_the_labels_that_a_row_has(tmp_path):
    table = read(write(tmp_path, {"label": repeated("b; a", "c", "-", "a")})).table
    assert table["label"][:4] == [[0, 1], [2], [], [0]]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_lists_of_json_and_parquet_are_read(tmp_path, name):
    columns = {
        "sequence": SEQUENCES,
        "states": [[*one] for one in STATES],
        "holes": [[UNKNOWN, *map(int, one.split()[1:])] for one in DIGITS],
        "charges": [[*map(float, one.split())] for one in NUMBERS],
        "places": repeated(["in", "out"], ["out"]),
    }
    path = tmp_path / name
    if name.endswith("jsonl"):
        path.write_text("".join(json.dumps(dict(zip(columns, row))) + "\n" for row in zip(*columns.values())))
    else:
        pq.write_table(pa.table(columns), path)
    states, holes, charges, places = (read(path, [column]) for column in list(columns)[1:])
    assert (states.kind.task, states.kind.names) == ("residue_classification", ("C", "E", "H"))
    assert [[states.kind.names[i] for i in row] for row in states.table["label"]] == columns["states"]
    assert (holes.kind.task, holes.kind.names) == ("residue_classification", ("0", "1", "2"))
    assert holes.table["label"][:] == columns["holes"]
    assert charges.kind.task == "residue_regression"
    assert charges.table["label"][:] == columns["charges"]
    assert (places.kind.task, places.table["label"][:2]) == ("multilabel", [[0, 1], [1]])


def test_residues_that_are_masked_or_unknown_have_no_label(tmp_path):
    columns = {"sequence": ["MKTV", "MKT", "ACDE"], "label": ["HE?C", "CCH", "XHHE"], "mask": ["0111", "", "1101"]}
    table = read(write(tmp_path, columns), mask_column="mask", task="residue_classification")
    assert table.kind.names == ("C", "E", "H")
    assert table.table["label"][:] == [[UNKNOWN, 1, UNKNOWN, 0], [0, 0, 2], [UNKNOWN, 2, UNKNOWN, 1]]
    assert table.table.features["label"] == List(Value("int64"))
    columns["label"] = ["1 -100 3 4", "0.5,1,2", "[1, 2, 3, 4]"]
    numbers = read(write(tmp_path, columns), mask_column="mask", task="residue_regression")
    expected = [[math.nan, math.nan, 3, 4], [0.5, 1, 2], [1, 2, math.nan, 4]]
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(numbers.table["label"], expected))
    batch = label_array(numbers.table)
    assert batch.tolist() == [[-100, -100, 3, 4], [0.5, 1, 2, -100], [1, 2, -100, 4]]


def test_nines_among_numbers_of_residues_are_refused_once_a_row_unless_masked(tmp_path):
    columns = {"sequence": ["MKTV", "MKT", "ACDE"], "label": ["1 2 3 -999", "1 0.5 2", "-999 2 -999 4"]}
    columns["mask"] = ["1110", "111", "1111"]
    with pytest.raises(DataError) as refused:
        read(write(tmp_path, columns), mask_column="mask", task="residue_regression")
    assert "row 4, column 'label', value '-999'" in str(refused.value)
    assert "nan where it is not known" in str(refused.value)
    assert str(refused.value).startswith("1 value ")


def test_classes_of_all_files_are_known_in_each(tmp_path):
    for split, cells in {"train": ["a", "b"], "validation": ["b", "c"], "test": ["a", "d"]}.items():
        write(tmp_path, {"label": cells * 6}, f"{split}.csv")
    data = load_data(DataArguments(dataset_name=str(tmp_path)), output_dir=None, seed=0)
    assert data.kind.names == ("a", "b", "c", "d")
    assert data.splits["test"]["label"][:2] == [0, 3]
    assert [warning[:55] for warning in data.report["warnings"]] == [
        "1 of 4 classes (c) stand in validation and not in train",
        "1 of 4 classes (d) stand in test and not in training, s",
    ]


def test_rows_are_read_as_a_model_has_its_classes(tmp_path):
    kind = make_kind("classification", ("location",), ("out", "in"))  # in an order of its own
    path = write(tmp_path, {"place": repeated("in", "out", "out")})
    args = DataArguments(dataset_name=str(path), label_column="place")
    loaded = load_sequences(args, needs_labels=True, kind=kind)
    assert loaded.table["label"][:3] == [1, 0, 0]
    assert loaded.kind == make_kind("classification", ("place",), ("out", "in"))
    write(tmp_path, {"place": repeated("in", "up", "out")})
    with pytest.raises(DataError, match=r"value 'up': the model has no class 'up'\. It has out, in"):
        load_sequences(args, needs_labels=True, kind=kind)
    with pytest.raises(ArgumentError, match="was trained on 2"):
        load_sequences(args, needs_labels=True, kind=make_kind("regression", ("a", "b"), ("a", "b")))


def test_a_stream_has_numbers_and_any_number_of_them(tmp_path):
    path = write(tmp_path, {"a": repeated("1", "2"), "b": repeated("3", "")})
    for columns, first in ((["a"], {"label": 1.0, "bound": 0}), (["a", "b"], {"label": [1.0, 3.0]})):
        args = DataArguments(dataset_name=str(path), label_column=columns, streaming=True, split_sizes=[1, 0, 0])
        data = load_data(args, output_dir=None, seed=0)
        assert data.kind == make_kind("regression", tuple(columns), tuple(columns))
        row = next(iter(data.splits["train"]))
        assert {name: row[name] for name in first} == first


def facts(folder, columns, names=("label",), **given):
    loaded = read(write(folder, columns), names, **given)
    return loaded.kind.facts_of(loaded.table)


def test_facts_by_hand(tmp_path):
    classes = facts(tmp_path, {"label": ["a", "b", "a", "a"]}, task="classification")
    assert classes == {"n": 4, "counts": {"a": 3, "b": 1}, "largest_share": 0.75, "num_known": 4, "num_unknown": 0}
    residues = {"sequence": ["MK", "TVL"], "label": ["H?", "HHC"]}
    found = facts(tmp_path, residues, task="residue_classification")
    assert found == {"n": 5, "counts": {"C": 1, "H": 3}, "largest_share": 0.75, "num_known": 4, "num_unknown": 1}
    sets = facts(tmp_path, {"x": [1, 0, "", 1], "y": [0, 0, 0, 1]}, ("x", "y"))
    assert sets["counts"] == {"x": 2, "y": 1}
    assert (sets["largest_share"], sets["num_known"], sets["num_unknown"]) == (pytest.approx(2 / 3), [3, 4], 1)
    numbers = facts(tmp_path, {"x": [1, 3, ""], "y": [5, 5.5, 6]}, ("x", "y"))
    assert numbers["columns"]["x"] == {"n": 2, "min": 1.0, "max": 3.0, "mean": 2.0, "std": 1.0}
    assert (numbers["n"], numbers["columns"]["y"]["n"]) == (3, 3)


def test_label_column_takes_one_name_or_several_in_yaml_and_on_the_command_line(tmp_path):
    config = tmp_path / "run.yaml"
    parser = FastArgumentParser([AffinityArguments, DataArguments])
    for text, words, expected in (
        ("label_column: y", [], ["y"]),
        ("label_column: [y, z]", [], ["y", "z"]),
        ("", ["--label_column", "y", "z"], ["y", "z"]),
    ):
        config.write_text(text)
        assert parser.parse_args_into_dataclasses(["--config", str(config), *words])[1].label_column == expected

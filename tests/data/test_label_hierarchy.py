"""Many labels: read by their numbers, with all above them in an OBO file; Fmax by protein, by hand."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from hf_ext.data import DataArguments, label_array, load_sequences
from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import metrics_of, rows_for
from hf_ext.labels import kind_from_state, make_kind

OBO = """format-version: 1.2

[Term]
id: T:1
name: root

[Term]
id: T:2
is_a: T:1 ! root

[Term]
id: T:3
alt_id: T:30
relationship: part_of T:2 ! two
relationship: regulates T:5 ! five
is_a: OTHER:1 ! of another file

[Term]
id: T:4
is_a: T:2 {source="x"} ! two
is_a: T:5

[Term]
id: T:5

[Term]
id: T:6
is_obsolete: true
replaced_by: T:4

[Term]
id: T:7
is_obsolete: true

[Typedef]
id: part_of
is_a: T:1
"""
CELLS = ["T:3", "T:30;T:5", "T:6", "T:5", "-", "T:1"]
NUMBERS = [[0, 1, 2], [0, 1, 2, 4], [0, 1, 3, 4], [4], [], [0]]


def read(folder, cells, obo=OBO, **given):
    table = folder / "table.csv"
    pd.DataFrame({"sequence": ["MKTVL", "ACDEF", "GHIKL"] * (len(cells) // 3), "label": cells}).to_csv(
        table, index=False
    )
    if obo is not None:
        (folder / "terms.obo").write_text(obo)
        given["label_hierarchy"] = str(folder / "terms.obo")
    args = DataArguments(dataset_name=str(table), **{"task": "multilabel", **given})
    return load_sequences(args, needs_labels=True)


def test_a_row_has_all_terms_above_its_own_by_is_a_and_part_of(tmp_path):
    loaded = read(tmp_path, CELLS)
    assert loaded.kind.names == ("T:1", "T:2", "T:3", "T:4", "T:5")
    assert loaded.table["label"][:] == NUMBERS
    assert any("there are 5 labels" in note for note in loaded.report["notes"])
    plain = read(tmp_path, [cell.replace("T:30", "T:3").replace("T:6", "T:4") for cell in CELLS], obo=None)
    assert plain.table["label"][:3] == [[1], [1, 3], [2]]  # of T:1, T:3, T:4, T:5
    again = kind_from_state(json.loads(json.dumps(loaded.kind.state())))
    assert again == loaded.kind != plain.kind
    assert again.check_cell("T:30").value == [0, 1, 2]  # as a table that is scored has it


def test_no_term_is_less_probable_than_one_below_it(tmp_path):
    kind = read(tmp_path, CELLS).kind
    given = np.array([[0.1, 0.2, 0.9, 0.3, 0.4], [0.8, 0.1, 0.1, 0.5, 0.2]])
    found = kind.to_predictions(np.log(given / (1 - given)))
    np.testing.assert_allclose(found, [[0.9, 0.9, 0.9, 0.3, 0.4], [0.8, 0.5, 0.1, 0.5, 0.5]], atol=1e-6)
    np.testing.assert_allclose(kind.shape_outputs(given), found, atol=1e-6)  # of another program's CSV
    assert kind.decode(found)[0] == ("T:1", "T:2", "T:3")
    assert kind.join_cells([[2]]).tolist() == [[0, 0, 1, 0, 0]]


REFUSED = {
    "an unknown and an obsolete term": ([*CELLS[:4], "T:7", "X:1"], OBO, "2 labels are no terms .*T:7, X:1"),
    "a circle": (CELLS, OBO.replace("name: root", "is_a: T:4"), "cycle"),
    "no terms": (CELLS, "[Typedef]\nid: T:1\n", r"no \[Term\] stands there"),
    "no id": (CELLS, "x\n[Term]\nname: root\n", "Give an OBO file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_file_does_not_hold_is_refused(tmp_path, case):
    cells, obo, said = REFUSED[case]
    with pytest.raises(DataError, match=said):
        read(tmp_path, cells, obo)


def test_a_hierarchy_of_other_labels_or_of_no_file_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="is for one column whose cells list labels"):
        read(tmp_path, ["a", "b", "a"] * 4, task="classification")
    with pytest.raises(DataError, match=r"nowhere\.obo.*Give an OBO file"):
        read(tmp_path, CELLS, None, label_hierarchy="nowhere.obo")


def test_many_labels_are_stored_by_their_numbers_and_are_dense_in_batches_alone(tmp_path):
    names = [f"N{i:03}" for i in range(400)]
    cells = [f"{names[i]};{names[(7 * i) % 400]}" for i in range(399)]
    loaded = read(tmp_path, cells, obo=None)
    column = loaded.table.data["label"]
    assert column.nbytes < 399 * 4 * 8  # two numbers and an offset a row; dense float64 would take 1.2 MB
    batch = loaded.kind.stack(loaded.table["label"][:2])
    assert batch.shape == (2, len(loaded.kind.names))
    assert batch.sum(1).tolist() == [1, 2]
    dense = label_array(loaded.table, loaded.kind)
    assert dense.sum() == sum(len({*cell.split(";")}) for cell in cells)
    facts = loaded.kind.facts_of(loaded.table)
    assert facts["counts"] == dict(zip(loaded.kind.names, dense.sum(0)))
    assert (facts["n"], facts["num_known"][0], facts["num_unknown"]) == (399, 399, 0)


SCORED = make_kind("multilabel", ("y",), tuple("abc"))
PROBABILITIES = [[0.9, 0.7, 0.2], [0.7, 0.1, 0.05], [0.0, 0.0, 0.0]]
TRUE = [[1, 0, 1], [1, 0, 0], [0, 1, 0]]


def fmax(probabilities, labels, dtype=np.float32):
    return rows_for(SCORED, np.array(probabilities, dtype), labels).value("fmax_protein")


def test_fmax_averages_precision_over_proteins_with_a_prediction_and_recall_over_all():
    # At 0.11 to 0.20: precision (2/3 + 1) / 2 of two, recall (1 + 1 + 0) / 3. At 0: 4/9 and 1, which is 8/13.
    assert fmax(PROBABILITIES, TRUE).value == pytest.approx(20 / 27)
    # A protein without labels is left out, whatever is predicted of it; labels that are not known, too.
    assert fmax([*PROBABILITIES, [0.9, 0.9, 0.9]], [*TRUE, [0, 0, 0]]).value == pytest.approx(20 / 27)
    unknown = [[1, math.nan, 1], *TRUE[1:]]
    assert fmax(PROBABILITIES, unknown).value == pytest.approx(2 * 1 * (2 / 3) / (5 / 3))
    assert fmax([[0.5] * 3], [[0, 0, 0]]).undefined == "no row has any of the labels"
    assert "fmax_protein" in metrics_of(SCORED).names


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_probability_reaches_the_threshold_that_it_equals(dtype):
    for percent in range(1, 101):
        value = percent / 100
        assert fmax([[value, value - 0.004, 0.0]], [[1, 0, 0]], dtype).value == pytest.approx(1.0)


def test_fmax_of_resamples_is_that_of_copies():
    rows = rows_for(SCORED, np.array(PROBABILITIES), TRUE)
    counts = np.array([[2.0, 0, 1], [0, 3, 0], [1, 1, 1]])
    found = rows.metric("fmax_protein")(counts)
    for value, numbers in zip(found, counts.astype(int)):
        chosen = np.repeat(np.arange(3), numbers)
        assert value == pytest.approx(fmax(np.array(PROBABILITIES)[chosen], np.array(TRUE)[chosen], float).value)


def test_average_precision_is_left_out_of_more_than_1000_labels():
    many = make_kind("multilabel", ("y",), tuple(map(str, range(1001))))
    assert "average_precision" in metrics_of(SCORED).names
    assert metrics_of(many).names == ("f1_max", "fmax_protein", "log_loss")

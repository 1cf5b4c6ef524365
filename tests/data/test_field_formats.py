"""Files as the field has them: FASTA headers of biotrainer, masks by name, classes called none."""

import gzip
import math

import pytest

from hf_ext.data import DataArguments, load_data, load_sequences
from hf_ext.errors import ArgumentError, DataError

SEQUENCES = ["MKTVL", "MKTVI", "ACDEF", "ACDEW", "WYVTS", "WYVTP"]
SETS = ["train", "train", "train", "Train", "test", "test"]
HELD_OUT = ["False", "True", "False", "true", "False", ""]


def write(path, headers, sequences=SEQUENCES):
    text = "".join(f">{header}\n{sequence}\n" for header, sequence in zip(headers, sequences, strict=True))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def headers():
    """Of biotrainer, with ids as UniProt has them."""
    return [
        f"sp|P{i}|X_{i} TARGET=0.{i} SET={name} VALIDATION={flag}"
        for i, (name, flag) in enumerate(zip(SETS, HELD_OUT), 1)
    ]


def load(path, **given):
    given = {"label_column": ["TARGET"], "split_column": "SET", "id_column": "id", **given}
    return load_data(DataArguments(dataset_name=path, **given), output_dir=None, seed=0, looks_for_leaks=False)


@pytest.mark.parametrize("name", ["a.fasta", "a.fa.gz"])
def test_the_headers_of_biotrainer_say_label_split_and_validation(tmp_path, name):
    loaded = load(write(tmp_path / name, headers()))
    labels = {split: rows["label"][:] for split, rows in loaded.splits.items()}
    assert labels == {"train": [0.1, 0.3], "validation": [0.2, 0.4], "test": [0.5, 0.6]}
    assert loaded.splits["validation"]["id"][:] == ["sp|P2|X_2", "sp|P4|X_4"]
    assert "training rows in which column 'VALIDATION' is true validate" in loaded.report["notes"]


def test_a_table_of_flip_says_the_same_and_a_stream_too(tmp_path):
    path = tmp_path / "flip.csv"
    rows = [*zip(SEQUENCES, [1, 2, 3, 4, 5, 6], SETS, HELD_OUT)]
    path.write_text("\n".join(",".join(map(str, row)) for row in [("sequence", "target", "set", "validation"), *rows]))
    given = {"label_column": ["target"], "split_column": "set", "id_column": None}
    loaded = load(str(path), **given)
    assert {split: rows["label"][:] for split, rows in loaded.splits.items()} == {
        "train": [1, 3],
        "validation": [2, 4],
        "test": [5, 6],
    }
    stream = load(str(path), streaming=True, **given)
    assert [row["label"] for row in stream.splits["validation"]] == [2, 4]
    read = load_sequences(DataArguments(dataset_name=str(path)), keeps_columns=True)
    assert read.as_read["set"][:] == SETS  # what is written beside predictions is as it was read


def test_a_test_row_stays_one_and_other_words_hold_nothing_out(tmp_path):
    wrong = [header.replace("VALIDATION=False", "VALIDATION=True") for header in headers()]
    loaded = load(write(tmp_path / "a.fasta", [*headers()[:4], *wrong[4:]]))
    assert loaded.report["sizes"] == {"train": 2, "validation": 2, "test": 2}
    words = [header.replace("=True", "=maybe").replace("=true", "=maybe") for header in headers()]
    notes = load(write(tmp_path / "b.fasta", words)).report["split"]["notes"]
    assert "no row says validation: 1 of 4 train rows (seed 42) became it" in notes


STATES = ["HHEEC", "HHEEC", "CCEEH", "CCEEH", "HHHEE", "EEHHC"]


def read_residues(tmp_path, masks, labels=STATES, **given):
    path = write(tmp_path / "rows.fasta", [f"P{i} TARGET={label}" for i, label in enumerate(labels)])
    names = [name for name, _ in masks]
    mask_file = write(tmp_path / "masks.fasta", names, [mask for _, mask in masks])
    args = DataArguments(dataset_name=path, label_column=["TARGET"], mask_file=mask_file, id_column="id", **given)
    return load_sequences(args, needs_labels=True)


def test_a_file_of_masks_is_read_by_name_in_any_order(tmp_path):
    masks = [(f"P{i}", "01110" if i else "11110") for i in range(6)]
    loaded = read_residues(tmp_path, [*reversed(masks), ("other", "1")])
    assert loaded.kind.task == "residue_classification"
    assert loaded.kind.names == ("C", "E", "H")
    assert loaded.table["label"][:2] == [[2, 2, 1, 1, -100], [-100, 2, 1, 1, -100]]
    assert "--mask_file" not in loaded.table.column_names


def test_numbers_of_residues_are_separated_by_semicolons_and_999_is_masked(tmp_path):
    numbers = ["999;0.5;1.5;2.5;3.5", *(f"{i}.5;1.{i};2.5;3.5;4.{i}" for i in range(5))]
    loaded = read_residues(tmp_path, [(f"P{i}", "01111") for i in range(6)], numbers)
    assert loaded.kind.task == "residue_regression"
    assert math.isnan(loaded.table["label"][0][0])
    assert loaded.table["label"][0][1:] == [0.5, 1.5, 2.5, 3.5]


def test_masks_that_are_missing_or_of_another_length_are_refused_with_rows(tmp_path):
    masks = [(f"P{i}", "01110") for i in range(6)]
    with pytest.raises(DataError, match=r"--mask_file .*masks.fasta has no mask of rows 5, 11 \(2 in all\). .*'id'"):
        read_residues(tmp_path, [*masks[:2], *masks[3:5]])
    with pytest.raises(DataError, match=r"row 3, column '--mask_file', value '0111': a mask of 4 for 5 labels"):
        read_residues(tmp_path, [masks[0], ("P1", "0111"), *masks[2:]])
    with pytest.raises(DataError, match="column '--mask_file', value '01x10': a mask that is neither 0 nor 1"):
        read_residues(tmp_path, [masks[0], ("P1", "01x10"), *masks[2:]])


def test_masks_that_cannot_act_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ArgumentError, match=r"mask_file='m.fasta' names rows; say with --id_column"):
        DataArguments(mask_file="m.fasta")
    with pytest.raises(ArgumentError, match=r"mask_file='m.fasta' and --mask_column seen: give one of both"):
        DataArguments(mask_file="m.fasta", mask_column="seen", id_column="id")
    with pytest.raises(ArgumentError, match=r"--mask_file .*masks.fasta says which residues have a label"):
        read_residues(tmp_path, [(f"P{i}", "01110") for i in range(6)], ["1.5", "2.5", "3", "4", "5", "6"])


CALLED = ["none", "NA", "nucleus", "none", "nucleus", "NA"]


def read_classes(tmp_path, cells=CALLED, **given):
    path = tmp_path / "classes.csv"
    path.write_text("sequence,label\n" + "".join(f"{a},{b}\n" for a, b in zip(SEQUENCES, cells, strict=True)))
    return load_sequences(
        DataArguments(dataset_name=str(path), **given), needs_labels=True, rejected=tmp_path / "r.csv"
    )


def test_a_class_called_none_is_one_where_the_task_is_said(tmp_path):
    loaded = read_classes(tmp_path, task="classification")
    assert loaded.kind.names == ("NA", "none", "nucleus")
    assert loaded.table["label"][:] == [1, 0, 2, 1, 2, 0]
    note = "column 'label': 4 cells say 'NA' or 'none': classes, since --task says so; --bad_rows drop leaves these"
    assert any(note in one for one in loaded.report["notes"])
    assert len(read_classes(tmp_path, task="classification", bad_rows="drop").table) == 2
    with pytest.raises(DataError, match=r"which reads as no value. .* give --marker_classes NA none"):
        read_classes(tmp_path)  # --task auto


def test_an_empty_cell_and_a_marker_among_codes_stay_missing(tmp_path):
    with pytest.raises(DataError, match="the class is missing"):
        read_classes(tmp_path, [*CALLED[:5], ""], task="classification")
    with pytest.raises(DataError, match="give --marker_classes NA"):
        read_classes(tmp_path, ["3", "1", "NA", "3", "1", "1"], task="classification")

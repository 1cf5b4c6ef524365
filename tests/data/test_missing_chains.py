"""Cells that may be empty: which, what they become, how they are counted and compared, and what is refused."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import BertTokenizer

from hf_ext.data.arguments import DataArguments
from hf_ext.data.collators import SequenceCollator
from hf_ext.data.loading import load_data
from hf_ext.data.proteins import STANDARD
from hf_ext.data.split_report import find_missing, leak_report
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.errors import ArgumentError, DataError

HEAVY, LIGHT = "EVQLVESGGG", "DIQMTQ"
PRESENT, ABSENT = (HEAVY, LIGHT), (HEAVY, "")


def write(folder: Path, lights: list[str], heavies: list[str] | None = None) -> Path:
    """A table of heavy, light and pKd with a row for each of `lights`."""
    heavies = heavies or [f"EVQL{STANDARD[number]}" for number in range(len(lights))]
    lines = [f"{heavy},{light},{7 + number / 10}" for number, (heavy, light) in enumerate(zip(heavies, lights))]
    path = folder / "rows.csv"
    path.write_text("\n".join(["heavy,light,pKd", *lines]) + "\n")
    return path


def arguments(path: Path, *missing: str, **given) -> DataArguments:
    columns = {"sequence_columns": ["heavy", "light"], "missing_chains": [*missing], "label_column": "pKd"}
    return DataArguments(dataset_name=str(path), **columns, **given)


def load(path: Path, *missing: str, **given):
    return load_data(arguments(path, *missing, **given), output_dir=path.parent, seed=0)


def test_cells_of_the_named_column_may_be_empty_blank_or_a_marker_and_are_counted(tmp_path):
    path = write(tmp_path, ["DIQMTQ", "", "  ", "NA", "nan", "DIV", "", "D", "DI", "DIQ"])
    loaded = load(path, "light")
    rows = {row["heavy"]: row["light"] for split in loaded.splits.values() for row in split}
    assert [rows[f"EVQL{letter}"] for letter in STANDARD[:10]] == ["DIQMTQ", *[""] * 4, "DIV", "", "D", "DI", "DIQ"]
    assert loaded.report["changes"] == {"light": {"missing": 5}}
    counts = find_missing(loaded.splits, ["light"])["light"]
    assert sum(counts.values()) == 5
    assert counts == {name: sum(not row["light"] for row in split) for name, split in loaded.splits.items()}


def test_a_single_sequence_column_is_not_told_of_the_option_and_cannot_have_it(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("sequence,label\nEVQL,1\n,2\n")
    with pytest.raises(DataError) as error:
        load_data(DataArguments(dataset_name=str(path)), output_dir=None, seed=0)
    assert "missing_chains" not in str(error.value)
    with pytest.raises(ArgumentError, match="some of several sequence columns"):
        DataArguments(missing_chains=["sequence"])


def test_names_that_are_no_sequence_columns_are_refused_and_so_is_a_masked_language_model(tmp_path):
    with pytest.raises(ArgumentError, match=r"name some of several sequence columns \(heavy, light\), each once"):
        DataArguments(sequence_columns=["heavy", "light"], missing_chains=["Light"])
    with pytest.raises(ArgumentError, match="each once"):
        DataArguments(sequence_columns=["heavy", "light"], missing_chains=["light", "light"])
    path = write(tmp_path, ["DIQMTQ"] * 10)
    with pytest.raises(ArgumentError, match="only affinity models and generators do without a chain"):
        load_data(arguments(path, "light"), output_dir=None, seed=0, needs_labels=False)


def test_a_row_without_any_sequence_is_refused_or_dropped(tmp_path):
    path = write(tmp_path, ["DIQ", "", *["DIV"] * 10], ["", "EVQ", "EVQ", "", *[f"EV{x}" for x in STANDARD[:8]]])
    assert sum(load(path, "heavy", "light").report["sizes"].values()) == 12  # each row has one of them
    path = write(tmp_path, ["DIQ", "", "", *["DIV"] * 10], ["", "EVQ", "", *[f"EV{x}" for x in STANDARD[:10]]])
    with pytest.raises(DataError, match=r"1 value .*\n.*row 4, column 'heavy', .*: heavy and light are all missing"):
        load(path, "heavy", "light")
    dropped = load(path, "heavy", "light", bad_rows="drop").report
    assert (dropped["rows_rejected"], sum(dropped["sizes"].values())) == (1, 12)


def test_streams_may_lack_it_too(tmp_path):
    path = write(tmp_path, ["", "DIQ", "", "DIV"])
    streamed = load(path, "light", streaming=True, split_sizes=[0.5, 0.25, 0.25])
    found = {row["heavy"]: row["light"] for split in streamed.splits.values() for row in split}
    assert [found[f"EVQL{letter}"] for letter in "ACDE"] == ["", "DIQ", "", "DIV"]


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *STANDARD, "X"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=False)


def test_a_pair_with_one_part_missing_is_the_other_part_alone(bert):
    # [CLS] 2, [SEP] 3, A 5, C 6, D 7; types: 1 in the second part of a pair alone
    batch = ResidueTokenizer(bert, 2)(["AC", "AC", ""], ["D", "", "DD"])
    assert batch["input_ids"].tolist() == [[2, 5, 6, 3, 7, 3], [2, 5, 6, 3, 0, 0], [2, 7, 7, 3, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2, [1] * 4 + [0] * 2]
    assert batch["residue_mask"].int().tolist() == [[0, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6, [0] * 6]
    alone, single = ResidueTokenizer(bert, 2)(["AC"], [""]), ResidueTokenizer(bert, 1)(["AC"])
    assert torch.equal(alone["input_ids"], single["input_ids"])
    assert alone["input_ids"][0].tolist() == bert("A C")["input_ids"]


def collate(bert, lights, missing=("light",)):
    tokenizers = {name: ResidueTokenizer(bert, 1) for name in ("heavy", "light")}
    collator = SequenceCollator(tokenizers, {"heavy": ["heavy"], "light": ["light"]}, missing_chains=missing)
    return collator, collator([{"heavy": "AC", "light": light} for light in lights])["sequences"]


def test_rows_that_lack_an_input_have_no_tokens_of_it_and_a_place_says_so(bert):
    collator, batch = collate(bert, ["D", "", "CC"])
    assert collator.optional_inputs == ["light"]
    assert batch["light"]["input_ids"].tolist() == [[2, 7, 3, 0], [2, 6, 6, 3]]
    assert batch["light"]["place"].tolist() == [0, -1, 1]
    assert "place" not in batch["heavy"]
    assert "place" not in collate(bert, ["D", "CC"], missing=())[1]["light"]


def test_where_all_rows_lack_it_one_residue_stands_in_and_belongs_to_no_row(bert):
    batch = collate(bert, ["", ""])[1]["light"]
    assert batch["input_ids"].tolist() == [[2, 25, 3]]
    assert batch["place"].tolist() == [-1, -1]


def test_windows_are_cut_from_the_rows_that_have_it(bert):
    tokenizer = ResidueTokenizer(bert, 1)
    tokenizer.max_residues = 4
    collator = SequenceCollator({"light": tokenizer}, {"light": ["light"]}, "window", 2, ["light"])
    batch = collator([{"light": "ACDEFG"}, {"light": ""}, {"light": "AC"}])["sequences"]["light"]
    assert batch["owner"].tolist() == [0, 0, 1]
    assert (batch["num_rows"].item(), batch["place"].tolist()) == (2, [0, -1, 1])


def test_a_pair_is_lacked_only_where_both_parts_may_be(bert):
    tokenizer, pair = ResidueTokenizer(bert, 2), {"heavy+light": ["heavy", "light"]}
    optional = [
        SequenceCollator({"heavy+light": tokenizer}, pair, missing_chains=missing).optional_inputs
        for missing in (["light"], ["heavy", "light"])
    ]
    assert optional == [[], ["heavy+light"]]


# --- comparisons ------------------------------------------------------------------------------------------------------


def splits(train, test):
    names = {"train": train, "test": test}
    return DatasetDict(
        {name: Dataset.from_dict(dict(zip(("heavy", "light"), map(list, zip(*rows))))) for name, rows in names.items()}
    )


@pytest.mark.parametrize(("train", "test", "near"), [(ABSENT, ABSENT, 1), (PRESENT, ABSENT, 0), (ABSENT, PRESENT, 0)])
def test_two_missing_chains_are_identical_and_a_missing_one_is_like_no_other(train, test, near):
    row = leak_report(splits([train], [test]), ["heavy", "light"])["row"]
    assert row["num_test_rows_in_train"] == near
    assert [found["num_rows"] for found in row["near"]] == [near, near]

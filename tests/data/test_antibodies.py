"""Antigens and pairs as ids, ids as pairs, and batches in which each antigen stands once."""

import math

import numpy as np
import pytest
from inside import LayoutMaker
from transformers import AutoTokenizer

from hf_ext.data import VOCABULARY, AntibodyCollator, AntibodyPair, PairEncoder, decode_pair
from hf_ext.errors import DataError

# By hand: <pad> 0, <bos> 1, <eos> 2, <sep> 3, A 4, C 5, D 6, E 7, ..., Y 23, X 24.
A, C, D, X = 4, 5, 6, 24


@pytest.fixture(scope="module")
def encoder():
    return PairEncoder()


def lists(arrays):
    return [array.tolist() for array in arrays]


def test_ids_are_those_worked_out_by_hand(encoder):
    assert (len(VOCABULARY), VOCABULARY[4], VOCABULARY[23], VOCABULARY[24]) == (25, "A", "Y", "X")
    assert lists(encoder.encode_antigens(["ACX", "D"])) == [[1, A, C, X, 2], [1, D, 2]]
    assert lists(encoder.encode_antigens(["AUB"])) == [[1, A, X, X, 2]]  # rare residues become X
    pairs = encoder.encode_pairs(["AC", "D", "DD"], ["D", None, ""])
    assert lists(pairs) == [[1, A, C, 3, D, 2], [1, D, 2], [1, D, D, 2]]


def test_a_saved_tokenizer_gives_the_same_ids_for_the_same_text(encoder, tmp_path):
    encoder.tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("ACX")["input_ids"] == encoder.encode_antigens(["ACX"])[0].tolist()
    assert again("AC", "D")["input_ids"] == encoder.encode_pairs(["AC"], ["D"])[0].tolist()
    assert (again.pad_token_id, again.bos_token_id, again.eos_token_id, again.sep_token_id) == (0, 1, 2, 3)


def test_what_was_encoded_is_decoded_and_what_is_malformed_is_said(encoder):
    for heavy, light in (("EVQLX", "DIQ"), ("EVQL", None), ("A", "C")):
        (ids,) = encoder.encode_pairs([heavy], [light])
        assert decode_pair(ids) == decode_pair(ids[1:]) == AntibodyPair(heavy, light)
        assert decode_pair([*ids, 0, 0]) == AntibodyPair(heavy, light)  # as `generate` pads
    for ids, pair in (
        ([A, C], ("AC", None, ("no <eos>: cut off",))),
        ([A, 3, C], ("A", "C", ("no <eos>: cut off",))),
        ([2], ("", None, ("no heavy chain",))),
        ([3, C, 2], ("", "C", ("no heavy chain",))),
        ([A, 3, 2], ("A", None, ("<sep>, but no light chain",))),
        ([A, 3, C, 3, D, 2], ("A", "C", ("3 chains",))),
        ([A, 0, 1, C, 2], ("AC", None, ("<pad> inside", "<bos> inside"))),
        ([], ("", None, ("no <eos>: cut off", "no heavy chain"))),
        ([A, 2, C, 2], ("A", None, ())),  # what follows <eos> is not looked at
    ):
        assert decode_pair(ids) == AntibodyPair(*pair)
    for wrong in (-100, 25):
        with pytest.raises(DataError, match=f"Token id {wrong}: allowed are 0 to 24"):
            decode_pair([A, wrong, 2])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([""], ["A"], ["C"]), "Row 0, antigen: ''"),
        ((["A"], [""], ["C"]), "Row 0, heavy: ''"),
        ((["A", "A"], ["A", "aC"], ["C", "C"]), "Row 1, heavy: 'aC'; must be residues in upper case, of ACDEF"),
        ((["A"], ["A"], ["A*"]), r"Row 0, light: 'A\*'"),
        ((["A"], ["A", "C"], ["A", "C"]), "1 antigens, 2 heavy chains"),
        ((["A", "C"], ["A", "C"], ["A"]), "2 heavy and 1 light"),
    ],
)
def test_bad_input_is_refused_with_its_row(encoder, given, words):
    with pytest.raises(DataError, match=words):
        encoder.encode_rows(*given)


@pytest.fixture
def rows(encoder):
    columns = encoder.encode_rows(["AC", "D", "AC"], ["A", "DD", "CC"], ["C", None, "AA"], [7.5, None, 8.0])
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def test_an_antigen_of_several_rows_stands_once_in_a_batch(rows):
    rows[2]["input_ids"] = rows[2]["input_ids"].astype(np.int32)
    batch = AntibodyCollator()(rows)
    assert batch["input_ids"].tolist() == [[1, A, C, 2], [1, D, 2, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["antigen_index"].tolist() == [0, 1, 0]
    assert batch["labels"].tolist() == [[A, 3, C, 2, -100, -100], [D, D, 2, -100, -100, -100], [C, C, 3, A, A, 2]]
    assert batch["affinity"].tolist()[::2] == [7.5, 8.0]
    assert math.isnan(batch["affinity"][1])
    assert next(iter(batch)) == "labels"  # whose rows Trainer counts
    bare = AntibodyCollator()([{"input_ids": list(row["input_ids"])} for row in rows])
    assert bare["affinity"].isnan().all()
    assert ("labels" not in bare, bare["antigen_index"].tolist()) == (True, [0, 1, 0])


def test_a_layout_says_where_distinct_antigens_stand(rows):
    collator = AntibodyCollator()
    collator.layout = LayoutMaker(packs=True, locates_labels=True)
    layout = collator(rows)["layout"]
    assert (layout.shape, layout.segments.lengths) == ((2, 4), (3, 4))
    assert layout.labelled.tolist() == [0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 15, 16, 17]

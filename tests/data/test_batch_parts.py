"""A batch cut in parts is what the collator makes of their rows."""

import pytest
import torch
from tiny_generators import make_rows
from token_rows import pad_rows
from transformers import BatchEncoding, EsmTokenizer

from hf_ext.data.antibodies import AntibodyCollator
from hf_ext.data.batch_cutting import copy_batch, count_rows, cut_batch
from hf_ext.data.batching import RepeatedRows
from hf_ext.data.collators import SequenceCollator
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.data.varlen_layout import LayoutMaker

TOKENS = [{"input_ids": [5] * n, "labels": [-100] * (n - 1) + [6]} for n in (3, 9, 4, 6, 7)]


def assert_same(ours, theirs):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif torch.is_tensor(theirs):
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()
    elif isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs):
            assert_same(one, other)
    else:
        assert ours == theirs


def assert_parts_of(collate, rows, each):
    whole = collate(rows)
    parts = cut_batch(whole, each)
    assert len(parts) == -(-len(rows) // each)
    for number, part in enumerate(parts):
        assert_same(part, collate(rows[number * each : (number + 1) * each]))
    assert_same(whole, collate(rows))  # which is left as it was


@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_padded_tokens(each):
    assert_parts_of(pad_rows, TOKENS, each)


def test_parts_by_hand():
    whole = {"input_ids": torch.tensor([[1, 2, 0], [3, 4, 5], [6, 0, 0]]), "name": "all"}
    whole["attention_mask"] = whole["input_ids"].ne(0).long()
    first, second = cut_batch(whole, 2)
    assert first["input_ids"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert second["input_ids"].tolist() == [[6]]
    assert second["attention_mask"].tolist() == [[1]]
    assert second["name"] == "all"


@pytest.mark.parametrize("each", [1, 2, 3])
def test_antigens_that_rows_share(each):
    rows = make_rows()
    rows = [rows[i] for i in (0, 1, 0, 1, 0)]
    assert_parts_of(AntibodyCollator(), rows, each)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_inputs_of_an_affinity_model_with_windows_and_missing_chains(demo_encoders, each):
    rows = [
        {"heavy": "EVQL", "label": 1.0},
        {"heavy": "", "label": 2.0},
        {"heavy": "EVQLVESGG", "label": 3.0},
        {"heavy": "", "label": 4.0},
        {"heavy": "EV", "label": 5.0},
    ]
    tokenizer = ResidueTokenizer(EsmTokenizer.from_pretrained(demo_encoders[1]), 1)
    tokenizer.max_residues = 4
    collator = SequenceCollator({"heavy": tokenizer}, {"heavy": ["heavy"]}, "window", 1, ["heavy"])
    whole = collator(rows)
    total = []
    for number, part in enumerate(cut_batch(whole, each)):
        mine = rows[number * each : (number + 1) * each]
        assert part["labels"].tolist() == [row["label"] for row in mine]
        for place, row in zip(part["sequences"]["heavy"]["place"].tolist(), mine):
            assert (place >= 0) is bool(row["heavy"])
        heavy = part["sequences"]["heavy"]
        owners = heavy["owner"].tolist()
        assert int(heavy["num_rows"]) == max(1, sum(bool(row["heavy"]) for row in mine))
        residues = [0] * int(heavy["num_rows"])
        for owner, mask in zip(owners, heavy["residue_mask"]):
            residues[owner] += int(mask.sum())
        present = [row["heavy"] for row in mine if row["heavy"]]
        if present:
            assert [r >= len(h) for r, h in zip(residues, present)] == [True] * len(present)
        total += present
    assert total == ["EVQL", "EVQLVESGG", "EV"]


@pytest.mark.parametrize(
    ("packs", "rounds", "locates"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_layout_is_made_anew(packs, rounds, locates):
    maker = LayoutMaker(packs, rounds, locates)
    whole = maker.add_to(pad_rows(TOKENS))
    for number, part in enumerate(cut_batch(whole, 2)):
        expected = maker.add_to(pad_rows(TOKENS[number * 2 : number * 2 + 2]))
        assert part["layout"].shape == expected["layout"].shape
        if packs:
            assert part["layout"].segments.lengths == expected["layout"].segments.lengths
            assert part["layout"].segments.indices.tolist() == expected["layout"].segments.indices.tolist()
            assert part["layout"].segments.num_filled == expected["layout"].segments.num_filled
        if locates:
            assert part["layout"].labelled.tolist() == expected["layout"].labelled.tolist()


def test_classes_of_batches_stay():
    assert all(isinstance(part, RepeatedRows) for part in cut_batch(RepeatedRows(pad_rows(TOKENS)), 2))
    assert all(isinstance(part, BatchEncoding) for part in cut_batch(BatchEncoding(pad_rows(TOKENS)), 2))
    assert type(copy_batch(RepeatedRows(a=1))) is RepeatedRows


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(1, 20), "cu_seqlens": torch.tensor([0, 8, 20])},  # packed in one row
        {"input_ids": torch.ones(4, 5), "position_ids": torch.arange(5)[None]},
        {"input_ids": torch.ones(4, 5), "num": torch.tensor(3)},
        {"input_ids": torch.ones(4, 5), "other": object()},
        {"input_ids": torch.ones(1, 5)},
        torch.ones(4, 5),
        {},
        {"a": 1},
    ],
)
def test_what_cannot_be_cut_is_left_whole(batch):
    assert cut_batch(batch, 2) is None


def test_rows_are_those_of_the_labels():
    assert count_rows({"input_ids": torch.ones(2, 5), "labels": torch.ones(6, 3)}) == 6
    assert count_rows({"sequences": {"heavy": {"input_ids": torch.ones(3, 2)}}}) == 3
    assert count_rows([1]) is None


def test_cached_embeddings_by_their_rows():
    batch = {"embeddings": {"heavy": torch.tensor([[4], [2], [0]]), "antigen": torch.tensor([[0], [0], [1]])}}
    batch |= {"missing": {"heavy": torch.tensor([False, False, True])}, "labels": torch.tensor([7.0, 8.0, 9.0])}
    first, second = cut_batch(batch, 2)
    assert first["embeddings"]["heavy"].tolist() == [[4], [2]]
    assert second["embeddings"]["antigen"].tolist() == [[1]]
    assert second["missing"]["heavy"].tolist() == [True]
    assert second["labels"].tolist() == [9.0]

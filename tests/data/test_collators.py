import pytest
import torch
from transformers import BertTokenizer, EsmTokenizer

from hf_ext.data.collators import SequenceCollator, window_starts
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.errors import DataError


@pytest.fixture(scope="module")
def tokenizers(demo_encoders):
    bert, esm = demo_encoders
    return {"bert": BertTokenizer.from_pretrained(bert), "esm": EsmTokenizer.from_pretrained(esm)}


def esm_collator(tokenizers, too_long, max_residues, num_parts=1, **kwargs):
    names = ["heavy", "light"][:num_parts]
    tokenizer = ResidueTokenizer(tokenizers["esm"], num_parts)
    tokenizer.max_residues = max_residues
    return SequenceCollator({"+".join(names): tokenizer}, {"+".join(names): names}, too_long, **kwargs)


def texts(tokenizers, batch):
    """The residues of every row of a batch of ESM inputs, as a string."""
    rows = zip(batch["input_ids"], batch["residue_mask"])
    return ["".join(tokenizers["esm"].convert_ids_to_tokens(ids[mask].tolist())) for ids, mask in rows]


def test_windows_start_where_worked_out_by_hand_and_cover_every_residue():
    for length, size, overlap, starts in (
        (3, 4, 1, [0]),
        (4, 4, 1, [0]),
        (5, 4, 1, [0, 1]),
        (8, 4, 1, [0, 3, 4]),
        (10, 4, 1, [0, 3, 6]),
        (9, 4, 0, [0, 4, 5]),
        (6, 4, 3, [0, 2]),  # an overlap is at most half a window
        (2, 1, 0, [0, 1]),
    ):
        assert window_starts(length, size, overlap) == starts
    for overlap, length in ((overlap, length) for overlap in (0, 1, 2, 5) for length in range(1, 40)):
        starts = window_starts(length, 6, overlap)
        assert {i for start in starts for i in range(start, min(start + 6, length))} == set(range(length))
        assert starts[-1] == max(0, length - 6)
        assert len(set(starts)) == len(starts)


def test_too_long_inputs_are_an_error_by_default_and_windows_of_single_ones_are_cut_where_asked_for(tokenizers):
    collator = esm_collator(tokenizers, "window", 4, window_overlap=1)
    assert "owner" not in collator.encode("heavy", ["ACDE"])
    batch = collator.encode("heavy", ["ACDEF", "ACDE", "A"])
    assert texts(tokenizers, batch) == ["ACDE", "CDEF", "ACDE", "A"]
    assert batch["owner"].tolist() == [0, 0, 1, 2]
    assert batch["num_rows"].item() == 3
    collator = esm_collator(tokenizers, "error", 4)
    assert texts(tokenizers, collator.encode("heavy", ["ACDE"])) == ["ACDE"]
    with pytest.raises(DataError, match=r"'heavy' has 6 residues; its encoder takes 4. Use --too_long truncate or w"):
        collator.encode("heavy", ["A", "ACDEFG"])
    with pytest.raises(DataError, match=r"has 5 residues; its encoder takes 4. Use --too_long truncate \(windows of a"):
        esm_collator(tokenizers, "window", 4, num_parts=2).encode("heavy+light", ["ACD"], ["EF"])


def test_truncation_keeps_the_first_residues_and_cuts_the_longer_part_of_a_pair_first(tokenizers):
    collator = esm_collator(tokenizers, "truncate", 4)
    assert texts(tokenizers, collator.encode("heavy", ["ACDEFG", "AC"])) == ["ACDE", "AC"]
    for limit, heavy, light, kept in (
        (6, "AAAAAA", "CC", "AAAACC"),
        (6, "AA", "CCCCCC", "AACCCC"),
        (7, "AAAAA", "CCCCC", "AAAACCC"),
        (6, "AAA", "CCC", "AAACCC"),
    ):
        collator = esm_collator(tokenizers, "truncate", limit, num_parts=2)
        longest = "F" * 20  # makes the batch too long even where the first row is not
        assert texts(tokenizers, collator.encode("heavy+light", [heavy, longest], [light, longest]))[0] == kept


@pytest.fixture
def collator(tokenizers):
    inputs = {
        "heavy+light": ResidueTokenizer(tokenizers["bert"], 2, max_length=12),
        "antigen": ResidueTokenizer(tokenizers["esm"]),
    }
    return SequenceCollator(inputs, {"heavy+light": ["heavy", "light"], "antigen": ["antigen"]}, "truncate", 3)


ROWS = [
    {"heavy": "ACD", "light": "EF", "antigen": "GHIKL", "label": 7.5, "bound": 0, "source_row": 1},
    {"heavy": "ACDEFGHIKL", "light": "EFGHI", "antigen": "G", "label": 6, "bound": -1, "source_row": 2},
]


def test_a_batch_holds_each_input_the_labels_and_the_bounds_where_rows_have_them(collator, tokenizers):
    batch = collator(ROWS)
    assert set(batch) == {"sequences", "labels", "bounds"}
    assert (batch["labels"].tolist(), batch["labels"].dtype) == ([7.5, 6.0], torch.float32)
    assert batch["bounds"].tolist() == [0, -1]
    assert texts(tokenizers, batch["sequences"]["antigen"]) == ["GHIKL", "G"]
    assert batch["sequences"]["heavy+light"]["residue_mask"].sum(1).tolist() == [5, 9]
    assert set(collator([{key: row[key] for key in ("heavy", "light", "antigen")} for row in ROWS])) == {"sequences"}


def test_a_batch_of_cached_embeddings_passes_through_and_its_live_rows_are_tokenized(collator, tokenizers):
    embeddings = {"heavy+light": torch.ones(2, 4)}
    cached = {"embeddings": embeddings, "labels": torch.tensor([7.5, 6.0])}
    assert collator(cached) == cached
    batch = collator({**cached, "live": [{"antigen": row["antigen"]} for row in ROWS]})
    assert batch["embeddings"] is embeddings
    assert list(batch["sequences"]) == ["antigen"]
    assert texts(tokenizers, batch["sequences"]["antigen"]) == ["GHIKL", "G"]


def same_batches(one, other):
    first, second = (collator(ROWS)["sequences"] for collator in (one, other))
    keys = [(name, key) for name in first for key in first[name]]
    assert keys == [(name, key) for name in second for key in second[name]]
    return all(torch.equal(first[name][key], second[name][key]) for name, key in keys)


def test_a_saved_collator_reads_back_to_identical_tensors_and_others_are_told_apart(collator, tmp_path):
    collator.save_pretrained(tmp_path)
    again, longer, swapped = (SequenceCollator.from_pretrained(tmp_path) for _ in range(3))
    assert (again.too_long, again.window_overlap, again.columns) == ("truncate", 3, collator.columns)
    longer.tokenizers["heavy+light"].max_residues = 10
    swapped.tokenizers["antigen"].table[ord("G")] = 5
    assert same_batches(again, collator)
    assert [same_batches(broken, collator) for broken in (longer, swapped)] == [False, False]

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


@pytest.mark.parametrize(
    ("length", "size", "overlap", "starts"),
    [
        (3, 4, 1, [0]),
        (4, 4, 1, [0]),
        (5, 4, 1, [0, 1]),
        (7, 4, 1, [0, 3]),
        (8, 4, 1, [0, 3, 4]),
        (10, 4, 1, [0, 3, 6]),
        (8, 4, 0, [0, 4]),
        (9, 4, 0, [0, 4, 5]),
        (6, 4, 3, [0, 1, 2]),
        (2, 1, 0, [0, 1]),
        (1, 4, 3, [0]),
    ],
)
def test_windows_start_where_worked_out_by_hand(length, size, overlap, starts):
    assert window_starts(length, size, overlap) == starts


@pytest.mark.parametrize("overlap", [0, 1, 2, 5])
def test_windows_cover_every_residue_and_end_at_the_end(overlap):
    for length in range(1, 40):
        starts = window_starts(length, 6, overlap)
        covered = {i for start in starts for i in range(start, min(start + 6, length))}
        assert covered == set(range(length))
        assert starts[-1] == max(0, length - 6)
        assert len(set(starts)) == len(starts)


def test_an_exact_fit_is_one_window_and_one_more_residue_makes_two(tokenizers):
    collator = esm_collator(tokenizers, "window", 4, window_overlap=1)
    assert "owner" not in collator.encode("heavy", ["ACDE"])
    batch = collator.encode("heavy", ["ACDEF", "ACDE", "A"])
    assert texts(tokenizers, batch) == ["ACDE", "CDEF", "ACDE", "A"]
    assert batch["owner"].tolist() == [0, 0, 1, 2]
    assert batch["num_rows"].item() == 3


def test_an_overlap_above_half_a_window_is_cut_to_half(tokenizers):
    collator = esm_collator(tokenizers, "window", 8, window_overlap=64)
    batch = collator.encode("heavy", ["ACDEFGHIKLMNPQ"])
    assert texts(tokenizers, batch) == ["ACDEFGHI", "FGHIKLMN", "HIKLMNPQ"]


def test_too_long_inputs_are_an_error_by_default(tokenizers):
    collator = esm_collator(tokenizers, "error", 4)
    assert texts(tokenizers, collator.encode("heavy", ["ACDE"])) == ["ACDE"]
    with pytest.raises(DataError) as error:
        collator.encode("heavy", ["A", "ACDEFG"])
    expected = "Input 'heavy' has 6 residues; its encoder takes 4. Use --too_long truncate or window."
    assert str(error.value) == expected


def test_truncation_keeps_the_first_residues(tokenizers):
    collator = esm_collator(tokenizers, "truncate", 4)
    assert texts(tokenizers, collator.encode("heavy", ["ACDEFG", "AC"])) == ["ACDE", "AC"]


@pytest.mark.parametrize(
    ("limit", "heavy", "light", "kept"),
    [
        (6, "AAAAAA", "CC", "AAAACC"),
        (6, "AA", "CCCCCC", "AACCCC"),
        (6, "AAAAA", "CCCCC", "AAACCC"),
        (7, "AAAAA", "CCCCC", "AAAACCC"),
        (7, "AAAA", "CCCC", "AAAACCC"),
        (6, "AAA", "CCC", "AAACCC"),
    ],
)
def test_truncating_a_pair_cuts_its_longer_part_first(tokenizers, limit, heavy, light, kept):
    collator = esm_collator(tokenizers, "truncate", limit, num_parts=2)
    longest = "F" * 20  # makes the batch too long even where the first row is not
    batch = collator.encode("heavy+light", [heavy, longest], [light, longest])
    assert texts(tokenizers, batch)[0] == kept


def test_windows_of_a_pair_are_refused(tokenizers):
    collator = esm_collator(tokenizers, "window", 4, num_parts=2)
    with pytest.raises(DataError) as error:
        collator.encode("heavy+light", ["ACD"], ["EF"])
    assert "has 5 residues; its encoder takes 4" in str(error.value)
    assert "Use --too_long truncate (windows of a pair are not defined)." in str(error.value)


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


def test_a_batch_holds_each_input_the_labels_and_the_bounds(collator, tokenizers):
    batch = collator(ROWS)
    assert set(batch) == {"sequences", "labels", "bounds"}
    assert (batch["labels"].tolist(), batch["labels"].dtype) == ([7.5, 6.0], torch.float32)
    assert batch["bounds"].tolist() == [0, -1]
    assert texts(tokenizers, batch["sequences"]["antigen"]) == ["GHIKL", "G"]
    assert batch["sequences"]["heavy+light"]["residue_mask"].sum(1).tolist() == [5, 9]


def test_rows_without_labels_give_a_batch_without_labels(collator):
    rows = [{key: row[key] for key in ("heavy", "light", "antigen")} for row in ROWS]
    assert set(collator(rows)) == {"sequences"}


def test_a_batch_of_cached_embeddings_passes_through_and_its_live_rows_are_tokenized(collator, tokenizers):
    embeddings = {"heavy+light": torch.ones(2, 4)}
    cached = {"embeddings": embeddings, "labels": torch.tensor([7.5, 6.0])}
    assert collator(cached) == cached
    batch = collator({**cached, "live": [{"antigen": row["antigen"]} for row in ROWS]})
    assert batch["embeddings"] is embeddings
    assert list(batch["sequences"]) == ["antigen"]
    assert texts(tokenizers, batch["sequences"]["antigen"]) == ["GHIKL", "G"]


def assert_same_batches(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].keys() == second[name].keys()
        assert all(torch.equal(first[name][key], second[name][key]) for key in first[name])


def test_a_saved_collator_reads_back_to_identical_tensors(collator, tmp_path):
    collator.save_pretrained(tmp_path)
    again = SequenceCollator.from_pretrained(tmp_path)
    assert (again.too_long, again.window_overlap, again.columns) == ("truncate", 3, collator.columns)
    assert_same_batches(again(ROWS)["sequences"], collator(ROWS)["sequences"])


def test_a_collator_read_back_with_another_limit_or_vocabulary_is_told_apart(collator, tmp_path):
    collator.save_pretrained(tmp_path)
    longer = SequenceCollator.from_pretrained(tmp_path)
    longer.tokenizers["heavy+light"].max_residues = 10
    swapped = SequenceCollator.from_pretrained(tmp_path)
    swapped.tokenizers["antigen"].table[ord("G")] = 5
    for broken in (longer, swapped):
        with pytest.raises(AssertionError):
            assert_same_batches(broken(ROWS)["sequences"], collator(ROWS)["sequences"])

"""Filling a store: each sequence once, longest first, smaller batches where memory ends, the same files in any case."""

import math
import random
from pathlib import Path

import pytest
import torch

from hf_ext.embeddings import EmbeddingStore, fill_store
from hf_ext.errors import NotFiniteError

KEY = {"encoder": "toy"}


def toy_value(sequence: str) -> list[float]:
    return [float(len(sequence)), float(sum(map(ord, sequence)) % 97)]


class Encoder:
    """Encodes by arithmetic; raises when a batch holds more than `room` sequences; records its batches.

    Of `overflowing` sequences it makes `value`. With `of_tokens`, states: a row for each residue.
    """

    def __init__(self, room=10**9, error=None, overflowing=(), value=math.nan, of_tokens=False):
        self.room, self.error, self.batches = room, error or torch.OutOfMemoryError("out of memory"), []
        self.overflowing, self.value, self.of_tokens = overflowing, value, of_tokens

    def __call__(self, sequences):
        self.batches.append(list(sequences))
        if len(sequences) > self.room:
            raise self.error
        made = torch.tensor([[self.value] * 2 if one in self.overflowing else toy_value(one) for one in sequences])
        return [row.repeat(len(one), 1) for row, one in zip(made, sequences)] if self.of_tokens else made


def make_sequences(count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=rng.randint(3, 30))) for _ in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fill(folder: Path, sequences: list[str], encode=None, **settings) -> tuple[EmbeddingStore, object]:
    store = EmbeddingStore(folder, KEY)
    settings = {"tokens_per_batch": 60, "shard_sequences": 16, "show_progress": False, **settings}
    return store, fill_store(store, sequences, encode or Encoder(), **settings)


@pytest.mark.parametrize("of_tokens", [False, True], ids=["pooled", "states"])
def test_every_distinct_sequence_is_encoded_once_longest_first_and_later_only_what_is_new(tmp_path, of_tokens):
    encode, again = Encoder(of_tokens=of_tokens), Encoder(of_tokens=of_tokens)
    store, report = fill(tmp_path, ["AC", "MKVL", "AC", "W", "GG"], encode, tokens_per_batch=4)
    assert encode.batches == [["MKVL"], ["AC", "GG"], ["W"]]  # at most 4 padded tokens each
    assert (report.num_encoded, report.num_residues, report.tokens_per_batch) == (4, 9, 4)
    store, report = fill(tmp_path, ["AC", "MKVL", "WWW"], again)
    assert (again.batches, report.num_encoded, len(store)) == ([["WWW"]], 1, 5)
    asked = ["W", "MKVL", "WWW"]
    found = store.gather_states(asked) if of_tokens else store.gather(asked)[:, None]
    assert [states.tolist() for states in found] == [[toy_value(s)] * (len(s) if of_tokens else 1) for s in asked]
    _, report = fill(tmp_path, ["AC", "WWW"], Encoder(room=0))
    assert (report.num_encoded, report.num_residues) == (0, 0)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
    ids=["torch", "cpu allocator"],
)
def test_batches_are_halved_until_they_fit_and_stay_small(tmp_path, error):
    encode = Encoder(room=3, error=error)
    sequences = [letter * 5 for letter in "ACDEFGHIKLMNPQRS"]  # 16 of 5 residues: 12 per batch of 60 tokens
    store, report = fill(tmp_path, sequences, encode)
    assert [len(batch) for batch in encode.batches] == [12, 6, 3, 3, 3, 3, 3, 1]
    assert report.tokens_per_batch == 15  # 3 sequences of 5
    assert store.gather(sequences).tolist() == [toy_value(sequence) for sequence in sequences]


def test_a_sequence_that_does_not_fit_alone_is_named_and_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path):
    with pytest.raises(MemoryError, match=r"One sequence of 30 residues.*--max_residues"):
        fill(tmp_path, ["A" * 30, "C"], Encoder(room=0))
    encode = Encoder(room=0, error=RuntimeError("index out of range"))
    with pytest.raises(RuntimeError, match="index out of range"):
        fill(tmp_path, ["AC", "CA"], encode)
    assert len(encode.batches) == 1


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_sequence_that_overflows_is_encoded_in_float32_and_counted(tmp_path, value, caplog):
    sequences, exactly = ["MKVLA", "MKVL", "MKV", "AC", "W"], Encoder()
    encode = Encoder(overflowing=("MKVL", "W"), value=value)
    store, report = fill(tmp_path, sequences, encode, encode_exactly=exactly, tokens_per_batch=10)
    assert exactly.batches == [["MKVL"], ["W"]]
    assert report.overflowed == ["MKVL", "W"]
    assert store.gather(sequences).tolist() == [toy_value(sequence) for sequence in sequences]
    assert "2 of 5 sequences overflow in half precision and were encoded in float32: MKVL (4 residues)" in caplog.text


@pytest.mark.parametrize("exactly", [None, Encoder(overflowing=("AC",))])
def test_a_sequence_that_is_not_finite_in_float32_either_is_named_and_nothing_is_stored(tmp_path, exactly):
    with pytest.raises(NotFiniteError, match=r"in float32 are NaN or infinite for 1 of 1 sequences: AC \(2 residues\)"):
        fill(tmp_path, ["MKV", "AC"], Encoder(overflowing=("AC",)), encode_exactly=exactly)
    assert len(EmbeddingStore(tmp_path, KEY)) == 0


def test_any_number_of_processes_writes_the_files_that_one_writes(tmp_path):
    sequences, found = make_sequences(600), []
    for world_size in (1, 2, 3):
        stores = [EmbeddingStore(tmp_path / str(world_size), KEY) for _ in range(world_size)]  # open before any writes
        given = {"tokens_per_batch": 60, "num_processes": world_size, "show_progress": False}
        reports = [fill_store(store, sequences, Encoder(), process_index=i, **given) for i, store in enumerate(stores)]
        assert sum(report.num_encoded for report in reports) == 600
        assert min(report.num_encoded for report in reports) > 150
        stores[0].refresh()
        assert len(stores[0]) == 600
        found.append(contents(stores[0].folder))
    assert found[0] == found[1] == found[2]
    assert len(list(stores[0].folder.glob("rows-*"))) == 16  # 38 sequences each, the last fewer: small sets are shared

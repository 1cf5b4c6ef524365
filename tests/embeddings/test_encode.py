"""Filling a store: each sequence once, longest first, smaller batches where memory ends, the same files in any case."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_ext.embeddings.encode import fill_store
from hf_ext.embeddings.store import EmbeddingStore

KEY = {"encoder": "toy"}


def toy_value(sequence: str) -> list[float]:
    return [float(len(sequence)), float(sum(map(ord, sequence)) % 97)]


class Encoder:
    """Encodes by arithmetic; raises when a batch holds more than `room` sequences; records its batches."""

    def __init__(self, room: int = 10**9, error: BaseException | None = None):
        self.room, self.error, self.batches = room, error or torch.OutOfMemoryError("out of memory"), []

    def __call__(self, sequences):
        self.batches.append(list(sequences))
        if len(sequences) > self.room:
            raise self.error
        return torch.tensor([toy_value(sequence) for sequence in sequences])


def make_sequences(count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=rng.randint(3, 30))) for _ in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fill(folder: Path, sequences: list[str], encode=None, **settings) -> tuple[EmbeddingStore, object]:
    store = EmbeddingStore(folder, KEY)
    settings = {"tokens_per_batch": 60, "shard_sequences": 16, "show_progress": False, **settings}
    return store, fill_store(store, sequences, encode or Encoder(), **settings)


def test_every_distinct_sequence_is_encoded_once_longest_first(tmp_path):
    encode = Encoder()
    store, report = fill(tmp_path, ["AC", "MKVL", "AC", "W", "GG"], encode, tokens_per_batch=4)
    assert encode.batches == [["MKVL"], ["AC", "GG"], ["W"]]  # at most 4 padded tokens each
    assert (report.num_encoded, report.num_residues, report.tokens_per_batch) == (4, 9, 4)
    assert store.gather(["W", "MKVL"]).tolist() == [toy_value("W"), toy_value("MKVL")]


def test_a_second_filling_encodes_only_what_is_new(tmp_path):
    fill(tmp_path, ["AC", "MKVL"])
    encode = Encoder()
    store, report = fill(tmp_path, ["AC", "MKVL", "WWW"], encode)
    assert encode.batches == [["WWW"]]
    assert (report.num_encoded, len(store)) == (1, 3)
    _, report = fill(tmp_path, ["AC", "WWW"], Encoder(room=0))
    assert (report.num_encoded, report.num_residues) == (0, 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    ],
    ids=["torch", "python", "cpu allocator", "mps"],
)
def test_batches_are_halved_until_they_fit_and_stay_small(tmp_path, error):
    encode = Encoder(room=3, error=error)
    sequences = [letter * 5 for letter in "ACDEFGHIKLMNPQRS"]  # 16 of 5 residues: 12 per batch of 60 tokens
    store, report = fill(tmp_path, sequences, encode)
    assert [len(batch) for batch in encode.batches] == [12, 6, 3, 3, 3, 3, 3, 1]
    assert report.tokens_per_batch == 15  # 3 sequences of 5
    assert store.gather(sequences).tolist() == [toy_value(sequence) for sequence in sequences]


def test_a_sequence_that_does_not_fit_alone_is_named(tmp_path):
    with pytest.raises(MemoryError, match=r"One sequence of 30 residues.*--max_residues"):
        fill(tmp_path, ["A" * 30, "C"], Encoder(room=0))


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path):
    encode = Encoder(room=0, error=RuntimeError("index out of range"))
    with pytest.raises(RuntimeError, match="index out of range"):
        fill(tmp_path, ["AC", "CA"], encode)
    assert len(encode.batches) == 1


def test_two_processes_write_the_files_that_one_writes(tmp_path):
    sequences = make_sequences(100)
    alone, _ = fill(tmp_path / "one", sequences)
    stores = [EmbeddingStore(tmp_path / "two", KEY) for _ in range(2)]  # both open before either writes
    for i in (1, 0):
        fill_store(
            stores[i],
            sequences,
            Encoder(),
            tokens_per_batch=60,
            process_index=i,
            num_processes=2,
            show_progress=False,
            shard_sequences=16,
        )
    assert 0 < len(stores[0]) < 100
    stores[0].refresh()
    assert len(stores[0]) == 100
    assert contents(stores[0].folder) == contents(alone.folder)


def test_small_sets_are_shared_out_in_files_that_neither_processes_nor_a_kill_change(tmp_path):
    sequences = make_sequences(600)
    sizes = []
    for world_size in (1, 2, 3):
        stores = [EmbeddingStore(tmp_path / str(world_size), KEY) for _ in range(world_size)]
        given = {"tokens_per_batch": 60, "num_processes": world_size, "show_progress": False}
        reports = [fill_store(store, sequences, Encoder(), process_index=i, **given) for i, store in enumerate(stores)]
        assert sum(report.num_encoded for report in reports) == 600
        assert min(report.num_encoded for report in reports) > 150
        sizes.append(contents(stores[0].folder))
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(list(stores[0].folder.glob("rows-*"))) == 16  # 38 sequences each, the last fewer


def test_a_store_with_a_hole_is_filled_up_to_the_same_files(tmp_path):
    sequences = make_sequences(100)
    whole, _ = fill(tmp_path, sequences)
    before = contents(whole.folder)
    shards = sorted(whole.folder.glob("rows-*"))
    assert len(shards) == 7
    for shard in shards[1::3]:
        shard.write_bytes(shard.read_bytes()[:-5])
    again, report = fill(tmp_path, sequences)
    assert 0 < report.num_encoded <= 32
    assert contents(again.folder) == before


SLOW_FILL = """
import sys, time
sys.path[:0] = [{tests!r}, {root!r}]
from test_encode import Encoder, fill, make_sequences
from pathlib import Path
def encode(batch):
    time.sleep(0.01)
    return Encoder()(batch)
print("ready", flush=True)
_, report = fill(Path(sys.argv[1]), make_sequences(300), encode)
print(report.num_encoded, flush=True)
"""


def start_slow_fill(folder: Path) -> subprocess.Popen:
    here = Path(__file__).resolve().parent
    code = SLOW_FILL.format(tests=str(here), root=str(here.parent.parent))
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.nightly
def test_a_filling_that_was_killed_twice_ends_in_the_same_files_and_repeats_at_most_one_shard_each(tmp_path):
    reference, _ = fill(tmp_path / "reference", make_sequences(300))
    rng = random.Random(1)
    killed = tmp_path / "killed"
    stored_at_kill = [0]
    for _ in range(2):
        process = start_slow_fill(killed)
        time.sleep(rng.uniform(0.1, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        stored_at_kill.append(len(EmbeddingStore(killed, KEY)))
    process = start_slow_fill(killed)
    num_encoded = int(process.communicate(timeout=60)[0])
    assert stored_at_kill == sorted(stored_at_kill)  # nothing stored is lost
    assert 0 < stored_at_kill[-1] < 300  # the kills came in the middle
    assert num_encoded == 300 - stored_at_kill[-1]
    assert all(count % 16 == 0 for count in stored_at_kill)  # whole shards
    assert contents(next(killed.iterdir())) == contents(reference.folder)
    assert os.listdir(killed) == [reference.folder.name]

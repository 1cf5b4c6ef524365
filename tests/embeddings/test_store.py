"""The store: what went in comes out, and what a kill or a bad disk left behind is seen and repaired."""

import json
import math
import os
import pickle
import time

import pytest
import torch
from safetensors.torch import load_file

from hf_ext.embeddings import EmbeddingStore
from hf_ext.errors import CacheError, DataError, NotFiniteError

KEY = {"encoder": "sha256:1", "dtype": "torch.float32"}
SEQUENCES = ["MKV", "AC", "G|W"]
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, -0.0]])
STATES = [VALUES[:2], VALUES[1:2], VALUES]  # of every token


@pytest.fixture
def store(tmp_path) -> EmbeddingStore:
    store = EmbeddingStore(tmp_path, KEY)
    store.add(SEQUENCES, VALUES)
    return store


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shards(store) -> list:
    return sorted(store.folder.glob("rows-*"))


def test_what_was_stored_is_read_back_in_any_order_with_repeats_and_across_shards(store, tmp_path):
    store.add(["YY"], torch.tensor([[9.0, 8.0]]))
    for again in (store, EmbeddingStore(tmp_path, KEY), pickle.loads(pickle.dumps(store))):  # as spawned workers get it
        assert len(again) == 4
        out = torch.full((5, 2), -1.0)
        assert again.gather(["G|W", "MKV", "YY", "AC", "MKV"], out=out) is out
        assert out.tolist() == [[5.0, 0.0], [1.0, 2.0], [9.0, 8.0], [3.0, 4.0], [1.0, 2.0]]
        assert again.gather([]).shape == (0, 2)
        with pytest.raises(KeyError, match="1 of 2 sequences are not stored"):
            again.gather(["MKV", "MKVV"])
    assert store.missing(["AC", "CA", "WWW", "CA", "AB", "MKV"]) == ["WWW", "AB", "CA"]


def test_states_come_back_in_any_order_and_with_repeats(tmp_path):
    EmbeddingStore(tmp_path, KEY).add(SEQUENCES, STATES)
    again = EmbeddingStore(tmp_path, KEY)
    found = again.gather_states(["G|W", "MKV", "AC", "MKV"])
    assert [states.tolist() for states in found] == [STATES[i].tolist() for i in (2, 0, 1, 0)]
    assert again.gather_states([]) == []
    with pytest.raises(DataError, match="holds states of every token: read them with gather_states"):
        again.gather(SEQUENCES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_bits_on_half_the_disk_and_comes_back_as_float32(tmp_path, dtype):
    values = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    sizes = []
    for kind in (dtype, torch.float32):
        store = EmbeddingStore(tmp_path, {"kind": str(kind)})
        store.add(SEQUENCES, values.to(kind))
        found = store.gather(SEQUENCES)
        assert (found.dtype, found.tolist()) == (torch.float32, values.to(kind).float().tolist())
        sizes.append(shards(store)[0].stat().st_size)
    assert sizes[0] < 0.6 * sizes[1]


def test_a_whole_sequence_is_never_taken_for_what_was_cut(tmp_path):
    long, short, pair = "M" * 8, "M" * 4, "MK|MKT"  # of which both parts count, and not the sign between
    for number, longest in enumerate([None, 5, 6]):
        store = EmbeddingStore(tmp_path, KEY, longest)
        new = store.missing([long, short, pair])
        assert new == ([long] if number else [long, pair, short])
        store.add(new, torch.full((len(new), 2), float(number)))
        assert store.gather([long, short, pair]).tolist() == [[number] * 2, [0.0] * 2, [0.0] * 2]
    (folder,) = tmp_path.iterdir()
    assert sum(len(load_file(path)["keys"]) for path in folder.glob("rows-*")) == 5


def test_what_is_not_finite_or_has_no_shape_is_refused_and_nothing_is_written(tmp_path, store):
    before, wrong = contents(store.folder), [states.clone() for states in STATES]
    wrong[1][0, 1] = math.nan
    for sequences, values, words in (
        (["W", "A" * 50], torch.tensor([[1.0, 2.0], [1.0, math.inf]]), r"for 1 of 2 sequences: A{40}\.\.\. \(50 resid"),
        (SEQUENCES, wrong, r"for 1 of 3 sequences: AC \(2 residues\)"),
    ):
        with pytest.raises(NotFiniteError, match=words):
            store.add(sequences, values)
    for sequences, values in (
        (["A"], []),
        (["A", "C"], [torch.ones(1, 2), torch.ones(1, 3)]),
        (["A"], [torch.ones(0, 2)]),
        (["A"], torch.ones(1, 3)),  # of another width than what is stored
    ):
        with pytest.raises(DataError, match="of one width"):
            store.add(sequences, values)
    assert contents(store.folder) == before


def test_leftovers_of_writers_long_gone_go_and_what_is_being_written_stays(store, tmp_path):
    assert sorted(contents(store.folder)) == ["key.json", shards(store)[0].name]
    assert json.loads((store.folder / "key.json").read_text()) == KEY
    for name, age_s in {"gone": 3700, "living": 60}.items():
        path = store.folder / f"rows-00.safetensors.tmp-{name}"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    EmbeddingStore(tmp_path, KEY)
    assert {path.name.partition(".tmp-")[2] for path in store.folder.glob("*.tmp-*")} == {"living"}


def test_a_damaged_shard_is_seen_removed_and_rebuilt_byte_for_byte(store, tmp_path):
    (shard,), whole = shards(store), contents(store.folder)
    data = whole[shard.name]
    for damaged in (data[:-1], b"", data[:8], data + b"\0", bytes([data[0] ^ 8]) + data[1:], bytes(len(data))):
        shard.write_bytes(damaged)
        again = EmbeddingStore(tmp_path, KEY)
        assert again.missing(SEQUENCES) == ["G|W", "MKV", "AC"]
        assert len(again) == 0
        again.add(SEQUENCES, VALUES)
        assert contents(again.folder) == whole


@pytest.mark.parametrize("values", [VALUES, STATES], ids=["pooled", "states"])
def test_no_single_flipped_bit_of_a_shard_goes_unseen(tmp_path, values):
    store = EmbeddingStore(tmp_path, KEY)
    store.add(SEQUENCES, values)
    read = EmbeddingStore.gather if values is VALUES else EmbeddingStore.gather_states
    (shard,) = shards(store)
    data, num_seen = shard.read_bytes(), 0
    for i in range(len(data)):
        shard.unlink(missing_ok=True)
        shard.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        again = EmbeddingStore(tmp_path, KEY)
        if again.missing(SEQUENCES):
            num_seen += 1
        else:
            assert all(map(torch.equal, read(again, SEQUENCES), read(store, SEQUENCES))), i
    assert num_seen > len(data) * 0.9  # the rest changes no value, such as a blank of the header's padding


def write_many(folder, count=40):
    """A store of shards of three sequences each, and what they hold, in order."""
    store = EmbeddingStore(folder, KEY)
    sequences = [f"{'ACDEFGHIKL'[i // 12]}{'ACDEFGHIKLMN'[i % 12]}" for i in range(3 * count)]
    values = torch.arange(6.0 * count).view(-1, 2)
    for start in range(0, len(sequences), 3):
        store.add(sequences[start : start + 3], values[start : start + 3])
    return store, sequences, values


def test_merging_makes_one_file_of_many_with_the_same_embeddings(tmp_path):
    store, sequences, values = write_many(tmp_path)
    early = EmbeddingStore(tmp_path, KEY)  # a run beside it
    early.add(["WW"], torch.ones(1, 2))
    store.merge()
    assert len(shards(store)) == 2
    for reader in (store, early, EmbeddingStore(tmp_path, KEY)):
        assert torch.equal(reader.gather(sequences), values)
    early.refresh()
    assert torch.equal(early.gather([*sequences, "WW"]), torch.cat([values, torch.ones(1, 2)]))
    early.merge()
    assert len(shards(store)) == 2  # few files stay as they are


def test_a_kill_while_merging_loses_nothing(tmp_path, monkeypatch):
    store, sequences, values = write_many(tmp_path)

    def die(*given):
        raise KeyboardInterrupt

    for name in ("os.replace", "hf_ext.embeddings.store.Shard.remove"):  # before the new file has its name, and after
        killed = EmbeddingStore(tmp_path, KEY)
        with monkeypatch.context() as patch:
            patch.setattr(name, die)
            with pytest.raises(KeyboardInterrupt):
                killed.merge()
        again = EmbeddingStore(tmp_path, KEY)
        assert again.missing(sequences) == []
        assert torch.equal(again.gather(sequences), values)
    again.merge()
    assert (len(again), len(shards(store))) == (120, 1)


def test_a_folder_that_cannot_be_made_is_named_and_what_stands_there_kept(store, tmp_path):
    (tmp_path / "taken").write_text("a,b\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / store.folder.name).write_text("mine")
    for name, reason in (("taken", "Not a directory"), ("other", "File exists"), ("/proc/none/cache", "No such file")):
        with pytest.raises(CacheError, match=f"embedding_cache_dir.*{reason}"):
            EmbeddingStore(tmp_path / name, KEY)
    assert (tmp_path / "taken").read_text() == "a,b\n"
    assert (tmp_path / "other" / store.folder.name).read_text() == "mine"


def test_another_key_is_another_folder_and_a_pair_another_sequence_than_its_parts_joined(store, tmp_path):
    other = EmbeddingStore(tmp_path, {**KEY, "dtype": "torch.bfloat16"})
    assert (len(other), len(store)) == (0, 3)
    assert EmbeddingStore(tmp_path, dict(reversed(KEY.items()))).folder == store.folder  # order says nothing
    assert store.missing(["GW", "|GW", "G|W"]) == ["|GW", "GW"]

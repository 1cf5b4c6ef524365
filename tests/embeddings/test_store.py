"""The store: what went in comes out, and what a kill or a bad disk left behind is seen and repaired."""

import json
import os
import time

import pytest
import torch

from hf_ext.embeddings.store import EmbeddingStore, hash_sequence
from hf_ext.errors import CacheError

KEY = {"encoder": "sha256:1", "dtype": "torch.float32"}
SEQUENCES = ["MKV", "AC", "G|W"]
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, -0.0]])


@pytest.fixture
def store(tmp_path) -> EmbeddingStore:
    store = EmbeddingStore(tmp_path, KEY)
    store.add(SEQUENCES, VALUES)
    return store


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_stored_is_read_back_in_any_order_and_with_repeats(store, tmp_path):
    again = EmbeddingStore(tmp_path, KEY)
    assert len(again) == 3
    read = again.gather(["G|W", "MKV", "AC", "MKV"])
    assert read.tolist() == [[5.0, 0.0], [1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]
    assert read.dtype == torch.float32
    assert torch.equal(again.gather(SEQUENCES), VALUES)
    assert not torch.equal(again.gather(SEQUENCES[::-1]), VALUES)


def test_gather_reads_across_shards_and_into_a_given_tensor(store):
    store.add(["YY"], torch.tensor([[9.0, 8.0]]))
    out = torch.full((3, 2), -1.0)
    assert store.gather(["YY", "AC", "YY"], out=out) is out
    assert out.tolist() == [[9.0, 8.0], [3.0, 4.0], [9.0, 8.0]]


def test_gathering_what_is_not_stored_raises_key_error(store):
    with pytest.raises(KeyError):
        store.gather(["MKV", "MKVV"])


def test_gathering_nothing_gives_an_empty_tensor(store):
    assert store.gather([]).shape == (0, 0)


def test_half_precision_embeddings_keep_their_bits_on_disk_and_come_back_as_float32(tmp_path):
    store = EmbeddingStore(tmp_path, KEY)
    store.add(["A"], torch.tensor([[1.00390625, 2.0]], dtype=torch.bfloat16))  # 1.00390625 rounds to 1.0 in bf16
    assert EmbeddingStore(tmp_path, KEY).gather(["A"]).tolist() == [[1.0, 2.0]]


def test_missing_lists_each_absent_sequence_once_longest_first_then_alphabetical(store):
    assert store.missing(["AC", "CA", "WWW", "CA", "AB", "MKV"]) == ["WWW", "AB", "CA"]


def test_a_pair_is_another_sequence_than_its_parts_joined():
    assert len({hash_sequence(text) for text in ("AC|D", "A|CD", "ACD")}) == 3
    assert hash_sequence("AC|D").hex() == hash_sequence("AC|D").hex()


def test_another_key_is_another_folder(store, tmp_path):
    other = EmbeddingStore(tmp_path, {**KEY, "dtype": "torch.bfloat16"})
    assert other.folder != store.folder
    assert (len(other), len(store)) == (0, 3)
    assert EmbeddingStore(tmp_path, dict(reversed(KEY.items()))).folder == store.folder  # order says nothing


@pytest.mark.parametrize("text", ['{"encoder": "sha256:2"}', '{"encoder": "sha2', ""])
def test_a_folder_whose_key_file_says_something_else_is_refused(store, tmp_path, text):
    (store.folder / "key.json").write_text(text)
    with pytest.raises(CacheError, match=r"key\.json describes other embeddings[\s\S]*--embedding_cache_dir"):
        EmbeddingStore(tmp_path, KEY)


def test_leftovers_of_writers_long_gone_go_and_what_is_being_written_stays(store, tmp_path):
    for name, age_s in {"gone": 3700, "living": 60}.items():
        path = store.folder / f"shard-00.safetensors.tmp-{name}"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    EmbeddingStore(tmp_path, KEY)
    assert {path.name.partition(".tmp-")[2] for path in store.folder.glob("*.tmp-*")} == {"living"}


def test_writing_leaves_no_temporary_file(store):
    (shard,) = [path.name for path in store.folder.glob("shard-*")]
    assert sorted(contents(store.folder)) == ["key.json", shard]
    assert json.loads((store.folder / "key.json").read_text()) == KEY
    assert store.num_bytes == (store.folder / shard).stat().st_size


DAMAGES = {
    "truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "header only": lambda data: data[:8],
    "longer": lambda data: data + b"\0",
    "last byte": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "length of header": lambda data: bytes([data[0] ^ 8]) + data[1:],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_shard_is_seen_removed_and_rebuilt_byte_for_byte(store, tmp_path, damage):
    (shard,) = store.folder.glob("shard-*")
    whole = contents(store.folder)
    shard.write_bytes(damage(whole[shard.name]))
    again = EmbeddingStore(tmp_path, KEY)
    assert (again.num_corrupt, len(again), shard.exists()) == (1, 0, False)
    assert again.missing(SEQUENCES) == ["G|W", "MKV", "AC"]
    again.add(SEQUENCES, VALUES)
    assert contents(again.folder) == whole


def test_no_single_flipped_bit_of_a_shard_goes_unseen(store, tmp_path):
    (shard,) = store.folder.glob("shard-*")
    data = shard.read_bytes()
    unseen = []
    for i in range(len(data)):
        shard.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        store.refresh()
        if len(store) and not (len(store) == 3 and torch.equal(store.gather(SEQUENCES), VALUES)):
            unseen.append(i)
    assert unseen == []
    assert store.num_corrupt > len(data) * 0.9  # the rest changes no value, such as a blank of the header's padding


def test_a_store_without_content_hash_would_hand_out_a_flipped_bit(store, monkeypatch):
    monkeypatch.setattr("hf_ext.embeddings.store._content_hash", lambda tensors: "any")
    store.add(SEQUENCES, VALUES)
    (shard,) = store.folder.glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-3 * 16 - 1] ^= 1  # before the three hashes: the last embedding
    shard.write_bytes(data)
    store.refresh()
    assert not torch.equal(store.gather(SEQUENCES), VALUES)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("taken", "Not a directory"), ("/proc/none/cache", "No such file"), ("\udcff", "not UTF-8")],
)
def test_a_folder_that_cannot_be_made_is_named(tmp_path, name, reason):
    (tmp_path / "taken").write_text("a,b\n")
    with pytest.raises(CacheError, match=f"embedding_cache_dir.*{reason}"):
        EmbeddingStore(tmp_path / name, KEY)
    assert (tmp_path / "taken").read_text() == "a,b\n"


def test_an_entry_that_is_a_file_is_named_and_kept(store, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / store.folder.name).write_text("mine")
    with pytest.raises(CacheError, match="File exists"):
        EmbeddingStore(other, KEY)
    assert (other / store.folder.name).read_text() == "mine"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.parametrize("name", ["key.json", "shard-0.safetensors"])
def test_what_is_no_regular_file_is_refused_at_once_and_kept(store, tmp_path, make, name):
    path = store.folder / name
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(CacheError, match=rf"{path}: is a (folder|named pipe|device), not a regular file"):
        EmbeddingStore(tmp_path, KEY)
    assert os.path.lexists(path)


def test_a_key_that_is_no_text_is_another_key(store, tmp_path):
    (store.folder / "key.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CacheError, match="describes other embeddings"):
        EmbeddingStore(tmp_path, KEY)


def test_a_folder_named_like_a_leftover_stays(store, tmp_path):
    (store.folder / "x.tmp-1").mkdir()
    os.utime(store.folder / "x.tmp-1", (1.0, 1.0))
    assert len(EmbeddingStore(tmp_path, KEY)) == 3
    assert (store.folder / "x.tmp-1").is_dir()

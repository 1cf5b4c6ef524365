"""The store: what went in comes out, and what a kill or a bad disk left behind is seen and repaired."""

import json
import os
import pickle
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ext.embeddings.store import EmbeddingStore, check_stores, hash_sequence
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
    assert store.gather([]).shape == (0, 2)


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


def test_leftovers_of_writers_long_gone_go_and_what_is_being_written_stays(store, tmp_path):
    for name, age_s in {"gone": 3700, "living": 60}.items():
        path = store.folder / f"rows-00.safetensors.tmp-{name}"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    EmbeddingStore(tmp_path, KEY)
    assert {path.name.partition(".tmp-")[2] for path in store.folder.glob("*.tmp-*")} == {"living"}


def test_writing_leaves_no_temporary_file(store):
    (shard,) = [path.name for path in store.folder.glob("rows-*")]
    assert sorted(contents(store.folder)) == ["key.json", shard]
    assert json.loads((store.folder / "key.json").read_text()) == KEY


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
    (shard,) = store.folder.glob("rows-*")
    whole = contents(store.folder)
    shard.write_bytes(damage(whole[shard.name]))
    again = EmbeddingStore(tmp_path, KEY)
    assert again.missing(SEQUENCES) == ["G|W", "MKV", "AC"]
    assert (len(again), shard.exists()) == (0, False)
    again.add(SEQUENCES, VALUES)
    assert contents(again.folder) == whole


@pytest.mark.parametrize("of_tokens", [False, True])
def test_no_single_flipped_bit_of_a_shard_goes_unseen(tmp_path, of_tokens):
    store = EmbeddingStore(tmp_path, KEY)
    store.add(SEQUENCES, [VALUES[:2], VALUES[1:2], VALUES] if of_tokens else VALUES)
    read = EmbeddingStore.gather_states if of_tokens else EmbeddingStore.gather
    (shard,) = store.folder.glob("rows-*")
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


def test_damage_of_one_shard_costs_no_other_and_not_what_nobody_asks_for(store, tmp_path, caplog):
    (damaged,) = store.folder.glob("rows-*")
    store.add(["YY"], torch.ones(1, 2))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    again = EmbeddingStore(tmp_path, KEY)
    assert again.gather(["YY"]).tolist() == [[1.0, 1.0]]
    assert (caplog.text, damaged.exists()) == ("", True)  # it is hashed when something of it is asked for
    assert f"1 of its files are damaged, and what they held is encoded again: {damaged.parent.name}/" in check_stores(
        tmp_path
    )
    assert damaged.exists()
    assert again.missing(["YY", "AC"]) == ["AC"]
    assert "is damaged; removed, its sequences are encoded again" in caplog.text
    assert not damaged.exists()


def test_a_damaged_file_that_another_process_has_replaced_stays(store, tmp_path):
    (shard,) = store.folder.glob("rows-*")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"!")
    slow, quick = EmbeddingStore(tmp_path, KEY), EmbeddingStore(tmp_path, KEY)
    quick.add(quick.missing(SEQUENCES)[::-1], VALUES)
    assert len(slow.missing(SEQUENCES)) == 3
    assert shard.exists()


def test_files_of_an_earlier_layout_are_not_looked_at(store, tmp_path):
    save_file({name: torch.zeros(1, 2) for name in ("hashes", "embeddings")}, store.folder / "shard-1.safetensors")
    assert len(EmbeddingStore(tmp_path, KEY)) == len(store)
    assert "damaged" not in check_stores(tmp_path)


def write_many(store, count=40, dtype=torch.float32):
    """Shards of three sequences each: what they hold, in order."""
    sequences = [f"{'ACDEFGHIKL'[i // 12]}{'ACDEFGHIKLMN'[i % 12]}" for i in range(3 * count)]
    values = torch.arange(6.0 * count).view(-1, 2).to(dtype)
    for start in range(0, len(sequences), 3):
        store.add(sequences[start : start + 3], values[start : start + 3])
    return sequences, values.float()


def test_merging_makes_one_file_of_many_with_the_same_embeddings(tmp_path):
    store = EmbeddingStore(tmp_path, KEY)
    sequences, values = write_many(store)
    early = EmbeddingStore(tmp_path, KEY)  # a run beside it
    early.add(["WW"], torch.ones(1, 2))
    store.merge()
    assert len(list(store.folder.glob("rows-*"))) == 2
    for reader in (store, early, EmbeddingStore(tmp_path, KEY)):
        assert torch.equal(reader.gather(sequences), values)
    early.refresh()
    assert torch.equal(early.gather([*sequences, "WW"]), torch.cat([values, torch.ones(1, 2)]))
    early.merge()
    assert len(list(store.folder.glob("rows-*"))) == 2  # few files stay as they are


def test_merged_files_are_as_large_as_they_may_be_and_keep_their_precision(tmp_path, monkeypatch):
    store = EmbeddingStore(tmp_path, KEY)
    sequences, values = write_many(store)
    halves = ["WWW", "YYY"]
    for sequence in halves:
        store.add([sequence], torch.ones(1, 2, dtype=torch.bfloat16))
    size = store.folder.glob("rows-*").__next__().stat().st_size
    monkeypatch.setattr("hf_ext.embeddings.shards.MAX_SHARD_BYTES", 10 * size)
    store.merge()
    dtypes = [load_file(path)["values"].dtype for path in store.folder.glob("rows-*")]
    assert sorted(map(str, dtypes)) == ["torch.bfloat16", *["torch.float32"] * 4]
    again = EmbeddingStore(tmp_path, KEY)
    assert torch.equal(again.gather([*halves, *sequences]), torch.cat([torch.ones(2, 2), values]))


def test_a_kill_while_merging_loses_nothing(tmp_path, monkeypatch):
    store = EmbeddingStore(tmp_path, KEY)
    sequences, values = write_many(store)

    def die(*given):
        raise KeyboardInterrupt

    for name in ("os.replace", "hf_ext.embeddings.shards.Shard.remove"):  # before the new file has its name, and after
        killed = EmbeddingStore(tmp_path, KEY)
        with monkeypatch.context() as patch:
            patch.setattr(name, die)
            with pytest.raises(KeyboardInterrupt):
                killed.merge()
        again = EmbeddingStore(tmp_path, KEY)
        assert again.missing(sequences) == []
        assert torch.equal(again.gather(sequences), values)
    again.merge()
    assert (len(again), len(list(store.folder.glob("rows-*")))) == (120, 1)


def test_a_damaged_shard_is_never_merged(tmp_path):
    store = EmbeddingStore(tmp_path, KEY)
    sequences, values = write_many(store)
    path = sorted(store.folder.glob("rows-*"))[5]
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    again = EmbeddingStore(tmp_path, KEY)
    again.merge()
    lost = again.missing(sequences)
    assert len(lost) == 3
    kept = [i for i, sequence in enumerate(sequences) if sequence not in lost]
    assert torch.equal(EmbeddingStore(tmp_path, KEY).gather([sequences[i] for i in kept]), values[kept])


def test_a_store_travels_to_data_workers_that_are_spawned(store):
    assert torch.equal(pickle.loads(pickle.dumps(store)).gather(SEQUENCES), VALUES)


def test_each_sequence_is_hashed_once(tmp_path):
    store, sequences = EmbeddingStore(tmp_path, KEY), ["CW", "CWC", "CWCW"]
    before = hash_sequence.cache_info().misses
    store.add(store.missing(sequences), torch.ones(3, 2))
    store.gather(sequences)
    keys = store.keys_of(sequences)
    assert hash_sequence.cache_info().misses == before + 3
    assert torch.equal(store.gather(keys[1:]), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("taken", "Not a directory"), ("/proc/none/cache", "No such file"), ("\udcff", "surrogates not allowed")],
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


def test_a_folder_named_like_a_leftover_stays(store, tmp_path):
    (store.folder / "x.tmp-1").mkdir()
    os.utime(store.folder / "x.tmp-1", (1.0, 1.0))
    assert len(EmbeddingStore(tmp_path, KEY)) == 3
    assert (store.folder / "x.tmp-1").is_dir()

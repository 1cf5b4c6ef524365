"""HDF5 as biotrainer keeps it: what is written comes back, its own files are read, and others are refused in words."""

import hashlib

import pytest
import torch

from hf_ext.embeddings.hdf5 import export_hdf5, import_hdf5
from hf_ext.embeddings.store import EmbeddingStore
from hf_ext.errors import DataError

h5py = pytest.importorskip("h5py")
SEQUENCES = {"first": "MKV", "second": "AC", "third": "MKV"}
VALUES = torch.tensor([[1.0, 2.5], [3.0, -4.0]])


def fill(folder, values=VALUES):
    store = EmbeddingStore(folder, {"encoder": "toy"})
    store.add(["MKV", "AC"], values)
    return store


def write_biotrainers(path, by_hash, dtype="float32", values=VALUES):
    """As its EmbeddingService.store_embedding does, which names datasets by hash or by id."""
    with h5py.File(path, "w") as file:
        for (name, text), one in zip([("first", "MKV"), ("second", "AC")], values):
            index = hashlib.sha256(f"{text}_{len(text)}".encode()).hexdigest() if by_hash else name
            file.create_dataset(index, data=one.numpy().astype(dtype), compression="gzip", chunks=True)
            file[index].attrs["original_id"] = name


@pytest.mark.parametrize(("by_hash", "dtype"), [(False, "float32"), (True, "float16")])
def test_files_of_biotrainer_are_read_and_written(tmp_path, by_hash, dtype):
    write_biotrainers(tmp_path / "theirs.h5", by_hash, dtype)
    store = EmbeddingStore(tmp_path / "cache", {"encoder": "toy"})
    assert import_hdf5(tmp_path / "theirs.h5", store, {"first": "MKV", "second": "AC"}, 2) == 2
    assert torch.equal(store.gather(["MKV", "AC", "MKV"]), VALUES[[0, 1, 0]])
    write_biotrainers(tmp_path / "theirs.h5", True)
    export_hdf5(store, tmp_path / "ours.h5", {"first": "MKV", "second": "AC"})
    with h5py.File(tmp_path / "theirs.h5") as theirs, h5py.File(tmp_path / "ours.h5") as ours:
        assert sorted(theirs) == sorted(ours)
        for name, data in theirs.items():
            assert (ours[name][()] == data[()]).all()
            assert dict(ours[name].attrs) == dict(data.attrs)
            assert ours[name].dtype == data.dtype


def test_a_file_of_something_else_is_refused_and_nothing_stored(tmp_path):
    store = EmbeddingStore(tmp_path / "cache", {"encoder": "toy"})
    for sequences, values, width, words in (
        ({"4": "GGG"}, VALUES, 2, r"lacks 1 of 1 sequences.*such as '4'; of its 2 ids one is '(first|second)'"),
        (SEQUENCES, VALUES, 1280, r"shape \(2,\), not \(1280,\): of another encoder, or not pooled"),
        (SEQUENCES, VALUES[None].expand(2, 2, 2), 2, r"shape \(2, 2\), not \(2,\)"),
    ):
        write_biotrainers(tmp_path / "theirs.h5", by_hash=True, values=values)
        with pytest.raises(DataError, match=words):
            import_hdf5(tmp_path / "theirs.h5", store, sequences, width)
    assert len(store) == 0


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_ext.optional.import_problem", lambda package: "is not installed")
    with pytest.raises(ImportError, match=r"hf_ext\[hdf5\]"):
        import_hdf5(tmp_path / "x.h5", fill(tmp_path), SEQUENCES, 2)

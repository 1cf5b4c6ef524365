"""Files of vectors: found by id, hash, original id or sequence in each format; what does not fit is listed."""

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from hf_ext.embeddings import WRITERS, VectorFile, hash_sequence
from hf_ext.errors import ArgumentError, DataError

SEQUENCES = ["MKTA", "MSEQ", "MAH"]
IDS = ["sp|P1", "A/1-4", "P3"]
POOLED = np.arange(6, dtype=np.float32).reshape(3, 2)
RESIDUES = [np.full((len(one), 2), i, np.float32) for i, one in enumerate(SEQUENCES)]
ROWS = Dataset.from_dict({"id": IDS, "sequence": SEQUENCES, "source_row": [2, 3, 4]})


def bind(path, rows=ROWS, rank=1, id_column="id"):
    vectors = VectorFile(path)
    vectors.bind({"train": rows}, ["sequence"], id_column, rank)
    return vectors


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_back_what_was_written_by_id_by_hash_and_by_original_id(suffix, tmp_path):
    by_id = [one.replace("/", "_") for one in IDS]
    by_hash = [*map(hash_sequence, SEQUENCES)]
    for names in (by_id, by_hash, SEQUENCES, ["a", "b", "c"]):
        path = tmp_path / f"{names[0][:4]}{suffix}"
        WRITERS[suffix](path, zip(names, IDS, POOLED))
        if names[0] == "a" and suffix not in (".h5", ".hdf5"):
            with pytest.raises(DataError, match="no vector for it"):
                bind(path)
            continue
        assert bind(path).read(SEQUENCES[::-1]).tolist() == POOLED[::-1].tolist()
        if names is not by_id and names[0] != "a":
            assert bind(path, id_column=None).read(["MSEQ"]).tolist() == [[2, 3]]
    WRITERS[suffix](tmp_path / f"r{suffix}", zip(by_id, IDS, RESIDUES))
    found = bind(tmp_path / f"r{suffix}", rank=2).read(SEQUENCES)
    assert [one.tolist() for one in found] == [one.tolist() for one in RESIDUES]


def test_a_hash_is_that_of_biotrainer():
    # printf MKTA_4 | sha256sum
    assert hash_sequence("MKTA") == "0a91a8269361f9375f93133761650c750b44da3ecaece4d5d6ac43831fff8b27"


def test_rows_that_have_no_vector_that_fits_are_listed_all_at_once(tmp_path):
    rows = Dataset.from_dict(
        {
            "id": ["a", "b", "c", "d", "e", "f"],
            "sequence": ["MK", "MS", "MA", "MW", "MY", "MK"],
            "source_row": [*range(2, 8)],
        }
    )
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, vector in {"a": [1, 2], "b": [1, np.nan], "c": [1, 2, 3], "d": [[1, 2]], "f": [1, 2.5]}.items():
            file[name] = np.array(vector, np.float16)
    with pytest.raises(DataError) as refused:
        bind(tmp_path / "a.h5", rows)
    text = str(refused.value)
    assert "5 values cannot be used" in text
    for part in (
        "row 3, column 'sequence', value 'b': the vector is NaN or infinite",
        "row 4, column 'sequence', value 'c': its shape is (3,), and (2,) is needed",
        "row 5, column 'sequence', value 'd': its shape is (1, 2)",
        "row 6, column 'sequence', value 'e': the file has no vector for it",
        "row 7, column 'sequence', value 'f': the vector differs from that of another row",
    ):
        assert part in text
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["a"] = np.ones((3, 2))
    with pytest.raises(DataError, match=r"its shape is \(3, 2\), and \(2, 2\) is needed"):
        bind(tmp_path / "r.h5", rows.select([0]), rank=2)


def test_a_file_that_is_no_file_of_vectors_is_refused_by_its_name(tmp_path):
    (tmp_path / "a.csv").write_text("id,embedding\n")
    (tmp_path / "a.h5").write_text("no HDF5")
    (tmp_path / "a.npz").write_text("no archive")
    h5py.File(tmp_path / "empty.h5", "w").close()
    pq.write_table(pa.table({"id": ["a"], "x": [1.0]}), tmp_path / "a.parquet")
    for name, words in {
        "a.csv": "files that are read end in .h5, .hdf5, .npz, .parquet",
        "a.h5": "no vectors can be read from it",
        "a.npz": "no vectors can be read from it",
        "empty.h5": "no vectors can be read from it",
        "a.parquet": "Of Parquet, columns id and embedding are read",
        "none.h5": "no vectors can be read from it",
    }.items():
        with pytest.raises((ArgumentError, DataError), match=words):
            VectorFile(tmp_path / name)


def test_an_id_is_looked_up_where_the_file_was_made_and_stands_for_one_sequence(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:  # named by running numbers
        for name, identity in {"0": "1", "1": "2", "a_b": "a_b"}.items():
            file.create_dataset(name, data=np.full(2, float(identity[0] == "2"))).attrs["original_id"] = identity
    rows = Dataset.from_dict({"id": ["1", "2"], "sequence": ["MK", "MS"], "source_row": [2, 3]})
    assert bind(tmp_path / "a.h5", rows).read(["MK", "MS"]).tolist() == [[0, 0], [1, 1]]
    for ids, refused in ((["1", "1"], "the id stands for both"), (["1", "a/b"], "no vector for it")):
        wrong = rows.remove_columns("id").add_column("id", ids)
        with pytest.raises(DataError, match=refused):
            bind(tmp_path / "a.h5", wrong)


def test_the_hash_of_a_sequence_counts_more_than_an_id_that_another_one_has_in_the_file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, sequence in enumerate(["MK", "MS"]):
            entry = file.create_dataset(hash_sequence(sequence), data=np.full(2, float(number)))
            entry.attrs["original_id"] = f"Seq{number}"
    rows = Dataset.from_dict({"id": ["Seq1", "Seq0"], "sequence": ["MK", "MS"], "source_row": [2, 3]})
    assert bind(tmp_path / "a.h5", rows).read(["MK", "MS"]).tolist() == [[0, 0], [1, 1]]


def test_the_cache_knows_vectors_by_the_sequences_that_they_were_bound_to(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros(2), b=np.ones(2))
    rows = Dataset.from_dict({"id": ["a", "b"], "sequence": ["MK", "MS"], "source_row": [2, 3]})
    swapped = rows.remove_columns("id").add_column("id", ["b", "a"])
    prints = [bind(tmp_path / "a.npz", one).fingerprint for one in (rows, rows.select([1, 0]), swapped)]
    assert prints[0] == prints[1] != prints[2]

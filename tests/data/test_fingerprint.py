"""A fingerprint follows the content of a data set, not the process, the file or the memory it lies in."""

import random

import numpy as np
import torch
from datasets import Dataset, Value, concatenate_datasets, load_dataset, load_from_disk
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchIterableDataset

from hf_ext.data import compare_fingerprints, fingerprint

ROWS = {"heavy": ["EVQ", "QVQL", "DV"], "label": [1.5, None, 0.0], "good": [True, None, False]}


def changed(**columns) -> Dataset:
    return Dataset.from_dict({**ROWS, **columns})


def test_where_rows_stand_in_their_file_is_no_difference():
    before, now = (fingerprint(changed(source_row=rows)) for rows in ([2, 3, 4], [3, 4, 5]))
    assert before != now
    assert compare_fingerprints(before, now) == ([], [])
    assert compare_fingerprints(fingerprint(changed()), now) == ([], [])


def test_a_changed_value_changes_the_hash_of_its_column_only():
    before = fingerprint(changed())["content"]
    for name, values in (
        ("heavy", ["EVQ", "QVQL", "DI"]),
        ("heavy", ["EVQQ", "VQL", "DV"]),  # the same letters, cut elsewhere
        ("heavy", ["QVQL", "EVQ", "DV"]),
        ("label", [1.5, 0.0, 0.0]),
        ("label", [1.5, None, -0.0]),
        ("label", [1.5, 0.0, None]),
        ("good", [True, False, False]),
    ):
        now = fingerprint(changed(**{name: values}))["content"]
        assert [key for key in before if before[key] != now[key]] == [name]

    whole = fingerprint(changed())  # order, type and columns are part of the content
    assert fingerprint(changed().select([1, 0, 2]))["content"] != whole["content"]
    assert fingerprint(changed().cast_column("label", Value("float32")))["content"] != whole["content"]
    assert [*fingerprint(changed().rename_column("heavy", "h"))["content"]] == ["h", "label", "good"]
    assert fingerprint(changed().select(range(2)))["num_rows"] == 2


def test_how_the_rows_lie_in_memory_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_ext.data.fingerprints.BLOCK_ROWS", 100)
    num_rows = 250  # two blocks and a part; nulls at places that are no multiple of 8
    table = Dataset.from_dict(
        {
            "name": ["ACDEFGHIKL"[: i % 7] for i in range(num_rows)],
            "text": [None if i % 13 == 0 else "ACDEFGHIKL"[: i % 10] for i in range(num_rows)],
            "number": [None if i % 7 == 0 else i / 3 for i in range(num_rows)],
            "flag": [None if i % 11 == 0 else i % 3 == 0 for i in range(num_rows)],
            "ids": [None if i % 17 == 0 else list(range(i % 5)) for i in range(num_rows)],
            "pair": [{"a": i, "b": None if i % 3 else str(i)} for i in range(num_rows)],
        }
    )
    whole, rows = fingerprint(table), table.to_list()
    thirds = [Dataset.from_list(rows[i : i + 83], table.features) for i in range(0, num_rows, 83)]
    padded = concatenate_datasets([table.select(range(5)), table, table.select(range(3))])
    table.save_to_disk(tmp_path / "saved", num_shards=3)
    assert fingerprint(concatenate_datasets(thirds)) == whole
    assert fingerprint(padded.select(range(5, 5 + num_rows))) == whole  # a slice that begins within a byte
    assert fingerprint(load_from_disk(tmp_path / "saved")) == whole
    shuffled = table.shuffle(seed=1)
    assert fingerprint(shuffled) == fingerprint(shuffled.flatten_indices())
    assert fingerprint(shuffled)["content"] != whole["content"]


class Made(TorchDataset):
    def __init__(self, num_rows: int, make):
        self.num_rows, self.make = num_rows, make

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return {"x": self.make(index)}


def draw(index):
    return index + random.random() + np.random.rand() + torch.rand(1).item()  # noqa: NPY002


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def test_of_other_datasets_the_length_and_a_sample_are_compared_unless_drawn_at_random():
    large, before = fingerprint(Made(10_000, torch.tensor)), states()
    assert large["num_rows"] == 10_000
    assert large == fingerprint(Made(10_000, torch.tensor))
    assert large != fingerprint(Made(10_000, lambda index: torch.tensor(index + 1)))
    assert fingerprint(Made(0, draw))["content"] == {}
    drawn = fingerprint(Made(5, draw))
    assert drawn["content"] == {"x": None}
    assert compare_fingerprints(drawn, drawn) == ([], ["whether the values of column 'x' are the same cannot be told"])
    assert states() == before
    rows = [{"x": torch.ones(2, dtype=torch.bfloat16), "y": np.float32(1)}, {"x": torch.zeros(()), "y": "1"}]
    for change in ({"x": torch.ones(2)}, {"x": torch.ones(1, 2, dtype=torch.bfloat16)}, {"y": np.float64(1)}):
        assert compare_fingerprints(fingerprint([{**rows[0], **change}, rows[1]]), fingerprint(rows))[0] == [
            f"column '{next(iter(change))}' holds other values"
        ]


class Counted(TorchIterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        raise AssertionError("a stream is not read")


def test_a_stream_is_described_by_its_names_without_being_read(tmp_path):
    described = []
    for name in ("a.jsonl", "b.jsonl"):
        changed().to_json(tmp_path / name)
        described.append(fingerprint(load_dataset("json", data_files=str(tmp_path / name), streaming=True)["train"]))
    assert described[0]["content"]["columns"] == ["heavy", "label", "good"]
    ((difference,), untold) = compare_fingerprints(*described)
    assert difference.startswith("files: ['")
    assert "a.jsonl" in difference
    assert untold == []
    assert fingerprint(Counted()) == fingerprint(None)


def test_comparing_names_the_columns_that_differ():
    old, new = fingerprint(changed()), fingerprint(changed(label=[1, None, 1]).rename_column("good", "bad"))
    assert compare_fingerprints(old, old) == ([], [])
    assert compare_fingerprints(old, new)[0] == [
        "column 'label' holds other values",
        "column 'good' is not there now",
        "column 'bad' is new",
    ]
    shorter = fingerprint(changed().select([0]))
    assert compare_fingerprints(old, shorter)[0][0] == "rows: 3 in the checkpoint, 1 now"
    sets = [fingerprint({"a": changed(), "b": changed(label=[1, None, last])}) for last in (1, 2)]
    assert compare_fingerprints(*sets)[0] == ["column 'b' holds other values"]

"""Tables give the same rows from memory and from disk; datasets give whole batches of positions."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hf_ext.embeddings.dataset import EmbeddedDataset, make_table
from hf_ext.embeddings.store import EmbeddingStore

SEQUENCES = ["AC", "MKV", "G"]
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


@pytest.fixture
def store(tmp_path) -> EmbeddingStore:
    store = EmbeddingStore(tmp_path, {"encoder": "toy"})
    store.add(SEQUENCES, VALUES)
    return store


def test_tables_in_memory_and_on_disk_have_the_same_rows(store):
    for budget in (16, 15, 0):  # 2 rows x 2 x 4 bytes
        assert make_table(store, ["G", "AC"], 2, budget).tolist() == [[5.0, 6.0], [1.0, 2.0]]
        assert sorted(path.suffix for path in store.folder.iterdir()) == [".json", ".safetensors"]  # no scratch file


@pytest.fixture
def dataset() -> EmbeddedDataset:
    positions = {"heavy": np.array([0, 1, -1, 2]), "light": np.array([0, 0, 1, 1])}
    tables = {"heavy": torch.tensor([[5.0], [6.0], [7.0]]), "light": torch.tensor([[1.0], [2.0]])}
    labels = {"labels": np.array([7.0, 8.0, 9.0, 6.5], np.float32)}
    return EmbeddedDataset(positions, tables, labels, optional=["heavy"])


def test_a_batch_holds_embeddings_labels_and_what_is_missing(dataset):
    batch = dataset.__getitems__([3, 0])
    assert {name: rows.tolist() for name, rows in batch["embeddings"].items()} == {
        "heavy": [[7.0], [5.0]],
        "light": [[2.0], [1.0]],
    }
    assert (batch["labels"].tolist(), batch["labels"].dtype) == ([6.5, 7.0], torch.float32)
    assert (len(dataset), "live" in batch) == (4, False)
    assert dataset[1]["labels"].tolist() == [8.0]
    assert dataset.__getitems__([2, 3])["missing"]["heavy"].tolist() == [True, False]
    batches = list(DataLoader(dataset, batch_size=3, collate_fn=dict))  # fetched whole
    assert [batch["labels"].tolist() for batch in batches] == [[7.0, 8.0, 9.0], [6.5]]


def test_rows_that_are_not_cached_travel_with_the_batch():
    live = [{"antigen": "AC"}, {"antigen": "MK"}, {"antigen": "WW"}]
    dataset = EmbeddedDataset({"heavy": np.array([0, 1, 2])}, {"heavy": torch.ones(3, 1)}, {}, live=live)
    assert dataset.__getitems__([2, 0])["live"] == [{"antigen": "WW"}, {"antigen": "AC"}]

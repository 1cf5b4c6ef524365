"""Tables give the same rows from memory and from disk; datasets give whole batches of positions."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hf_ext.embeddings.dataset import EmbeddedDataset, EmbeddingTable, join_parts
from hf_ext.embeddings.store import EmbeddingStore

CPU = torch.device("cpu")
SEQUENCES = ["AC", "MKV", "G"]
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


@pytest.fixture
def store(tmp_path) -> EmbeddingStore:
    store = EmbeddingStore(tmp_path, {"encoder": "toy"})
    store.add(SEQUENCES, VALUES)
    return store


def make_table(store: EmbeddingStore, budget_bytes: int) -> EmbeddingTable:
    return EmbeddingTable(store, ["G", "AC"], 2, CPU, budget_bytes, store.folder)


def test_tables_in_memory_and_on_disk_give_the_same_rows(store):
    position = torch.tensor([1, 0, 1])
    tables = {budget: make_table(store, budget) for budget in (16, 15, 0)}  # 2 rows x 2 x 4 bytes
    assert [table.on_device for table in tables.values()] == [True, False, False]
    for table in tables.values():
        assert table.rows(position, CPU).tolist() == [[1.0, 2.0], [5.0, 6.0], [1.0, 2.0]]
        assert table.position == {"G": 0, "AC": 1}


def test_the_scratch_file_of_a_table_is_gone_while_the_table_is_read(store):
    table = make_table(store, 0)
    assert sorted(path.suffix for path in store.folder.iterdir()) == [".json", ".safetensors"]
    assert table.rows(torch.tensor([0]), CPU).tolist() == [[5.0, 6.0]]


def test_parts_of_a_pair_are_joined_by_a_bar():
    assert join_parts(("AC", "MKV")) == "AC|MKV"
    assert join_parts(("AC",)) == "AC"


@pytest.fixture
def dataset() -> EmbeddedDataset:
    positions = {"heavy": np.array([0, 1, 0, 2]), "light": np.array([0, 0, 1, 1])}
    return EmbeddedDataset(positions, {"labels": np.array([7.0, 8.0, 9.0, 6.5], np.float32)}, tables=3)


def test_a_batch_holds_positions_labels_and_the_number_of_its_tables(dataset):
    batch = dataset.__getitems__([3, 0])
    assert {name: index.tolist() for name, index in batch["positions"].items()} == {"heavy": [2, 0], "light": [1, 0]}
    assert batch["labels"].tolist() == [6.5, 7.0]
    assert batch["labels"].dtype == torch.float32
    assert (batch["tables"], len(dataset), "live" in batch) == (3, 4, False)
    assert dataset[1]["labels"].tolist() == [8.0]


def test_a_dataloader_fetches_batches_whole(dataset):
    batches = list(DataLoader(dataset, batch_size=3, collate_fn=dict))
    assert [batch["labels"].tolist() for batch in batches] == [[7.0, 8.0, 9.0], [6.5]]


def test_rows_that_are_not_cached_travel_with_the_batch():
    live = [{"antigen": "AC"}, {"antigen": "MK"}, {"antigen": "WW"}]
    dataset = EmbeddedDataset({"heavy": np.array([0, 1, 2])}, {}, live=live)
    assert dataset.__getitems__([2, 0])["live"] == [{"antigen": "WW"}, {"antigen": "AC"}]

"""Rows of cached embeddings, from memory and from disk, and states of every token as a generator reads them."""

import numpy as np
import pytest
import torch
from tiny_generators import ANTIGENS, TINY, make_on_encoder, make_rows
from torch.utils.data import DataLoader
from transformers import EsmTokenizer

from hf_ext.data import AntibodyCollator, PairEncoder, ResidueTokenizer
from hf_ext.embeddings import EmbeddedDataset, EmbeddingStore, StateTable, fill_store, make_table
from hf_ext.models import LoraSettings, read_encoder, state_encoder, state_key

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


@pytest.fixture
def generator(demo_encoders):
    torch.manual_seed(0)
    spec = read_encoder(demo_encoders[1], None, "frozen", LoraSettings())
    return make_on_encoder(spec, **{**TINY, "dropout": 0.0}).eval()


def test_a_generator_reads_cached_states_as_it_reads_live_ones(generator, demo_encoders, tmp_path):
    esm = EsmTokenizer.from_pretrained(demo_encoders[1])
    tokenizer = ResidueTokenizer(esm)
    store = EmbeddingStore(tmp_path, state_key(generator.encoder, tokenizer))
    encode = state_encoder(generator.encoder, tokenizer)
    fill_store(store, ANTIGENS, encode, tokens_per_batch=64, show_progress=False)
    assert len(store) == 3
    distinct = sorted(set(ANTIGENS))
    table = StateTable(store, distinct, PairEncoder(esm).encode_antigens(distinct))
    rows = make_rows(esm)
    live = generator(**AntibodyCollator(esm.pad_token_id)(rows))
    generator.encoder.release()
    generator.encoder.spec.name_or_path = str(tmp_path / "gone")  # nothing but the cache is read
    batch = AntibodyCollator(states_of=table)(rows)
    cached = generator(**batch)
    assert cached.loss.item() == pytest.approx(live.loss.item(), abs=1e-5)
    assert (cached.logits - live.logits).abs().max() < 2e-5
    others = {**batch, "antigen_index": batch["antigen_index"].roll(1)}
    assert (generator(**others).logits - live.logits).abs().max() > 0.01
    assert generator.generate(**batch, max_new_tokens=4).shape[0] == 4

"""A generator reads the stored states of every token of a frozen encoder as it reads live ones."""

import numpy as np
import pytest
import torch
from tiny_generators import ANTIGENS, TINY, make_rows
from transformers import EsmTokenizer

from hf_ext.data.antibodies import AntibodyCollator, PairEncoder
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.embeddings.dataset import StateTable
from hf_ext.embeddings.encode import fill_store
from hf_ext.embeddings.store import EmbeddingStore
from hf_ext.errors import DataError
from hf_ext.models.encoders import read_encoder
from hf_ext.models.generation.esm import state_encoder, state_key
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.models.lora import LoraSettings


@pytest.fixture
def generator(demo_encoders):
    torch.manual_seed(0)
    spec = read_encoder(demo_encoders[1], None, "frozen", LoraSettings())
    return AntibodyGenerator.from_encoder(spec, "tiny", **{**TINY, "dropout": 0.0}).eval()


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


def test_an_antigen_that_was_not_encoded_is_named(tmp_path):
    store = EmbeddingStore(tmp_path, {"encoder": "toy"})
    store.add(["AC"], [torch.ones(2, 3)])
    table = StateTable(store, ["AC"], [np.array([4, 5])])
    with pytest.raises(DataError, match="No states of 1 antigens of a batch, the first of 3 tokens"):
        table([np.array([4, 5]), np.array([4, 5, 6])])
    with pytest.raises(DataError, match="2 states of an antigen that has 4 tokens"):
        StateTable(store, ["AC"], [np.array([1, 4, 5, 2])])

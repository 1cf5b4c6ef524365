"""States of every token of a frozen encoder: what went in comes out bit for bit, and a generator reads them."""

import math

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
from hf_ext.errors import DataError, NotFiniteError
from hf_ext.models.encoders import read_encoder
from hf_ext.models.generation.esm import state_encoder, state_key
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.models.lora import LoraSettings

KEY = {"encoder": "sha256:1"}
SEQUENCES = ["MKV", "AC", "W"]


def states_of(sequences, dtype=torch.float32):
    """As many rows as residues, two wide; reproducible."""
    found = []
    for sequence in sequences:
        generator = torch.Generator().manual_seed(sum(map(ord, sequence)))
        found.append(torch.randn(len(sequence), 2, generator=generator).to(dtype))
    return found


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def fill(folder, encode=states_of, sequences=SEQUENCES, **given):
    store = EmbeddingStore(folder, KEY)
    return store, fill_store(store, sequences, encode, tokens_per_batch=4, show_progress=False, **given)


def test_states_come_back_bit_for_bit_in_any_order_and_with_repeats(tmp_path):
    fill(tmp_path)
    store = EmbeddingStore(tmp_path, KEY)
    asked = ["W", "MKV", "AC", "MKV"]
    assert same(store.gather_states(asked), states_of(asked))
    assert not same(store.gather_states(asked), states_of(asked[::-1]))
    assert [tuple(s.shape) for s in store.gather_states(asked)] == [(1, 2), (3, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_bits_on_half_the_disk(tmp_path, dtype):
    fill(tmp_path / "half", lambda sequences: states_of(sequences, dtype))
    again = EmbeddingStore(tmp_path / "half", KEY).gather_states(SEQUENCES)
    assert {states.dtype for states in again} == {torch.float32}
    assert same([states.to(dtype) for states in again], states_of(SEQUENCES, dtype))
    fill(tmp_path / "full")
    half, full = (next((tmp_path / name).rglob("rows-*")).stat().st_size for name in ("half", "full"))
    assert half < full


def test_each_distinct_sequence_is_encoded_once_and_a_second_run_encodes_none(tmp_path):
    asked = []

    def encode(sequences):
        asked.append(list(sequences))
        return states_of(sequences)

    _, report = fill(tmp_path, encode, ["AC", "MKV", "AC", "W", "MKV"])
    assert asked == [["MKV"], ["AC", "W"]]  # at most four padded tokens
    assert report.num_encoded == 3
    assert fill(tmp_path, encode)[1].num_encoded == 0
    assert len(asked) == 2


def test_batches_that_do_not_fit_are_halved(tmp_path):
    def encode(sequences):
        if len(sequences) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return states_of(sequences)

    store, _ = fill(tmp_path, encode)
    assert same(store.gather_states(SEQUENCES), states_of(SEQUENCES))


def test_an_overflow_in_half_precision_takes_float32(tmp_path):
    def encode(sequences):
        return [s.fill_(math.inf) if len(s) == 2 else s for s in states_of(sequences, torch.float16)]

    store, report = fill(tmp_path, encode, encode_exactly=states_of)
    assert report.overflowed == ["AC"]
    assert same(store.gather_states(["AC"]), states_of(["AC"]))
    assert same(store.gather_states(["MKV"]), [s.half().float() for s in states_of(["MKV"])])


def test_states_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path):
    store = EmbeddingStore(tmp_path, KEY)
    wrong = states_of(SEQUENCES)
    wrong[1][1, 0] = math.nan
    with pytest.raises(NotFiniteError, match=r"for 1 of 3 sequences: AC \(2 residues\)"):
        store.add(SEQUENCES, wrong)
    assert [path.name for path in store.folder.iterdir()] == ["key.json"]


def test_what_is_not_stored_or_has_no_shape_is_refused(tmp_path):
    store, _ = fill(tmp_path)
    with pytest.raises(KeyError):
        store.gather_states(["MKVV"])
    for sequences, states in (
        (["A"], []),
        (["A", "C"], [torch.ones(1, 2), torch.ones(1, 3)]),
        (["A"], [torch.ones(0, 2)]),
    ):
        with pytest.raises(DataError, match="Embeddings of"):
            store.add(sequences, states)
    assert store.gather_states([]) == []
    with pytest.raises(DataError, match="holds states of every token: read them with gather_states"):
        store.gather(SEQUENCES)
    with pytest.raises(DataError, match="of one width"):
        store.add(["Y"], torch.ones(1, 3))


# --- with a model -----------------------------------------------------------------------------------------------------


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
    store, _ = fill(tmp_path)
    table = StateTable(store, ["AC"], [np.array([4, 5])])
    with pytest.raises(DataError, match="No states of 1 antigens of a batch, the first of 3 tokens"):
        table([np.array([4, 5]), np.array([4, 5, 6])])
    with pytest.raises(DataError, match="2 states of an antigen that has 4 tokens"):
        StateTable(store, ["AC"], [np.array([1, 4, 5, 2])])

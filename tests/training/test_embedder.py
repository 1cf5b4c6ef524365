"""Embedding without a trainer: a model, its collator, settings; each sequence once, rows where training wants them."""

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from hf_ext.training.embedder import Embedder
from hf_ext.training.encoding import Encoding
from hf_ext.training.scaling import fit_scaling
from hf_ext.training.team import Team

INPUTS = ["heavy", "light", "antigen"]


@pytest.fixture
def args(tmp_path) -> TrainingArguments:
    return TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, report_to="none")


@pytest.fixture
def encoding(make_affinity, args) -> Encoding:
    return Encoding(*make_affinity(), args.device)


def make_embedder(args, folder, evidence=None) -> Embedder:
    settings = {"inputs": INPUTS, "cache_dir": str(folder / "cache"), "tokens_per_batch": 600}
    return Embedder(args, Team(args), settings, None if evidence is None else evidence.update)


def test_a_batch_of_an_embedded_dataset_has_the_embeddings_of_its_rows(args, encoding, demo_rows, tmp_path):
    rows = demo_rows.select(range(12))
    embedder = make_embedder(args, tmp_path)
    batch = embedder.rows(embedder.embed(rows, encoding).__getitems__([7, 2]))
    assert sorted(batch) == ["embeddings", "labels"]
    assert torch.equal(batch["labels"], torch.tensor([rows["label"][7], rows["label"][2]], dtype=torch.float32))
    for name in INPUTS:
        sequences = [rows[name][7], rows[name][2]]
        torch.testing.assert_close(batch["embeddings"][name], encoding.compute(name, sequences), rtol=0, atol=1e-5)
        assert not torch.equal(batch["embeddings"][name][0], batch["embeddings"][name][1])


def test_each_sequence_is_encoded_once_and_the_evidence_counts_them(args, encoding, demo_rows, tmp_path):
    rows, evidence = demo_rows.select(range(12)), {}
    embedder = make_embedder(args, tmp_path, evidence)
    embedded = embedder.embed(rows, encoding)
    assert embedder.embed(rows, encoding) is embedded
    distinct = len({*rows["heavy"], *rows["light"]}) + len({*rows["antigen"]})  # two encoders
    assert evidence["num_encoded"] == distinct
    assert sorted(evidence["stores"]) == sorted(INPUTS)
    assert evidence["stores"]["heavy"] == evidence["stores"]["light"] != evidence["stores"]["antigen"]
    again = {}
    make_embedder(args, tmp_path, again).embed(rows, encoding)
    assert again["num_encoded"] == 0


def test_what_somebody_overrides_is_asked(args, encoding, demo_rows, tmp_path):
    asked = []

    def encode(name, sequences):
        asked.append(name)
        return torch.full((len(sequences), 64), 3.0)

    own = Encoding(encoding.model, encoding.collator, args.device, encode_with=encode, key_with=lambda name: {"a": 1})
    embedder = make_embedder(args, tmp_path)
    batch = embedder.rows(embedder.embed(demo_rows.select(range(3)), own).__getitems__([0]))
    assert {float(values.min()) for values in batch["embeddings"].values()} == {3.0}
    assert set(asked) == set(INPUTS)
    assert len(list((tmp_path / "cache").iterdir())) == 1  # one key, one store


def test_without_a_cache_sequences_are_encoded_and_nothing_is_written(args, encoding, demo_rows, tmp_path):
    embedder = Embedder(args, Team(args))
    assert not embedder.is_on
    sequences = demo_rows["heavy"][:9]
    found = embedder.encode("heavy", sequences, encoding)
    torch.testing.assert_close(found, encoding.compute("heavy", sequences), rtol=0, atol=1e-5)
    batch = {"positions": torch.arange(3)}  # of the user's
    assert embedder.rows(batch) is batch
    assert list(batch) == ["positions"]
    assert not (tmp_path / "cache").exists()


def test_through_the_cache_come_the_numbers_that_come_without_it(args, encoding, demo_rows, tmp_path):
    sequences = demo_rows["antigen"][:9]
    cached = make_embedder(args, tmp_path).encode("antigen", sequences, encoding)
    live = Embedder(args, Team(args)).encode("antigen", sequences, encoding)
    torch.testing.assert_close(cached, live, rtol=0, atol=1e-5)


class Scaled:
    """Keeps what it is given."""

    embedding_sizes = {"protein": 1}

    def fit_scaling(self, *given):
        self.given = given


@pytest.mark.parametrize(("num_rows", "is_cached", "size"), [(5, False, 5), (300, False, 256), (300, True, 300)])
def test_scales_are_measured_on_all_labels_and_on_a_sample_of_sequences(num_rows, is_cached, size):
    rows = [{"sequence": "A" * (i + 1), "label": float(i % 2)} for i in range(num_rows)]
    model, embedded, asked = Scaled(), [], []

    def encode(name, sequences):
        asked.append((name, sequences))
        return torch.ones(len(sequences), 1)

    fit_scaling(model, rows, {"protein": ["sequence"]}, encode, 0, embedded.append if is_cached else None)
    labels = np.arange(num_rows) % 2
    assert model.given[:2] == (pytest.approx(labels.mean()), pytest.approx(labels.std()))
    assert len(model.given[2]["protein"]) == size
    ((name, sequences),) = asked
    assert (name, sequences) == ("protein", sorted(set(sequences), key=len))
    assert embedded == ([rows] if is_cached else [])


def test_of_a_stream_the_first_rows_are_measured():
    model = Scaled()
    stream = ({"sequence": "A" * (i % 7 + 1), "label": 1.0} for i in range(10_000))
    fit_scaling(model, stream, {"protein": ["sequence"]}, lambda name, found: torch.ones(len(found), 1), 0)
    assert (model.given[0], len(model.given[2]["protein"])) == (1.0, 7)
    assert sum(1 for _ in stream) == 10_000 - 2048

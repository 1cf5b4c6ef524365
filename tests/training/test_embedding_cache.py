"""Embeddings of a trainer: each sequence once, rows where training wants them, and scales measured on them."""

import pytest
import torch

from hf_ext.trainer import FastTrainer
from hf_ext.training import embedding_cache
from hf_ext.training_args import FastTrainingArguments

INPUTS = ["heavy", "light", "antigen"]


@pytest.fixture
def make(make_affinity, demo_rows, tmp_path):
    """A trainer on 12 rows, with a cache or not."""

    def make_trainer(is_cached=True, cls=FastTrainer, rows=None):
        speedups = ["embedding_cache"] if is_cached else []
        settings = {"speedups": speedups, "embedding_cache_dir": str(tmp_path / "cache"), "max_steps": 1}
        settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
        model, collator = make_affinity()
        args = FastTrainingArguments(str(tmp_path / "run"), **settings)
        return cls(model, args, collator, demo_rows.select(range(12)) if rows is None else rows)

    return make_trainer


def test_a_batch_of_an_embedded_dataset_has_the_embeddings_of_its_rows(make):
    trainer = make()
    rows = trainer.train_dataset
    embedded = trainer.embed_dataset(rows)
    assert trainer.embed_dataset(rows) is embedded
    batch = embedded.__getitems__([7, 2])
    assert sorted(batch) == ["embeddings", "labels"]
    assert torch.equal(batch["labels"], torch.tensor([rows["label"][7], rows["label"][2]], dtype=torch.float32))
    for name in INPUTS:
        expected = trainer.encode_sequences(name, [rows[name][7], rows[name][2]])
        torch.testing.assert_close(batch["embeddings"][name], expected, rtol=0, atol=1e-5)
        assert not torch.equal(expected[0], expected[1])


def test_what_somebody_overrides_is_asked(make, tmp_path):
    asked = []

    class Own(FastTrainer):
        def encode_sequences(self, name, sequences):
            asked.append(name)
            return torch.full((len(sequences), 64), 3.0)

        def embedding_key(self, name):
            return {"a": 1}

    trainer = make(cls=Own)
    batch = trainer.embed_dataset(trainer.train_dataset).__getitems__([0])
    assert {float(values.min()) for values in batch["embeddings"].values()} == {3.0}
    assert set(asked) == set(INPUTS)
    assert len(list((tmp_path / "cache").iterdir())) == 1  # one key, one store


def test_without_a_cache_come_the_same_numbers_and_nothing_is_written(make, demo_rows, tmp_path):
    sequences = demo_rows["antigen"][:9]
    live = make(is_cached=False)
    found = live.encode_distinct("antigen", sequences)
    torch.testing.assert_close(found, live.encode_sequences("antigen", sequences), rtol=0, atol=1e-5)
    assert not (tmp_path / "cache").exists()
    torch.testing.assert_close(make().encode_distinct("antigen", sequences), found, rtol=0, atol=1e-5)


class Listing(FastTrainer):
    """Keeps which sequences are encoded for scales, and what the model is given."""

    def encode_distinct(self, name, sequences):
        self.__dict__.setdefault("asked", {})[name] = list(sequences)
        return super().encode_distinct(name, sequences)

    def fit_scaling(self):
        self.model.fit_scaling = lambda *given: setattr(self, "given", given)
        super().fit_scaling()


@pytest.mark.parametrize("kind", ["cached", "live", "stream"])
def test_scales_are_measured_on_all_labels_and_on_a_sample_of_sequences(make, demo_rows, monkeypatch, kind):
    monkeypatch.setattr(embedding_cache, "LIVE_SAMPLE", 5)
    monkeypatch.setattr(embedding_cache, "SAMPLE", 9)
    rows = demo_rows.select(range(12))
    trainer = make(kind == "cached", Listing, rows.to_iterable_dataset() if kind == "stream" else rows)
    trainer.fit_scaling()
    labels = torch.tensor(rows["label"][: 9 if kind == "stream" else 12], dtype=torch.float64)
    assert trainer.given[:2] == pytest.approx((labels.mean().item(), labels.std(correction=0).item()))
    distinct = set(rows["heavy"][: 9 if kind == "stream" else 12])
    asked = trainer.asked["heavy"]
    assert len(set(asked) & distinct) == len(asked) == min(len(distinct), 9 if kind == "cached" else 5)
    assert asked == sorted(asked, key=len)
    assert {name: len(values) for name, values in trainer.given[2].items()}["heavy"] == len(asked)

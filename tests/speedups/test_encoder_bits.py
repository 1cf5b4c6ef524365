"""Frozen encoders in 8 and 4 bits: under the noise probe, kept by the model, and never mixed with float embeddings."""

import sys

import numpy as np
import pytest
import torch

from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.errors import MissingDependencyError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models.frozen_weights import quantized_layers
from hf_ext.optional import import_problem
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytest.importorskip("bitsandbytes")

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 1, "save_strategy": "no", "max_steps": 2}
EIGHT = {"load_in_8bit": True}
WIDE = {"bound": 1.0}
CACHED = {"speedups": ["embedding_cache"]}


def make_trainer(folder, model, collator, rows, hardware="cpu", bound=None, **given):
    settings = {"output_dir": str(folder), "embedding_cache_dir": str(folder.parent / "cache")}
    args = FastTrainingArguments(**{**settings, **QUIET, **given})
    plan = make_plan(args, model, rows, collator, describe_hardware(hardware))
    if bound is not None:
        plan["encoder_precision"].settings["max_noise"] = bound
    return FastTrainer(model, args, collator, rows, plan=plan)


# --- under the probe --------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_noise_is_measured_and_decides(make_affinity, demo_rows, tmp_path):
    trainer = make_trainer(tmp_path / "run", *make_affinity(), demo_rows, **EIGHT, **WIDE)
    found = trainer.plan["encoder_precision"]
    assert found.status == "applied"
    assert set(found.evidence["noise_share"]) == {"heavy", "light", "antigen"}
    assert all(0 < share < 0.2 for share in found.evidence["noise_share"].values())
    model = make_affinity()[0]
    with pytest.raises(PlanRefused, match=r"8 bit noise on '\w+' is \d+% .*: leave out --load_in_8bit"):
        make_trainer(tmp_path / "other", model, trainer.data_collator, demo_rows, bound=1e-4, **EIGHT)
    assert (model.config.encoder_bits, model.config.encoder_autocast) == (None, None)


@pytest.mark.nightly
def test_half_precision_gives_way_before_bits_do(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity()
    both = make_trainer(tmp_path / "a", model, collator, demo_rows, "cpu-amx-bf16", **EIGHT, **WIDE, speedups=["all"])
    with_half = max(both.plan["encoder_precision"].evidence["noise_share"].values())
    assert both.model.config.encoder_autocast == "bfloat16"
    alone = make_trainer(tmp_path / "b", make_affinity()[0], collator, demo_rows, **EIGHT, **WIDE)
    without = max(alone.plan["encoder_precision"].evidence["noise_share"].values())
    bound = (with_half + without) / 2
    assert without < bound < with_half
    between = make_trainer(
        tmp_path / "c", make_affinity()[0], collator, demo_rows, "cpu-amx-bf16", speedups=["all"], **EIGHT, bound=bound
    )
    found = between.plan["encoder_precision"]
    assert (found.status, found.settings["dtype"]) == ("applied", "fp32")
    assert (between.model.config.encoder_bits, between.model.config.encoder_autocast) == (8, None)


# --- embeddings and predictions ---------------------------------------------------------------------------------------


def test_the_cache_tells_bits_apart_and_gives_what_is_computed_live(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity()
    plain = make_trainer(tmp_path / "a", model, collator, demo_rows, **CACHED)
    ours = make_trainer(tmp_path / "b", make_affinity()[0], collator, demo_rows, **CACHED, **EIGHT, **WIDE)
    sequences = [*dict.fromkeys(demo_rows["antigen"])][:6]
    exact, stored = (trainer.encode_distinct("antigen", sequences) for trainer in (plain, ours))
    assert ours.embedding_key("antigen") == {**plain.embedding_key("antigen"), "bits": 8}
    assert not torch.equal(exact, stored)
    live = ours.encode_sequences("antigen", sequences)
    assert torch.allclose(live, stored, atol=1e-5)
    assert not torch.allclose(live, exact, atol=1e-5)


@pytest.fixture
def trained(make_affinity, demo_rows, tmp_path):
    """A folder of a model that was trained on embeddings of 8 bits, and what it predicted."""
    trainer = make_trainer(tmp_path / "run", *make_affinity(), demo_rows, **CACHED, **EIGHT, **WIDE)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.data_collator.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", np.asarray(trainer.predict(demo_rows.select(range(20))).predictions).reshape(-1)


@pytest.mark.nightly
def test_a_saved_model_predicts_from_the_embeddings_that_it_was_trained_on(trained, demo_rows):
    folder, expected = trained
    predictor = AffinityPredictor.from_pretrained(folder)
    assert quantized_layers(predictor.model)
    rows = demo_rows.select(range(20))
    assert np.allclose(predictor.predict(rows), expected, atol=1e-4)
    other = AffinityPredictor.from_pretrained(folder)
    other.model.config.encoder_bits = None  # as if nobody had kept it
    other.model.release_encoders()
    assert not np.allclose(other.predict(rows), expected, atol=1e-4)


@pytest.mark.nightly
def test_without_bitsandbytes_such_a_model_does_not_predict_otherwise_but_says_so(trained, monkeypatch):
    folder, _ = trained
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    import_problem.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"hf_ext\[quantization\]"):
        AffinityPredictor.from_pretrained(folder)
    monkeypatch.undo()
    import_problem.cache_clear()

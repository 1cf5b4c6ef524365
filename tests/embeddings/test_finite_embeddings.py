"""NaN and infinite embeddings are never stored: in half precision computed again, else named."""

import math

import pytest
import torch

from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.embeddings.encode import fill_store
from hf_ext.embeddings.store import EmbeddingStore
from hf_ext.errors import NotFiniteError
from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

KEY = {"encoder": "toy"}
SEQUENCES = ["MKVLA", "MKVL", "MKV", "AC", "W"]


def exact(sequences):
    return torch.tensor([[float(len(s)), 1.0] for s in sequences])


def encoder(*overflowing, value=math.nan):
    """Lengths, but `value` for some sequences."""
    return lambda sequences: torch.tensor([[value if s in overflowing else float(len(s)), 1.0] for s in sequences])


def fill(folder, encode, **given):
    store = EmbeddingStore(folder, KEY)
    return store, fill_store(store, SEQUENCES, encode, tokens_per_batch=10, show_progress=False, **given)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sequence_that_overflows_is_encoded_in_float32_and_counted(tmp_path, value, caplog):
    asked = []

    def exactly(sequences):
        asked.append(list(sequences))
        return exact(sequences)

    store, report = fill(tmp_path, encoder("MKVL", "W", value=value), encode_exactly=exactly)
    assert asked == [["MKVL"], ["W"]]
    assert report.overflowed == ["MKVL", "W"]
    assert torch.equal(store.gather(SEQUENCES), exact(SEQUENCES))
    assert (
        "2 of 5 sequences overflow in half precision and were encoded in float32: MKVL (4 residues), W" in caplog.text
    )


@pytest.mark.parametrize("exactly", [None, encoder("AC")])
def test_a_sequence_that_is_not_finite_in_float32_either_is_named_and_nothing_is_stored(tmp_path, exactly):
    with pytest.raises(NotFiniteError, match=r"in float32 are NaN or infinite for 1 of 1 sequences: AC \(2 residues\)"):
        fill(tmp_path, encoder("AC"), encode_exactly=exactly)
    assert len(EmbeddingStore(tmp_path, KEY)) == 0


def test_the_store_refuses_what_is_not_finite_and_writes_nothing(tmp_path):
    store = EmbeddingStore(tmp_path, KEY)
    with pytest.raises(NotFiniteError, match=r"for 1 of 2 sequences: A{40}\.\.\. \(50 residues\)"):
        store.add(["W", "A" * 50], torch.tensor([[1.0, 2.0], [1.0, math.nan]]))
    assert [path.name for path in store.folder.iterdir()] == ["key.json"]


# --- with a model -----------------------------------------------------------------------------------------------------


def overflow_on(model, ids):
    """Lets encoders overflow in float16, and only there, on one input: a step through 1e5 and back."""

    def hook(module, args, kwargs, output):
        states = output.last_hidden_state
        if kwargs["input_ids"].shape[1] < ids.shape[1]:
            return
        here = (kwargs["input_ids"][:, : ids.shape[1]] == ids).all(1)[:, None, None]
        output["last_hidden_state"] = torch.where(here, states * 1e5 / 1e5, states)

    model.transform_encoders(lambda encoder: encoder.register_forward_hook(hook, with_kwargs=True))


def train(model, collator, rows, folder):
    args = FastTrainingArguments(
        **{"output_dir": str(folder), "embedding_cache_dir": str(folder / "cache"), "use_cpu": True, "max_steps": 2},
        **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_encoder_noise": 1.0},
        speedups=["encoder_precision", "embedding_cache"],
    )
    plan = make_plan(args, model, rows, collator, describe_hardware("T4"))
    trainer = FastTrainer(model, args, collator, rows, plan=plan)
    trainer.train()
    return trainer


def test_a_run_in_float16_encodes_the_one_sequence_that_overflows_in_float32(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity()
    rows = demo_rows.select(range(64))
    sequence = rows["heavy"][37]
    overflow_on(model, collator.encode("heavy", [sequence])["input_ids"])
    reference = model.encode("heavy", collator.encode("heavy", [sequence]))
    trainer = train(model, collator, rows, tmp_path)
    assert trainer.plan["encoder_precision"].settings == {"dtype": "fp16", "mode": "weights", "max_noise": 1.0}
    assert trainer.plan["embedding_cache"].evidence["encoded_in_float32"] == 1
    found = trainer.encode_distinct("heavy", [sequence, rows["heavy"][3]])
    assert torch.isfinite(found).all()
    assert (found[:1] - reference).norm() / reference.norm() < 0.01
    model.attach_encoders()
    assert {p.dtype for p in model.encoders.parameters()} == {torch.float16}
    assert not model.encode("heavy", collator.encode("heavy", [sequence])).isfinite().all()  # the live twin overflows
    row = {name: rows[name][37] for name in ("heavy", "light", "antigen")}
    assert math.isfinite(AffinityPredictor(model, collator).predict([row])[0])
    trainer.end()


def test_a_second_tower_that_overflows_keeps_the_encoders_in_float32(make_affinity, demo_rows, tmp_path):
    model, collator = make_affinity()
    rows = demo_rows.select(range(64))

    def hook(module, args, kwargs, output):
        if module.config.model_type == "esm":  # the antigen tower, which comes last
            output["last_hidden_state"] = output.last_hidden_state * 1e5 / 1e5

    model.transform_encoders(lambda encoder: encoder.register_forward_hook(hook, with_kwargs=True))
    trainer = train(model, collator, rows, tmp_path)
    decision = trainer.plan["encoder_precision"]
    assert decision.status == "skipped"
    assert decision.reason == "in fp16 'antigen' has embeddings that are NaN or infinite"
    assert decision.evidence["noise_share"]["antigen"] == "not finite"
    assert decision.evidence["noise_share"]["heavy"] < 0.05
    assert model.config.encoder_dtype == "float32"
    trainer.end()

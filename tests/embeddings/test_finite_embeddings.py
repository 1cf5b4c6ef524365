"""A run in half precision computes embeddings that overflow in float32, and skips precisions that do not fit."""

import math

import torch

from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


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
        **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True},
        speedups=["encoder_precision", "embedding_cache"],
    )
    plan = make_plan(args, model, rows, collator, describe_hardware("T4"))
    plan["encoder_precision"].settings["max_noise"] = 1.0
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

"""A run on a card keeps what was predicted of its memory, and what it took. The card is one that the plan describes."""

import json

import torch
from miniature_esm import make_esm
from tiny_masked_lm import make_args, make_rows, make_trainer
from token_rows import pad_rows
from transformers import EsmForTokenClassification

from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan

SETTINGS = {"speedups": ["fused_gelu", "masked_lm_head"], "max_steps": 2}


def train(folder, model=None, rows=None, card="T4", **given):
    """A trainer after its run, and what `plan.json` holds of memory."""
    given = {**SETTINGS, **given}
    model, rows = model or make_esm(), rows or make_rows()
    plan = make_plan(make_args(folder, **given), model, rows, pad_rows, describe_hardware(card))
    trainer = make_trainer(folder, model, rows, plan, **given)
    trainer.train()
    return trainer, json.loads((folder / "plan.json").read_text())["facts"].get("memory")


def test_a_run_keeps_the_prediction_and_what_was_measured_and_no_number_changes(tmp_path):
    runs = [train(tmp_path / card, make_esm(hidden_dropout_prob=0.1), card=card) for card in ("T4", "cpu")]
    (watched, memory), (plain, nothing) = runs
    # 4 rows of at most 40 tokens, 2 layers: far below what one such model with its gradients could not exceed.
    assert memory["rows"] == 4
    assert memory["tokens_per_row"] <= 40
    assert memory["lines"]["weights"] < memory["predicted_peak_bytes"] < 8 * 2**20
    assert memory["measured_peak_bytes"] > 0
    assert nothing is None  # on a CPU the doctor has it
    assert all(torch.equal(a, b) for a, b in zip(watched.model.parameters(), plain.model.parameters(), strict=True))


def test_the_longest_rows_are_what_is_predicted(tmp_path):
    short, long = (train(tmp_path / str(n), rows=[{"input_ids": [5] * n, "labels": [5] * n}] * 8)[1] for n in (8, 32))
    assert (short["tokens_per_row"], long["tokens_per_row"]) == (8, 32)
    assert 3 < long["lines"]["activations"] / short["lines"]["activations"] < 6


def test_of_a_model_of_another_kind_one_batch_is_predicted(tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [0, 1, 0, 1]}] * 8
    _, memory = train(tmp_path, make_esm(EsmForTokenClassification), rows, speedups=["fused_gelu"])
    assert (memory["rows"], memory["tokens_per_row"], memory["largest_rows"]) == (4, 4, None)
    assert memory["predicted_peak_bytes"] > memory["lines"]["weights"]


def test_a_model_that_reads_values_trains_without_a_prediction(tmp_path):
    model = make_esm()
    forward = model.forward

    def reads(*args, **kwargs):
        found = forward(*args, **kwargs)
        assert float(found.logits.abs().sum()) >= 0  # a fake tensor has no value
        return found

    model.forward = reads
    trainer, memory = train(tmp_path, model, speedups=["fused_gelu"], remove_unused_columns=False)
    assert (trainer.state.global_step, memory) == (2, None)

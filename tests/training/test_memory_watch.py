"""A run keeps what was predicted of its memory, and what it took."""

import json

import torch
from miniature_esm import make_esm
from tiny_masked_lm import make_trainer
from transformers import EsmForTokenClassification

from hf_ext.training.memory import MemoryWatch

SETTINGS = {"speedups": ["fused_gelu", "masked_lm_head"], "max_steps": 2}


def kept(folder):
    return json.loads((folder / "plan.json").read_text())["facts"].get("memory")


def watched(folder, **settings):
    trainer = make_trainer(folder, **{**SETTINGS, **settings})
    trainer.add_callback(MemoryWatch(trainer.args, trainer._ext_planned, everywhere=True))
    trainer.train()
    return trainer


def test_a_run_keeps_the_prediction_and_what_was_measured(tmp_path):
    watched(tmp_path)
    memory = kept(tmp_path)
    # 4 rows of at most 40 tokens, 32 wide, 2 layers: far below what one such model with its gradients could not exceed.
    assert memory["rows"] == 4
    assert memory["tokens_per_row"] <= 40
    assert memory["lines"]["weights"] < memory["predicted_peak_bytes"] < 8 * 2**20
    assert memory["measured_peak_bytes"] >= 0


def test_the_longest_rows_are_what_is_predicted(tmp_path):
    class Rows(torch.utils.data.Dataset):
        def __init__(self, lengths):
            self.lengths = lengths

        def __len__(self):
            return len(self.lengths)

        def __getitem__(self, index):
            ids = [5] * self.lengths[index]
            return {"input_ids": ids, "labels": ids}

    watched(tmp_path / "short", rows=Rows([8] * 8))
    watched(tmp_path / "long", rows=Rows([32] * 8))
    short, long = (kept(tmp_path / name) for name in ("short", "long"))
    assert (short["tokens_per_row"], long["tokens_per_row"]) == (8, 32)
    assert 3 < long["lines"]["activations"] / short["lines"]["activations"] < 5


def test_of_a_model_of_another_kind_one_batch_is_predicted(tmp_path):
    model = make_esm(EsmForTokenClassification)
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [0, 1, 0, 1]}] * 8
    watched(tmp_path, model=model, rows=rows, speedups=["tf32", "fused_gelu"])
    memory = kept(tmp_path)
    assert (memory["rows"], memory["tokens_per_row"], memory["largest_rows"]) == (4, 4, None)
    assert memory["predicted_peak_bytes"] > memory["lines"]["weights"]


def test_on_a_cpu_a_run_predicts_nothing(tmp_path):
    make_trainer(tmp_path, **SETTINGS).train()
    assert kept(tmp_path) is None


def test_a_prediction_changes_no_number(tmp_path):
    dropout = {"hidden_dropout_prob": 0.1}
    trained = [run(tmp_path / name, model=make_esm(**dropout)) for name, run in {"a": watched, "b": plain}.items()]
    first, second = ([*trainer.model.parameters()] for trainer in trained)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def plain(folder, **settings):
    trainer = make_trainer(folder, **{**SETTINGS, **settings})
    trainer.train()
    return trainer


def test_a_model_that_reads_values_trains_without_a_prediction(tmp_path):
    model = make_esm()
    forward = model.forward

    def reads(*args, **kwargs):
        found = forward(*args, **kwargs)
        assert float(found.logits.abs().sum()) >= 0  # a fake tensor has no value
        return found

    model.forward = reads
    trainer = make_trainer(tmp_path, model=model, max_steps=1, speedups=["tf32"], remove_unused_columns=False)
    watch = MemoryWatch(trainer.args, trainer._ext_planned, everywhere=True)
    trainer.add_callback(watch)
    trainer.train()
    assert watch.report is None

"""torch's GELU in ESM's feed-forward layers: fewer operations, in encoders that come later too, and undone."""

import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_rows, make_trainer
from token_rows import pad_rows
from transformers.models.esm.modeling_esm import EsmIntermediate

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


def count_operations(model) -> tuple[int, int]:
    with torch.profiler.profile() as profile, torch.no_grad():
        model.cpu().eval()(**pad_rows(make_rows(4)))
    calls = {event.key: event.count for event in profile.key_averages()}
    return calls.get("aten::erf", 0), calls.get("aten::gelu", 0)


def test_fewer_operations_run_and_those_of_before_come_back(tmp_path):
    model = make_wide_esm()
    stock = count_operations(model)
    trainer = make_trainer(tmp_path, model, speedups=["fused_gelu"])
    assert count_operations(model) == (stock[0] - 2, stock[1] + 2)  # a layer each; the head's own stays
    trainer.end()
    assert count_operations(model) == stock


def test_encoders_that_are_loaded_later_are_fused_while_a_trainer_lives(tmp_path, make_affinity):
    model, collator = make_affinity()
    args = FastTrainingArguments(str(tmp_path), speedups=["fused_gelu"], use_cpu=True, report_to="none")

    def fused():
        model.attach_encoders()
        found = ["forward" in vars(m) for m in model.modules() if isinstance(m, EsmIntermediate)]
        model.release_encoders()
        return found

    for _ in range(2):
        trainer = FastTrainer(model, args, data_collator=collator)
        assert trainer.plan.applied("fused_gelu")
        assert fused() == [True, True]
        trainer.end()
        assert fused() == [False, False]

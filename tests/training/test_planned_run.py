"""The plan of a trainer: what it leaves as it was, what `plan.json` says, and what a full disk costs."""

import errno
import json
import logging
from pathlib import Path

import pytest
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args, make_rows, make_trainer
from token_rows import pad_rows
from transformers import TrainerCallback

from hf_ext.errors import PlanRefused
from hf_ext.plan import Plan
from hf_ext.trainer import FastTrainer


def test_arguments_are_copied_where_a_speedup_is_applied_and_the_callers_own_otherwise(tmp_path):
    for given, is_own in (({}, True), ({"speedups": ["fused_gelu"]}, False)):
        args = make_args(tmp_path / str(is_own), **given)
        trainer = FastTrainer(make_wide_esm(), args, pad_rows, make_rows())
        assert (trainer.args is args) == is_own
        assert trainer.keeps_records != is_own
        assert (tmp_path / str(is_own) / "plan.json").exists() != is_own


def test_a_refusal_is_raised_before_anything_is_carried_out(tmp_path):
    with pytest.raises(PlanRefused, match="batch_size"):
        make_trainer(tmp_path / "run", effective_batch_size=9)
    assert not (tmp_path / "run").exists()


class Raises(TrainerCallback):
    def on_init_end(self, *args, **kwargs):
        raise TypeError("not built")


def test_what_a_plan_changed_is_as_before_where_the_trainer_cannot_be_built(tmp_path):
    model = make_wide_esm()
    forward = model.esm.encoder.layer[0].intermediate.forward
    make_trainer(tmp_path, model=model, speedups=["fused_gelu"])
    assert model.esm.encoder.layer[0].intermediate.forward != forward  # the twin
    model = make_wide_esm()
    forward = model.esm.encoder.layer[0].intermediate.forward
    with pytest.raises(TypeError, match="not built"):
        make_trainer(tmp_path, model=model, speedups=["fused_gelu"], callbacks=[Raises()])
    assert model.esm.encoder.layer[0].intermediate.forward == forward


def test_what_training_measures_is_in_plan_json_when_it_ends_and_not_when_it_breaks_off(tmp_path):
    for folder, breaks in ((tmp_path / "whole", False), (tmp_path / "broken", True)):
        trainer = make_trainer(folder, speedups=["fused_gelu"])
        trainer._ext_planned.run.measure_training("fused_gelu", lambda: lambda: {"measured": 3})
        if breaks:
            trainer.add_callback(type("Ends", (TrainerCallback,), {"on_step_end": lambda *_, **__: 1 / 0}))
            with pytest.raises(ZeroDivisionError):
                trainer.train()
        else:
            trainer.train()
        decisions = json.loads((folder / "plan.json").read_text())["decisions"]
        (evidence,) = [d["evidence"] for d in decisions if d["name"] == "fused_gelu"]
        assert ("measured" in evidence) != breaks


@pytest.mark.parametrize(("number", "is_raised"), [(errno.ENOSPC, False), (errno.EISDIR, True)])
def test_a_full_disk_is_said_and_costs_nothing_else_and_other_errors_are_raised(
    tmp_path, monkeypatch, caplog, number, is_raised
):
    def refuse(self, folder):
        raise OSError(number, "refused", str(Path(folder)))

    monkeypatch.setattr(Plan, "save", refuse)
    with caplog.at_level(logging.ERROR):
        if is_raised:
            with pytest.raises(OSError, match="refused"):
                make_trainer(tmp_path, speedups=["fused_gelu"])
        else:
            make_trainer(tmp_path, speedups=["fused_gelu"])
    assert ("plan.json was not written: " in caplog.text) != is_raised

"""Trainers that live side by side: what one sets for the process, or in a configuration both share, the other keeps."""

import gc

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_trainer
from transformers import TrainerCallback

from hf_ext.speedups import cpu_threads


@pytest.fixture
def process(torch_settings, monkeypatch):
    """What runs set here for the process: two threads, and oneDNN's products, whatever they are worth."""
    gc.collect()  # trainers of tests before
    for name in cpu_threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hf_ext.plan.count_cpu_cores", lambda: 2)
    monkeypatch.setattr("hf_ext.speedups.precision.MAX_ERROR", 1.0)
    monkeypatch.setattr("hf_ext.speedups.precision.is_amd_cpu", lambda: True)
    return lambda: (torch.get_num_threads(), torch_settings()["matmul"].on_cpu)


def make_run(folder, **given):
    return make_trainer(folder, speedups=["cpu_threads", "cpu_matmul"], **given)


# --- settings of the process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_out", "way"), [(0, "end"), (1, "close")])
def test_two_trainers_may_end_in_any_order(process, tmp_path, first_out, way):
    before = process()
    trainers = [make_run(tmp_path / name) for name in "ab"]
    assert process() == (2, "bf16") != before
    assert [trainer.plan["cpu_matmul"].status for trainer in trainers] == ["applied"] * 2
    getattr(trainers.pop(first_out), way)()
    assert process() == (2, "bf16")
    trainers[0].train()
    trainers[0].end()
    assert process() == before


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyError("a callback of the user's")


@pytest.mark.parametrize("trains", [True, False])
def test_a_trainer_that_nobody_ends_lets_go_of_the_process_when_it_goes(process, tmp_path, trains):
    before = process()
    trainer = make_run(tmp_path, callbacks=[Fails()])
    if trains:
        with pytest.raises(KeyError, match="a callback of the user's"):
            trainer.train()
    assert process() == (2, "bf16")
    del trainer
    gc.collect()
    assert process() == before


@pytest.mark.nightly
@pytest.mark.parametrize("is_alive", [True, False])
def test_a_second_trainer_of_a_model_whose_first_nobody_ended(tmp_path, is_alive):
    fast = {"speedups": ["packing", "attention"]}
    model, twin = make_wide_esm(), make_wide_esm()
    first = make_trainer(tmp_path / "first", model, **fast)
    if not is_alive:
        del first
        gc.collect()
    second = make_trainer(tmp_path / "second", model, **fast)
    assert [second.plan[name].status for name in ("attention", "packing")] == ["applied", "applied"]
    second.train()
    second.end()
    make_trainer(tmp_path / "twin", twin).train()
    assert largest_weight_difference(model, twin) < 1e-5

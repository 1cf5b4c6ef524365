"""Trainers that live side by side: what one sets for the process, or in a configuration both share, the other keeps."""

import gc

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import pad_rows
from torch.func import functional_call, grad
from transformers import EsmForMaskedLM, TrainerCallback

from hf_ext.speedups import cpu_threads
from hf_ext.trainer import FastTrainer


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("way", ["end", "close"])
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


# --- a configuration that models share --------------------------------------------------------------------------------


def make_pair():
    """Two models of one configuration object."""
    config = make_wide_esm().config
    torch.manual_seed(0)
    return EsmForMaskedLM(config), EsmForMaskedLM(config)


@pytest.mark.nightly
@pytest.mark.parametrize("first_out", [0, 1])
def test_models_of_one_configuration_train_on_when_the_other_has_ended(tmp_path, first_out):
    models = make_pair()
    twin = make_wide_esm()
    twin.load_state_dict(models[1 - first_out].state_dict())
    fast = {"speedups": ["packing", "attention"]}
    trainers = [make_trainer(tmp_path / str(i), model, **fast) for i, model in enumerate(models)]
    kernel = models[0].config._attn_implementation
    assert kernel.startswith("hf_ext")
    trainers.pop(first_out).end()
    assert models[0].config._attn_implementation == kernel
    trainers[0].train()
    trainers[0].end()
    assert models[0].config._attn_implementation == "sdpa"
    make_trainer(tmp_path / "twin", twin).train()
    assert largest_weight_difference(models[1 - first_out], twin) < 1e-5


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


class WithFunctions(FastTrainer):
    """A loss with a gradient of `torch.func` in it, of the head alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def of_bias(bias):
            return functional_call(model, {**weights, "lm_head.bias": bias}, (), inputs)["logits"].pow(2).mean()

        size = grad(of_bias)(weights["lm_head.bias"]).norm()
        loss = model(**inputs)["loss"] + 0.0 * size
        return (loss, {}) if return_outputs else loss


def test_gradients_of_torch_func_inside_a_loss(tmp_path):
    trainer = WithFunctions(
        make_wide_esm(), make_args(tmp_path, speedups=["packing"], attention="blocked"), pad_rows, make_rows()
    )
    trainer.train()
    assert trainer.plan["packing"].status == "applied"
    trainer.end()


def test_in_float64_the_kernel_for_cpus_changes_nothing(tmp_path):
    stock = make_trainer(tmp_path / "stock", make_wide_esm().double())
    stock.train()
    fast = make_trainer(tmp_path / "fast", make_wide_esm().double(), speedups=["packing"], attention="blocked")
    fast.train()
    fast.end()
    assert largest_weight_difference(stock.model, fast.model) < 1e-12

"""Under a loss scale: steps left out while it is sought are normal; gradients that stay NaN end the run."""

import math
import re

import pytest
import torch
from accelerate import Accelerator
from faulty_runs import NUM_STEPS, Maker, bits, make_rows, messages
from miniature_esm import make_narrow_esm

from hf_ext.errors import NotFiniteError

START = 65536.0


def spoil_gradients(model, rows):
    """Makes every gradient behind the embeddings NaN in batches that hold one of `rows`; the loss stays finite."""
    ids = torch.tensor(make_rows()["input_ids"])[rows]

    def hook(module, inputs, output):
        if (inputs[0][:, None] == ids).all(-1).any() and output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.nan)

    model.esm.embeddings.word_embeddings.register_forward_hook(hook)


def round_to_half(model, factor=1.0):
    """The head's output goes through float16, so that its gradient, times the scale and `factor`, may overflow."""
    model.classifier.register_forward_hook(lambda module, inputs, output: (output * factor).half().float() / factor)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A trainer that scales its loss on the CPU, set up as accelerate does it for fp16 on a GPU."""
    monkeypatch.setattr(Accelerator, "mixed_precision", property(lambda self: "fp16"))

    def scaled(change=lambda model: None, scale=START, **given):
        model = make_narrow_esm()
        change(model)
        given = {"max_steps": 60, "save_strategy": "no", "lr_scheduler_type": "constant", **given}
        trainer = maker(tmp_path, model=model, **given)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.accelerator.native_amp = True  # gradients are unscaled before they are clipped
        return trainer

    maker = Maker(None)
    scaled.watch = lambda: maker.watch
    return scaled


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_gradients_that_stay_nan_end_the_run_with_the_weights_untouched_and_the_rows_named(optim, policy, make):
    trainer = make(lambda model: spoil_gradients(model, range(12)), optim=optim, nan_policy=policy)
    before = bits(trainer.model)
    with pytest.raises(NotFiniteError) as end:
        trainer.train()
    assert end.value.exit_code == 65
    assert trainer.state.global_step == 16  # at 2^16, 2^15, ... 2^1 a step was left out; at 2^0 it is the gradients
    assert bits(trainer.model) == before
    message = str(end.value)
    assert re.search(r"in step 17: loss \d\.\d+, gradient norm nan; rows \d+, \d+ of the training data", message)
    assert "that is 1 by now" in message


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_the_search_for_a_scale_ends_no_run(policy, make):
    trainer = make(lambda model: round_to_half(model, 2.0**-9), nan_policy=policy, max_steps=20)
    trainer.train()
    assert trainer.state.global_step == 20
    weights = make.watch().weights
    taken = [step for step in range(1, 21) if weights[step] != weights[step - 1]]
    assert taken[0] > 8  # the steps before were left out
    assert len(taken) > 8
    assert trainer.accelerator.scaler.get_scale() == START / 2 ** (20 - len(taken))


def test_a_row_with_nan_gradients_now_and_then_ends_the_run_too_before_the_scale_is_gone(make):
    trainer = make(lambda model: spoil_gradients(model, [7]), max_steps=200, nan_policy="skip")
    with messages() as said, pytest.raises(NotFiniteError) as end:
        trainer.train()
    assert trainer.state.global_step == pytest.approx(17 * NUM_STEPS, abs=NUM_STEPS)  # once an epoch
    left_out = [text for text in said if text.startswith("Left out by the loss scale")]
    assert len(left_out) == 16
    assert all(re.search(r"rows (7, \d+|\d+, 7) of the training data", text) for text in left_out)
    assert re.search(r"rows (7, \d+|\d+, 7) of the training data", str(end.value))
    assert trainer.accelerator.scaler.get_scale() == 1.0

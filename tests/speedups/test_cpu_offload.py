"""The optimizer in host memory: decided for ours and FSDP2's files; ours equals the card's in any run, and resumes.

Plans are made for a described card and carried out on the CPU, where host and device are two places in one memory and
numbers are equal to the bit; two tests need a real card.
"""

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import pad_rows

from hf_ext.errors import ArgumentError
from hf_ext.hardware import describe_hardware
from hf_ext.models import find_host_optimizer
from hf_ext.plan import make_plan

A100 = describe_hardware("A100")
OFFLOAD = {"optim": "adamw_torch_fused", "speedups": "cpu_offload"}
BOTH = ["muon", "cpu_offload"]


def make_member(folder, model=None, hardware=A100, **given):
    """A trainer of a pair that differs in nothing but where its optimizer steps."""
    given = {**OFFLOAD, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05, **given}
    model = make_wide_esm() if model is None else model
    plan = make_plan(make_args(folder, **given), model, make_rows(), pad_rows, hardware=hardware)
    return make_trainer(folder, model, plan=plan, **given)


KINDS = {
    "adamw": ({}, []),
    "accumulation": ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, []),
    "muon": ({"speedups": BOTH}, ["muon"]),
    "adafactor": ({"optim": "adafactor"}, []),
    "rates": ({"encoder_learning_rate": 1e-4}, []),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_steps_are_on_the_host_equals_the_cards(tmp_path, kind):
    given, without = KINDS[kind]
    plain = make_member(tmp_path / "plain", **{**given, "speedups": without})
    ours = make_member(tmp_path / "ours", **given)
    broken = make_member(tmp_path / "broken", **given, max_grad_norm=0.0)  # as if the host saw gradients too early
    for trainer in (plain, ours, broken):
        trainer.train()
    assert find_host_optimizer(plain.optimizer) is None  # off means untouched
    assert find_host_optimizer(ours.optimizer) is not None
    assert largest_weight_difference(plain.model, ours.model) == 0.0
    assert largest_weight_difference(plain.model, broken.model) > 1e-5 or kind == "adafactor"  # which clips by itself
    assert [log.get("loss") for log in plain.state.log_history] == [log.get("loss") for log in ours.state.log_history]


@pytest.mark.nightly
@pytest.mark.parametrize("given", [{}, {"speedups": BOTH}], ids=["adamw", "muon"])
def test_a_run_goes_on_bit_for_bit_with_the_offload_and_without(tmp_path, given):
    whole = make_member(tmp_path / "whole", save_strategy="steps", save_steps=2, **given)
    whole.train()
    without = [word for word in given.get("speedups", []) if word != "cpu_offload"]
    for folder, speedups in (("host", given.get("speedups", "cpu_offload")), ("card", without)):
        resumed = make_member(tmp_path / folder, seed=3, speedups=speedups)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        assert (find_host_optimizer(resumed.optimizer) is None) == (folder == "card")
        assert resumed.state.global_step == 4
        assert largest_weight_difference(whole.model, resumed.model) == 0.0


def test_an_optimizer_of_the_callers_own_steps_on_the_host_and_a_foreign_one_is_refused(tmp_path):
    trainer = make_member(tmp_path)
    trainer.optimizer = own = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train()
    assert find_host_optimizer(trainer.optimizer).wrapped is own
    trainer.optimizer = type("Lion8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim"})(own.param_groups)
    with pytest.raises(ArgumentError, match=r"Lion8bit \(bitsandbytes\)"):
        trainer.train()


@pytest.mark.gpu
@pytest.mark.parametrize("speedups", ["cpu_offload", BOTH])
def test_on_a_card_a_run_learns_what_it_learns_with_its_states_there(tmp_path, speedups):
    given = {"use_cpu": False, "max_steps": 10}
    plain = make_member(tmp_path / "plain", **given, speedups=[w for w in speedups if w == "muon"])
    ours = make_member(tmp_path / "ours", **given, speedups=speedups)
    for trainer in (plain, ours):
        trainer.train()
    pairs = zip(plain.state.log_history[:10], ours.state.log_history[:10], strict=True)
    assert all(abs(one["loss"] - other["loss"]) < 1e-2 for one, other in pairs)
    assert {p.device.type for p in ours.model.parameters()} == {"cuda"}
    states = find_host_optimizer(ours.optimizer).state.values()
    assert {value.device.type for values in states for value in values.values()} == {"cpu"}

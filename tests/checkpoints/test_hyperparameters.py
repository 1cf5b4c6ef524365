"""An allowed change takes effect although the states of the checkpoint bring the old values back."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import ExponentialLR
from transformers import get_scheduler

from hf_ext.checkpoints.agreement.hyperparameters import apply_changes, read_hyperparameters
from hf_ext.errors import CheckpointError

SCHEDULES = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
}
STEPS = 3


def build(rate=1e-3, decay=0.1, schedule="linear", max_steps=10, betas=(0.9, 0.999), eps=1e-8, head_rate=None):
    """AdamW as Trainer makes it, with a group without decay, and a schedule with two steps of warm-up."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": parameters[:1], "weight_decay": decay}, {"params": parameters[1:], "weight_decay": 0.0}]
    if head_rate is not None:
        groups[1]["lr"] = head_rate
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps)
    kwargs = {"scheduler_specific_kwargs": SCHEDULES[schedule]} if SCHEDULES.get(schedule) else {}
    if schedule == "exponential":
        return optimizer, ExponentialLR(optimizer, 0.5)
    return optimizer, get_scheduler(schedule, optimizer, num_warmup_steps=2, num_training_steps=max_steps, **kwargs)


def run(optimizer, scheduler, steps=STEPS):
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones(2)
        optimizer.step()
        scheduler.step(*([0.0] if scheduler.__class__.__name__ == "ReduceLROnPlateau" else []))
    return optimizer, scheduler


def resume(saved, live, allowed, skip_schedule=False):
    """What a resumed run does: `saved` is the checkpoint's pair, `live` the pair that the new arguments made."""
    optimizer, scheduler = live
    made = read_hyperparameters(optimizer)
    optimizer.load_state_dict(copy.deepcopy(saved[0].state_dict()))
    if not skip_schedule:
        scheduler.load_state_dict(copy.deepcopy(saved[1].state_dict()))
    apply_changes(optimizer, scheduler, made, allowed)
    return optimizer, scheduler


def settings(optimizer) -> list[dict]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("schedule", [*SCHEDULES, "reduce_lr_on_plateau", "exponential"])
def test_nothing_allowed_changes_nothing(schedule):
    saved = run(*build(schedule=schedule))
    optimizer, scheduler = resume(saved, build(rate=5e-4, decay=0.3, schedule=schedule), ())
    assert settings(optimizer) == settings(saved[0])
    assert scheduler.state_dict() == saved[1].state_dict()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_new_learning_rate_goes_on_where_the_schedule_stands(schedule):
    saved = run(*build(schedule=schedule))
    resumed = resume(saved, build(rate=5e-4, schedule=schedule), {"learning_rate"})
    whole = run(*build(rate=5e-4, schedule=schedule))  # what the schedule would be, had it begun with that rate
    for _ in range(3):
        assert settings(resumed[0]) == settings(whole[0])
        assert resumed[1].get_last_lr() == whole[1].get_last_lr()
        assert resumed[0].param_groups[0]["lr"] != saved[0].param_groups[0]["lr"]
        run(*resumed, 1), run(*whole, 1)


def test_each_group_keeps_its_own_learning_rate():
    saved = run(*build(head_rate=1e-2))
    resumed = resume(saved, build(rate=5e-4, head_rate=1e-2), {"encoder_learning_rate"})
    assert [group["initial_lr"] for group in resumed[0].param_groups] == [5e-4, 1e-2]
    assert settings(resumed[0]) == settings(run(*build(rate=5e-4, head_rate=1e-2))[0])


def test_weight_decay_betas_and_epsilon_change_only_where_the_arguments_say_so():
    saved = run(*build())
    live = build(rate=5e-4, decay=0.3, betas=(0.8, 0.99), eps=1e-6)
    optimizer, _ = resume(saved, live, {"weight_decay", "adam_beta1", "adam_epsilon"})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.99)}
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in saved[0].param_groups]


def test_other_optimizer_arguments_take_effect():
    optimizer, _ = build()
    live, scheduler = build()
    live.param_groups[0]["amsgrad"] = True
    resumed, _ = resume((optimizer, scheduler), (live, scheduler), {"optim_args"})
    assert resumed.param_groups[0]["amsgrad"] is True


def test_more_steps_stretch_the_schedule_at_once():
    saved = run(*build(max_steps=10))
    resumed = resume(saved, build(max_steps=20), {"max_steps"})
    assert settings(resumed[0]) == settings(run(*build(max_steps=20))[0])
    assert resumed[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 17 / 18)  # 17 of the 18 steps after warm-up left


def test_a_schedule_that_follows_a_metric_starts_again_from_a_new_rate():
    saved = run(*build(schedule="reduce_lr_on_plateau"))
    saved[0].param_groups[0]["lr"] = 1e-4  # reduced since
    resumed = resume(saved, build(rate=5e-4, schedule="reduce_lr_on_plateau"), {"learning_rate"})
    assert [group["lr"] for group in resumed[0].param_groups] == [5e-4, 5e-4]
    unchanged = resume(saved, build(schedule="reduce_lr_on_plateau"), {"max_steps"})
    assert unchanged[0].param_groups[0]["lr"] == 1e-4


def test_a_schedule_of_torch_keeps_its_progress():
    saved = run(*build(schedule="exponential"))
    resumed = resume(saved, build(rate=5e-4, schedule="exponential"), {"learning_rate"})
    assert [group["lr"] for group in resumed[0].param_groups] == pytest.approx([5e-4 / 8, 5e-4 / 8])
    assert run(*resumed, 1)[0].param_groups[0]["lr"] == pytest.approx(5e-4 / 16)


def test_rates_that_are_tensors_stay_tensors():
    saved = run(*build(schedule="constant"))
    for group in saved[0].param_groups:
        group["lr"] = torch.tensor(1e-3)
    resumed = resume(saved, build(rate=0.5, schedule="constant"), {"learning_rate"})
    assert torch.equal(resumed[0].param_groups[0]["lr"], torch.tensor(0.5))


def test_wrappers_of_accelerate_are_looked_through():
    saved, live = run(*build()), build(rate=5e-4)
    accelerator = Accelerator(cpu=True)
    optimizer, scheduler = accelerator.prepare(*live)
    resume(saved, (optimizer, scheduler), {"learning_rate"})
    assert settings(live[0]) == settings(run(*build(rate=5e-4))[0])


def test_other_parameter_groups_are_refused():
    saved = run(*build())
    with pytest.raises(CheckpointError, match="2 parameter groups, this run made 1"):
        apply_changes(*saved, read_hyperparameters(saved[0])[:1], {"learning_rate"})


def test_without_applying_the_new_rate_would_be_lost():
    saved = run(*build())
    optimizer, scheduler = build(rate=5e-4)
    optimizer.load_state_dict(saved[0].state_dict())
    scheduler.load_state_dict(saved[1].state_dict())
    assert settings(run(optimizer, scheduler, 1)[0]) != settings(run(*build(rate=5e-4), STEPS + 1)[0])

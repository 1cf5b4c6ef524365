"""`--torch_profiler`: a trace and a table of a few steps, which change no number and stand in no rate."""

from __future__ import annotations

import gzip
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from small_runs import make_trainer
from transformers import TrainerCallback

from hf_ext.training.profiling import STEP, TRACE, costly_operations

QUIET = {"eval_strategy": "no", "save_strategy": "no", "metric_for_best_model": None, "greater_is_better": None}


def make(folder, warmup=1, **given):
    """Without other words, steps 1 and 2 come before the window: the second warms the profiler up."""
    trainer = make_trainer(folder, **given)
    trainer.throughput.warmup_steps = warmup
    return trainer


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def calls(profile, name):
    return {row["name"]: row["calls"] for row in profile["operations"]}.get(name)


def rate_steps(folder):
    return json.loads((folder / "throughput.json").read_text())["measured_steps"]


def trace_steps(folder):
    with gzip.open(folder / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("name") == STEP and event.get("ph") == "X" for event in events)


@pytest.mark.nightly
def test_a_profile_changes_no_number_and_is_in_no_rate(tmp_path):
    plain, profiled = (
        make(tmp_path / str(asked), **QUIET, speedups=["tf32"], torch_profiler=asked, logging_steps=1)
        for asked in (None, 2)
    )
    for trainer in (plain, profiled):
        torch.manual_seed(0)
        trainer.train()
    assert torch.equal(weights(plain), weights(profiled))
    assert [log.get("loss") for log in plain.state.log_history] == [
        log.get("loss") for log in profiled.state.log_history
    ]
    assert (rate_steps(tmp_path / "None"), rate_steps(tmp_path / "2")) == (5, 2)  # 6 but for 1; and for 3 to 4, and 2
    assert plain.profile is None
    assert not (tmp_path / "None" / TRACE).exists()
    assert profiled.profile["steps"] == [3, 4]
    assert len(profiled.profile["seconds"]) == trace_steps(tmp_path / "2") == 2
    rows = profiled.profile["operations"]
    assert len(rows) == 10
    assert [row["share"] for row in rows] == sorted((row["share"] for row in rows), reverse=True)
    assert 0 < sum(row["share"] for row in rows) <= 1.001
    assert calls(profiled.profile, "aten::addmm") % 2 == 0  # as many in each step


def test_an_evaluation_ends_the_window_and_is_not_in_the_table(tmp_path):
    evaluated = make(tmp_path / "a", torch_profiler=3, eval_steps=3, save_strategy="no")
    evaluated.train()
    alone = make(tmp_path / "b", **QUIET, torch_profiler=1)
    alone.train()
    assert evaluated.profile["steps"] == alone.profile["steps"] == [3, 3]  # the evaluation comes after step 3
    assert calls(evaluated.profile, "aten::addmm") == calls(alone.profile, "aten::addmm") > 0


@pytest.mark.nightly
@pytest.mark.parametrize(("asked", "steps", "text"), [(9, [3, 6], "only 4 are left"), (2, None, "only 0")])
def test_a_run_with_too_few_steps_says_so(asked, steps, text, tmp_path, caplog):
    trainer = make(tmp_path, warmup=1 if steps else 5, **QUIET, torch_profiler=asked)
    with caplog.at_level(logging.WARNING, "hf_ext"):
        trainer.train()
    assert f"--torch_profiler {asked}: after " in caplog.text
    assert text in caplog.text
    assert (trainer.profile or {}).get("steps") == steps
    assert (tmp_path / TRACE).exists() == bool(steps)


class Dies(TrainerCallback):
    """Ends the run in a step, as a full card or a killed worker would."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            raise RuntimeError("in the middle")


@pytest.mark.nightly
def test_a_run_that_dies_in_the_window_has_no_profile_and_the_next_session_makes_one(tmp_path):
    saves = {**QUIET, "save_strategy": "steps", "save_steps": 1, "torch_profiler": 1}
    whole = make(tmp_path / "whole", **saves)
    whole.train()
    broken, resumed = (make(tmp_path / "run", **saves, resume="auto") for _ in range(2))
    broken.add_callback(Dies(3))
    with pytest.raises(RuntimeError, match="in the middle"):
        broken.train()
    assert not torch.autograd._profiler_enabled()
    assert broken.profile is None
    resumed.train()
    assert resumed.profile["steps"] == [5, 5]  # the session begins after step 2
    assert torch.equal(weights(whole), weights(resumed))


def test_a_budget_of_disk_space_has_no_room_for_a_trace(tmp_path):
    trainer = make(tmp_path, **QUIET, torch_profiler=1, save_total_size_gb=1.0)
    trainer.train()
    assert (trainer.profile["trace"], len(trainer.profile["operations"])) == (None, 10)
    assert not (tmp_path / TRACE).exists()


def event(name, start, length, self_us, device_us=0.0, is_range=False):
    span = SimpleNamespace(start=start, end=start + length)
    times = {"self_cpu_time_total": self_us, "self_device_time_total": device_us}
    return SimpleNamespace(
        name=name,
        time_range=span,
        count=1,
        device_type=torch.autograd.DeviceType.CPU,
        is_user_annotation=is_range,
        **times,
    )


def test_operations_rank_by_their_own_time_inside_steps_on_the_device_where_it_worked():
    step = event(STEP, 100, 100, 5.0, is_range=True)
    found = [step, event("mm", 110, 20, 3000.0), event("mm", 140, 20, 1000.0), event("add", 170, 5, 1000.0)]
    outside = event("mm", 210, 20, 9000.0)
    rows = costly_operations([*found, outside])
    assert [(row["name"], row["calls"], row["self_cpu_ms"], row["share"]) for row in rows] == [
        ("mm", 2, 4.0, 0.8),
        ("add", 1, 1.0, 0.2),
    ]
    on_card = costly_operations([step, event("mm", 110, 9, 9.0, 1000.0), event("add", 120, 9, 1.0, 3000.0)])
    assert [(row["name"], row["self_device_ms"], row["share"]) for row in on_card] == [
        ("add", 3.0, 0.75),
        ("mm", 1.0, 0.25),
    ]

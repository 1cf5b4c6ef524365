"""`--torch_profiler`: a trace and a table of a few steps, which change no number and stand in no rate."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from small_runs import make_trainer

from hf_ext.training.profiling import STEP, TRACE

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


def test_a_budget_of_disk_space_has_no_room_for_a_trace(tmp_path):
    trainer = make(tmp_path, **QUIET, torch_profiler=1, save_total_size_gb=1.0)
    trainer.train()
    assert (trainer.profile["trace"], len(trainer.profile["operations"])) == (None, 10)
    assert not (tmp_path / TRACE).exists()

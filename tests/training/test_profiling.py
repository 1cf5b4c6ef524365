"""`--profile true`: a trace and a table of steps 10 to 13 of a start; they change no number and are in no rate."""

import gzip
import json
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from small_runs import make_trainer
from transformers import TrainerState
from watched_runs import Kill

from hf_ext.hub import model_files
from hf_ext.reporting import StepProfiler

TRACE = "profile_trace.json.gz"
QUIET = {"eval_strategy": "no", "save_strategy": "no", "metric_for_best_model": None, "max_steps": 14}
SAVES = {**QUIET, "save_strategy": "steps", "save_steps": 8, "max_steps": 22}


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def profiled_steps(folder):
    with gzip.open(folder / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sum(event["name"].startswith("ProfilerStep#") and event["ph"] == "X" for event in events)


def test_a_profile_changes_no_weight_is_in_no_rate_and_stays_here(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_ext")
    trainers = {}
    for name, given in (("plain", {}), ("profiled", {"profile": True}), ("other", {"learning_rate": 0.02})):
        trainers[name] = make_trainer(tmp_path / name, **QUIET, preset="baseline", **given)
        trainers[name].train()
    plain, profiled, other = map(weights, trainers.values())
    assert torch.equal(plain, profiled)
    assert not torch.equal(plain, other)
    rates = [json.loads((tmp_path / name / "throughput.json").read_text()) for name in ("plain", "profiled")]
    assert [rate["measured_steps"] for rate in rates] == [11, 6]  # of 14, but for 1 to 3; and for 9 to 13
    assert [rate["totals"]["sequences"] for rate in rates] == [22, 12]
    assert not (tmp_path / "plain" / TRACE).exists()
    assert profiled_steps(tmp_path / "profiled") == 4
    (said,) = [message for message in caplog.messages if message.startswith("Profiled steps 10 to 13")]
    assert len(said.split("-  \n")[2].splitlines()) == 10 + 1  # and a rule
    trainers["profiled"].save_model()
    assert "model.safetensors" in (pushed := model_files(tmp_path / "profiled"))
    assert TRACE not in pushed


def test_a_run_that_dies_in_these_steps_leaves_nothing_and_the_next_start_is_profiled(tmp_path, caplog):
    whole = make_trainer(tmp_path / "whole", **SAVES)
    whole.train()
    first = make_trainer(tmp_path / "b", **SAVES, profile=True)
    first.add_callback(Kill(11))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert "training ended within the profiled steps, so nothing is written" in caplog.text
    assert not (tmp_path / "b" / TRACE).exists()
    assert not torch.autograd._profiler_enabled()
    again = make_trainer(tmp_path / "b", **SAVES, profile=True, resume="auto")
    again.train()  # from step 8: its tenth to thirteenth are 18 to 21
    assert profiled_steps(tmp_path / "b") == 4
    assert torch.equal(weights(whole), weights(again))


def test_what_has_no_room_or_too_few_steps_leaves_no_trace_and_says_so(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "hf_ext")
    monkeypatch.setattr("hf_ext.reporting.speed_line.MAX_TRACE_BYTES", 1000)
    for given, said in (
        ({"save_total_size_gb": 1.0}, r"no trace: --save_total_size_gb has no room(.*\n)*.*aten::"),
        ({}, r"no trace: it takes [\d,]+ bytes, more than 1,000\.\n(.*\n)*.*aten::"),
        ({"max_steps": 12}, "nothing is profiled. It takes steps 10 to 13 since the start, and there are 12"),
    ):
        caplog.clear()
        make_trainer(tmp_path, **{**QUIET, **given}, profile=True).train()
        assert re.search(said, "\n".join(caplog.messages))
        assert not [path for path in tmp_path.iterdir() if "trace" in path.name]


def test_other_processes_leave_the_same_steps_out_and_record_nothing():
    left_out = []
    throughput = SimpleNamespace(leave_out=lambda num_steps, args: left_out.append(num_steps))
    profiler, args = StepProfiler(throughput), SimpleNamespace(profile=True)
    state = TrainerState(max_steps=20, is_world_process_zero=False)
    profiler.on_train_begin(args, state, None)
    for state.global_step in range(1, 21):
        profiler.on_step_end(args, state, None)
        assert (left_out, torch.autograd._profiler_enabled()) == ([5] * (state.global_step >= 8), False)

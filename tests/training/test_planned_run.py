"""A plan carried out on a run without a Trainer: what it records, what it switches back, what a full disk costs."""

import errno
import json
import logging

import pytest
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args

from hf_ext.errors import PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.plan import Plan
from hf_ext.speedups import Decision, Run
from hf_ext.training.planned import PlannedRun, plan_run


def make_planned(folder, plan_class=Plan, **given) -> PlannedRun:
    decisions = [Decision("ddp", "I", "applied", "asked for"), Decision("tf32", "P", "off", "not asked for")]
    args = make_args(folder)
    return PlannedRun(plan_class(describe_hardware("cpu"), decisions), Run(args, make_wide_esm()), **given)


def read_evidence(folder) -> dict:
    decisions = json.loads((folder / "plan.json").read_text())["decisions"]
    return {decision["name"]: decision["evidence"] for decision in decisions}


def test_only_what_was_applied_is_applied_and_not_what_the_plan_does_not_know(tmp_path):
    planned = make_planned(tmp_path)
    assert [planned.applied(name) for name in ("ddp", "tf32", "no such")] == [True, False, False]


def test_what_is_recorded_is_in_plan_json_at_once(tmp_path):
    make_planned(tmp_path).record("ddp", watched=7)
    assert read_evidence(tmp_path) == {"ddp": {"watched": 7}, "tf32": {}}


def test_a_run_that_keeps_no_records_and_another_process_write_none(tmp_path):
    make_planned(tmp_path, keeps_records=False).record("ddp", watched=7)
    other = make_planned(tmp_path)
    other.run.args = type("Second", (), {"process_index": 1, "output_dir": str(tmp_path)})()
    other.save()
    assert not (tmp_path / "plan.json").exists()


def test_what_training_measures_is_recorded_when_it_ends_and_not_when_it_breaks_off(tmp_path):
    planned = make_planned(tmp_path)
    steps = [0]

    def start():
        before = steps[0]
        return lambda: {"steps": steps[0] - before}

    planned.run.measure_training("ddp", start)
    with pytest.raises(KeyboardInterrupt), planned.measuring():
        raise KeyboardInterrupt
    assert not (tmp_path / "plan.json").exists()
    steps[0] = 10
    with planned.measuring():
        steps[0] = 13
    assert read_evidence(tmp_path)["ddp"] == {"steps": 3}


def test_what_fails_halfway_is_switched_back_last_first_and_only_once(tmp_path):
    planned, undone = make_planned(tmp_path), []
    for name in ("first", "second"):
        planned.run.on_end(lambda name=name: undone.append(name))
    with planned.restored_on_error():
        assert undone == []
    with pytest.raises(TypeError), planned.restored_on_error():
        raise TypeError("not built")
    planned.restore()
    assert undone == ["second", "first"]


class Unwritable(Plan):
    """A plan whose file the disk refuses."""

    number = errno.ENOSPC

    def save(self, folder):
        raise OSError(self.number, "refused")


def test_a_full_disk_is_said_and_costs_nothing_else_and_other_errors_are_raised(tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        make_planned(tmp_path, Unwritable).record("ddp", watched=7)
    assert [record.message.startswith("plan.json was not written: ") for record in caplog.records] == [True]
    with pytest.raises(OSError, match="refused"):
        make_planned(tmp_path, type("Other", (Unwritable,), {"number": errno.EISDIR})).save()


def test_arguments_are_copied_where_a_speedup_will_be_applied_and_the_callers_own_otherwise(tmp_path):
    model = make_wide_esm()
    for given, is_own in (({}, True), ({"speedups": ["data_loading"]}, False)):
        args = make_args(tmp_path, **given)
        planned = plan_run({"args": args, "model": model}, None, None, None)
        applied = [d.name for d in planned.plan.decisions if d.status == "applied"]
        assert (planned.run.args is args) == is_own == (not applied)
        assert planned.keeps_records != is_own
        assert planned.run.model is model
    assert list(tmp_path.iterdir()) == []  # decided, and nothing carried out


def test_a_refusal_is_raised_before_anything_is_carried_out(tmp_path):
    with pytest.raises(PlanRefused, match="batch_size"):
        plan_run({"args": make_args(tmp_path, effective_batch_size=9), "model": make_wide_esm()}, None, None, None)

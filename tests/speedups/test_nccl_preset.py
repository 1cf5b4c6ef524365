"""`--nccl_preset` in the plan: applied with reasons, refused where it comes too late, not used without NCCL."""

import dataclasses

import pytest
from tiny_masked_lm import make_args, make_trainer

from hf_ext import nccl as variables
from hf_ext.hardware import describe_hardware
from hf_ext.speedups import Context, Nccl, Run, trainer_fields

A100 = describe_hardware("A100")
HERE = dataclasses.replace(A100, device_name="NVIDIA A100-SXM4-40GB")


def decide(hardware=A100, world_size=2, **given):
    return Nccl.decide(Context(hardware, make_args(**given), world_size=world_size))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """One that sets nothing of NCCL, put back afterwards."""
    for name in variables.REASONS:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken away again
        monkeypatch.delenv(name)
    return monkeypatch.setenv


def test_it_is_off_unless_asked_for_also_with_all():
    assert decide(speedups=["all"]).status == "off"
    assert decide(speedups=["nccl"]).status == "skipped"


def test_each_variable_stands_with_its_reason(environment):
    environment("NCCL_NET", "Socket")  # of this machine, and another one is described
    decision = decide(nccl_preset="infiniband")
    assert (decision.status, decision.kind) == ("applied", "I")
    assert decision.reason == "infiniband: NCCL_DEBUG, NCCL_NET"
    assert decision.settings == {"NCCL_DEBUG": "WARN", "NCCL_NET": "IB"}
    assert decision.evidence["reasons"].keys() == decision.settings.keys()
    assert "or NCCL fails" in decision.evidence["reasons"]["NCCL_NET"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"world_size": 1}, "not used: one process"),
        ({"hardware": describe_hardware("cpu")}, "not used: processes on cpu talk by other means"),
    ],
)
def test_without_nccl_it_is_a_line_and_no_error(given, says):
    decision = decide(nccl_preset="pcie", **given)
    assert (decision.status, decision.reason) == ("skipped", says)


def test_another_backend_that_was_asked_for_does_not_use_it():
    args = make_args(nccl_preset="pcie")
    args.ddp_backend = "gloo"
    decision = Nccl.decide(Context(A100, args, world_size=2))
    assert (decision.status, decision.reason) == ("skipped", "not used: --ddp_backend gloo was asked for")


def test_without_and_the_preset_contradict_each_other():
    assert decide(nccl_preset="pcie", without=["nccl"]).status == "refused"


def test_what_the_user_set_is_never_overwritten_and_stands_in_the_plan(environment):
    environment("NCCL_NET", "AWS Libfabric")
    decision = decide(HERE, nccl_preset="infiniband")
    assert decision.status == "applied"
    assert decision.reason.split("; ") == [
        "infiniband: NCCL_DEBUG, NCCL_NET",
        "NCCL_NET=AWS Libfabric was set before and stays, the preset has IB",
    ]
    applied = Nccl.apply(decision, Run(None, None))
    assert applied.evidence["in_force"] == {"NCCL_DEBUG": "WARN", "NCCL_NET": "AWS Libfabric"}
    assert variables.known_variables() == applied.evidence["in_force"]


def test_variables_that_come_too_late_are_refused_with_the_launchers_way(environment, monkeypatch):
    monkeypatch.setattr(trainer_fields, "is_connected", lambda: True)
    environment("NCCL_DEBUG", "INFO")
    decision = decide(HERE, nccl_preset="infiniband")
    assert decision.status == "refused"
    assert "start with NCCL_NET=IB accelerate launch" in decision.reason
    environment("NCCL_NET", "IB")
    assert decide(HERE, nccl_preset="infiniband").status == "applied"  # of a second trainer, too


def test_a_run_on_the_cpu_says_not_used_in_its_plan(tmp_path):
    trainer = make_trainer(tmp_path, nccl_preset="sockets", max_steps=1)
    assert trainer.plan["nccl"].reason == "not used: one process"
    assert "NCCL_NET" not in variables.known_variables()
    assert "not used: one process" in (tmp_path / "plan.json").read_text()

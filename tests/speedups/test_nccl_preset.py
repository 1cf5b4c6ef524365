"""`--nccl_preset`: few variables with reasons, refused where they come too late, not used without NCCL."""

import dataclasses
import inspect

import pytest
from tiny_masked_lm import make_args, make_trainer

from hf_ext import nccl as variables
from hf_ext.errors import ArgumentError
from hf_ext.hardware import describe_hardware
from hf_ext.speedups import REGISTRY, Context, Run

(nccl,) = [one for one in REGISTRY if one.NAME == "nccl"]
A100 = describe_hardware("A100")
HERE = dataclasses.replace(A100, device_name="NVIDIA A100-SXM4-40GB")


def decide(hardware=A100, world_size=2, **given):
    return nccl.decide(Context(hardware, make_args(**given), world_size=world_size))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """One that sets nothing of NCCL, put back afterwards."""
    for name in variables.REASONS:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken away again
        monkeypatch.delenv(name)
    return monkeypatch.setenv


def test_the_presets_hold_what_they_are_documented_to_hold():
    warns = {"NCCL_DEBUG": "WARN"}
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    expected = {
        "pcie": warns,
        "nvlink": warns,
        "infiniband": {**warns, "NCCL_NET": "IB"},
        "sockets": {**warns, **sockets},  # the guide: the product of the two numbers must not exceed 64
    }
    assert expected == variables.NCCL_PRESETS
    with pytest.raises(ArgumentError, match="nccl_preset='ib': allowed are pcie, nvlink, infiniband, sockets"):
        make_args(nccl_preset="ib")


def test_a_secret_key_of_nccl_is_never_recorded():
    environment = {"NCCL_PSK": "s" * 40, "NCCL_NET": "Socket", "PATH": "/bin"}
    assert variables.known_variables(environment) == {"NCCL_NET": "Socket"}


def test_each_variable_stands_with_its_reason(environment):
    environment("NCCL_NET", "Socket")  # of this machine, and another one is described
    decision = decide(nccl_preset="infiniband")
    assert (decision.status, decision.kind) == ("applied", "I")
    assert decision.reason == "infiniband: NCCL_DEBUG, NCCL_NET"
    assert decision.settings == {"NCCL_DEBUG": "WARN", "NCCL_NET": "IB"}
    assert decision.evidence["reasons"].keys() == decision.settings.keys()
    assert "or NCCL fails" in decision.evidence["reasons"]["NCCL_NET"]


def test_what_the_user_set_is_never_overwritten_and_stands_in_the_plan(environment):
    environment("NCCL_NET", "AWS Libfabric")
    decision = decide(HERE, nccl_preset="infiniband")
    assert decision.status == "applied"
    assert decision.reason.split("; ") == [
        "infiniband: NCCL_DEBUG, NCCL_NET",
        "NCCL_NET=AWS Libfabric was set before and stays, the preset has IB",
    ]
    applied = nccl.apply(decision, Run(None, None))
    assert applied.evidence["in_force"] == {"NCCL_DEBUG": "WARN", "NCCL_NET": "AWS Libfabric"}
    assert variables.known_variables() == applied.evidence["in_force"]


def test_variables_that_come_too_late_are_refused_with_the_launchers_way(environment, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(nccl.decide), "is_connected", lambda: True)
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

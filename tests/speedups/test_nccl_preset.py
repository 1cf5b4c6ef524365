"""`--nccl_preset` in the plan: applied with reasons, refused where the machine lacks it, not used without NCCL."""

import dataclasses

import pytest
from tiny_masked_lm import make_args, make_trainer

from hf_ext import nccl as variables
from hf_ext.hardware import describe_hardware
from hf_ext.speedups import Context, nccl

A100 = describe_hardware("A100")
HERE = dataclasses.replace(A100, device_name="NVIDIA A100-SXM4-40GB")
MATRIX = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{0}\t0-3\nGPU1\t{0}\t X \t0-3\n"


def decide(hardware=A100, world_size=2, **given):
    return nccl.decide(Context(hardware, make_args(**given), world_size=world_size))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Puts an nvidia-smi on PATH that reports two GPUs connected as told, and no InfiniBand device."""
    for name in variables.known_variables():
        monkeypatch.delenv(name)
    monkeypatch.setattr(variables, "RDMA_FOLDER", str(tmp_path / "infiniband"))

    def make(link: str, **environment: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{MATRIX.format(link)}END\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return make


def test_it_is_off_unless_asked_for_also_with_all():
    assert decide(speedups=["all"]).status == "off"
    assert decide(speedups=["nccl"]).status == "skipped"


def test_on_a_described_machine_each_variable_stands_with_its_reason_and_nothing_was_read():
    decision = decide(nccl_preset="infiniband")
    assert (decision.status, decision.kind) == ("applied", "I")
    assert decision.reason == "infiniband: NCCL_DEBUG, NCCL_NET; no topology read"
    assert decision.settings == {"NCCL_DEBUG": "WARN", "NCCL_NET": "IB"}
    assert decision.evidence["reasons"].keys() == decision.settings.keys()
    assert "System configuration, NCCL_NET" in decision.evidence["reasons"]["NCCL_NET"]


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
    decision = nccl.decide(Context(A100, args, world_size=2))
    assert (decision.status, decision.reason) == ("skipped", "not used: --ddp_backend gloo was asked for")


def test_without_and_the_preset_contradict_each_other():
    assert decide(nccl_preset="pcie", without=["nccl"]).status == "refused"


def test_the_topology_of_this_machine_is_read_and_conflicts_are_told(machine):
    machine("NV12", NCCL_DEBUG="INFO", NCCL_P2P_DISABLE="1")
    decision = decide(HERE, nccl_preset="nvlink")
    assert decision.status == "applied"
    assert decision.reason.split("; ") == [
        "nvlink: NCCL_DEBUG",
        "GPUs connected by NV12",
        "RDMA devices: none",
        "NCCL_DEBUG=INFO was set before and stays, the preset has WARN",
        "NCCL_P2P_DISABLE=1 is set: GPUs of a machine do not reach each other by NVLink or PCIe",
    ]


@pytest.mark.parametrize(
    ("preset", "link", "says"),
    [
        ("nvlink", "PHB", "no NVLink here (GPUs connected by PHB; RDMA devices: none): use --nccl_preset pcie"),
        ("infiniband", "NV12", "no active InfiniBand or RoCE port here"),
    ],
)
def test_a_preset_for_what_is_not_there_is_refused_with_the_other_one(machine, preset, link, says):
    environment = {}
    variables.set_preset(preset, environment)
    machine(link, **environment)
    decision = decide(HERE, nccl_preset=preset)
    assert decision.status == "refused"
    assert says in decision.reason


def test_variables_that_come_too_late_are_refused_with_the_launchers_way(machine):
    machine("NV12")
    decision = decide(HERE, nccl_preset="nvlink")
    assert decision.status == "refused"
    assert "before NCCL_DEBUG could be set" in decision.reason
    assert 'eval "$(python -m hf_ext.nccl nvlink)" before accelerate launch' in decision.reason


def test_a_run_on_the_cpu_says_not_used_in_its_plan(tmp_path):
    trainer = make_trainer(tmp_path, nccl_preset="sockets", max_steps=1)
    assert trainer.plan["nccl"].reason == "not used: one process"
    assert "NCCL_NET" not in variables.known_variables()
    assert "not used: one process" in (tmp_path / "plan.json").read_text()

"""NCCL presets: few variables of the guide's system chapter; what the user set stays; the topology is read."""

import subprocess
import sys

import pytest
import torch
from transformers import TrainingArguments

from hf_ext.errors import ArgumentError
from hf_ext.nccl import (
    NCCL_PRESETS,
    Topology,
    export_lines,
    find_conflicts,
    find_rdma_devices,
    known_variables,
    missing_variables,
    parse_links,
    set_preset,
)
from hf_ext.processes import will_use_nccl
from hf_ext.training_args import FastTrainingArguments

MIXED = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tPHB\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tPXB\t0-31\t0\t\tN/A
NIC0\tSYS\tSYS\tPXB\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """An environment that sets nothing of NCCL, put back afterwards."""
    for name in ("NCCL_DEBUG", "NCCL_NET", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken away again
        monkeypatch.delenv(name)


def test_the_presets_hold_what_they_are_documented_to_hold():
    values = {name: {v.name: v.value for v in variables} for name, variables in NCCL_PRESETS.items()}
    assert values == {
        "pcie": {"NCCL_DEBUG": "WARN"},
        "nvlink": {"NCCL_DEBUG": "WARN"},
        "infiniband": {"NCCL_DEBUG": "WARN", "NCCL_NET": "IB"},
        "sockets": {
            "NCCL_DEBUG": "WARN",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_NTHREADS": "4",
            "NCCL_NSOCKS_PERTHREAD": "4",  # the guide: their product must not exceed 64
        },
    }
    assert all(v.reason and v.name in v.source for variables in NCCL_PRESETS.values() for v in variables)


def test_what_the_user_set_is_never_overwritten_and_the_conflict_is_told():
    environment = {"NCCL_NET": "AWS Libfabric", "NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "nvl"}
    set_preset("infiniband", environment)
    assert environment["NCCL_NET"] == "AWS Libfabric"
    assert environment["NCCL_DEBUG"] == "WARN"
    assert find_conflicts("infiniband", environment) == [
        "NCCL_NET=AWS Libfabric was set before and stays, the preset has IB",
        "NCCL_IB_DISABLE=1 is set: no RDMA between machines",
    ]
    assert find_conflicts("infiniband", {"NCCL_NET": "IB"}) == []


def test_missing_variables_are_those_that_nobody_set():
    assert missing_variables("infiniband", {"NCCL_DEBUG": "INFO"}) == ["NCCL_NET"]


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ArgumentError, match="nccl_preset=ib: allowed are pcie, nvlink, infiniband, sockets"):
        set_preset("ib", {})


def test_a_secret_key_of_nccl_is_never_recorded():
    environment = {"NCCL_PSK": "s" * 40, "NCCL_NET": "Socket", "PATH": "/bin"}
    assert known_variables(environment) == {"NCCL_NET": "Socket"}


def test_the_printed_lines_set_the_variables_in_a_shell_and_leave_those_that_are_set():
    lines = export_lines("infiniband", {"NCCL_DEBUG": "INFO"})
    assert "# NCCL_DEBUG is set already and stays as it is" in lines
    shell = 'NCCL_DEBUG=INFO; eval "$(cat)"; echo "$NCCL_DEBUG $(printenv NCCL_NET)"'
    done = subprocess.run(["bash", "-c", shell], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("INFO IB\n", "")


def test_the_command_prints_the_lines_and_refuses_without_a_preset():
    done = subprocess.run([sys.executable, "-m", "hf_ext.nccl", "pcie"], capture_output=True, text=True, check=True)
    assert "export NCCL_DEBUG=WARN" in done.stdout.splitlines()
    assert all(line.startswith(("#", "export ")) for line in done.stdout.splitlines())
    done = subprocess.run([sys.executable, "-m", "hf_ext.nccl"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Give one preset: python -m hf_ext.nccl pcie|nvlink|infiniband|sockets" in done.stderr


# --- the machine ------------------------------------------------------------------------------------------------------


def test_links_are_those_between_gpus_and_not_of_network_cards():
    assert parse_links(MIXED) == ("NV12", "SYS", "PHB")
    assert parse_links("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-3\t0\n") == ()
    assert parse_links("No devices were found\n") == ()


def test_rdma_devices_are_those_with_an_active_port(tmp_path):
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert find_rdma_devices(str(tmp_path)) == ("mlx5_0",)
    assert find_rdma_devices(str(tmp_path / "absent")) == ()


@pytest.mark.parametrize(
    ("topology", "num_machines", "preset"),
    [
        (Topology(("NV4", "NV4", "NV4")), 1, "nvlink"),
        (Topology(("PHB",)), 1, "pcie"),
        (Topology(("NV4",), ("mlx5_0",)), 2, "infiniband"),
        (Topology(("NV4",)), 2, "sockets"),
    ],
)
def test_a_preset_is_suggested_for_what_was_found(topology, num_machines, preset):
    assert topology.suggest(num_machines) == preset


# --- before the processes meet ----------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised where the process group would be made."""


def environment_at_the_group(monkeypatch, **given) -> dict[str, str]:
    """NCCL's variables at the moment when stock TrainingArguments would connect the processes."""
    seen = {}

    def stop(self):
        seen.update(known_variables())
        raise Stop

    monkeypatch.setattr(TrainingArguments, "__post_init__", stop)
    monkeypatch.setattr("hf_ext.processes.is_deepspeed_available", lambda: False)  # seconds to import
    with pytest.raises(Stop):
        FastTrainingArguments("o", **given)
    return seen


def test_variables_are_set_before_processes_on_gpus_meet_and_only_then(monkeypatch):
    assert environment_at_the_group(monkeypatch, nccl_preset="infiniband") == {}  # one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert environment_at_the_group(monkeypatch, nccl_preset="infiniband") == {}  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert environment_at_the_group(monkeypatch) == {}  # nothing was asked for
    assert environment_at_the_group(monkeypatch, nccl_preset="infiniband", use_cpu=True) == {}
    assert environment_at_the_group(monkeypatch, nccl_preset="infiniband") == {"NCCL_DEBUG": "WARN", "NCCL_NET": "IB"}


def test_processes_that_are_connected_already_are_too_late(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert will_use_nccl()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not will_use_nccl()

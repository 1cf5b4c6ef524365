"""NCCL presets: few variables of the guide's system chapter; making arguments sets nothing and imports no DeepSpeed."""

import json
import os
import subprocess
import sys

import pytest

from hf_ext.errors import ArgumentError
from hf_ext.nccl import NCCL_PRESETS, REASONS, known_variables
from hf_ext.training_args import FastTrainingArguments


def test_the_presets_hold_what_they_are_documented_to_hold():
    assert NCCL_PRESETS == {
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
    assert {name for variables in NCCL_PRESETS.values() for name in variables} == REASONS.keys()


def test_an_unknown_preset_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ArgumentError, match="nccl_preset='ib': allowed are pcie, nvlink, infiniband, sockets"):
        FastTrainingArguments(str(tmp_path), nccl_preset="ib")


def test_a_secret_key_of_nccl_is_never_recorded():
    environment = {"NCCL_PSK": "s" * 40, "NCCL_NET": "Socket", "PATH": "/bin"}
    assert known_variables(environment) == {"NCCL_NET": "Socket"}


# --- what making arguments leaves alone -------------------------------------------------------------------------------

MAKE_ARGUMENTS = """
import json, os, sys
import torch
from transformers import TrainingArguments
from hf_ext.training_args import FastTrainingArguments

class Stop(Exception):
    "Raised where the process group would be made."

def stop(self):
    raise Stop

def changes(launched, **given):
    os.environ.update(launched)
    before = dict(os.environ)
    try:
        FastTrainingArguments(sys.argv[1], **given)
    except Stop:
        pass
    after = dict(os.environ)
    for name in launched:
        del os.environ[name]
    return {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

alone = changes({}, nccl_preset="sockets")
torch.cuda.is_available = lambda: True
TrainingArguments.__post_init__ = stop
several = changes({"WORLD_SIZE": "2"}, nccl_preset="infiniband")
print(json.dumps([alone, several, [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]]))
"""


@pytest.mark.nightly
def test_making_arguments_sets_no_variable_and_imports_no_deepspeed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    done = subprocess.run(
        [sys.executable, "-c", MAKE_ARGUMENTS, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [{}, {}, []]

"""Each remedy fires in the situation that it is for, names the flag or command, and does not fire otherwise."""

from dataclasses import replace

import pytest
from doctored import FOLDERS, GB, change, gather_facts, healthy, main, names
from inside import find_problems

from hf_ext.checkpoints import Sizes
from hf_ext.doctor.estimates import Times
from hf_ext.doctor.findings import would_run
from hf_ext.doctor.machine import Package
from hf_ext.hardware import describe_hardware

pytestmark = pytest.mark.internals
CPU = describe_hardware("cpu")
COLAB = {"in_colab": True, "drive_is_mounted": True, "output_dir": "/content/drive/MyDrive/run"}
FREE = dict.fromkeys(FOLDERS, 100 * GB)
MAY = dict.fromkeys(FOLDERS, True)
LONG = Times((("training", (3600.0, 14 * 3600.0)),), "by hand")


def stored(gib: int):
    """The healthy run's memory, if what it stores were so many GiB."""
    return replace(main(healthy()).memory, stored=gib * 2**30)


def swap_package(facts, name, *values):
    packages = [package for package in facts.packages if package.name != name]
    return change(facts, packages=[*packages, Package(name, *values)])


def test_on_a_machine_where_all_is_well_nothing_is_off():
    assert find_problems(healthy()) == []
    assert would_run([])


# name: (arguments, machine, facts that are changed, level, what the remedy says)
SITUATIONS = {
    "gpu": ({}, {"hardware": CPU, "is_described": False}, {}, "warns", "T4 GPU"),
    "driver": (
        {},
        {"hardware": CPU, "is_described": False, "has_nvidia_driver": True},
        {},
        "warns",
        "pip install --force-reinstall torch",
    ),
    "processes": ({}, {"is_described": False, "num_gpus": 2}, {}, "warns", "--config_file ddp.yaml --num_processes 2"),
    "memory": ({}, {}, {"memory": stored(37)}, "stops", "a smaller encoder"),
    "memory  ": ({}, {}, {"memory": replace(stored(1), room=2**20)}, "stops", "a smaller encoder"),
    "memory ": ({}, {}, {"encoding_bytes": 37 * 2**30}, "stops", "a smaller encoder"),
    "budget": (
        {"save_total_size_gb": 0.001},
        {},
        {"checkpoint": Sizes(GB, 2 * GB, 0)},
        "stops",
        "--save_total_size_gb 9.00",
    ),
    "disk": ({}, {"free_bytes": {**FREE, "output_dir": 10**6}}, {}, "stops", "--save_total_limit 1"),
    "disk ": ({}, {"free_bytes": {**FREE, "cache_dir": 10**5}}, {}, "stops", "--embedding_cache_dir"),
    "disk  ": ({}, {}, {"download_bytes": 101 * GB}, "stops", "HF_HOME"),
    "disk   ": ({}, {"is_writable": {**MAY, "output_dir": False}}, {}, "stops", "another --output_dir"),
    "disk    ": ({}, {"is_writable": {**MAY, "cache_dir": False}}, {}, "stops", "another --embedding_cache_dir"),
    "drive": ({}, {**COLAB, "drive_is_mounted": False}, {}, "stops", "drive.mount"),
    "drive ": ({}, {**COLAB, "output_dir": "/content/outputs"}, {}, "warns", "/content/drive/MyDrive"),
    "drive  ": ({}, {**COLAB, "free_bytes": {**FREE, "output_dir": 8 * 10**8}}, {}, "warns", "low_disk"),
    "session": ({}, COLAB, {"times": LONG}, "warns", "--max_hours 11.5"),
    "offline": ({}, {"hub_is_offline": True}, {"download_bytes": 1}, "stops", "unset HF_HUB_OFFLINE"),
    "push": ({"push_to_hub": True}, {"has_token": False}, {}, "stops", "hf auth login"),
    "push ": ({"push_to_hub": True}, {"hub_is_offline": True}, {}, "stops", "unset HF_HUB_OFFLINE"),
    "tracker": ({"report_to": ["comet_ml"]}, {}, {}, "stops", "pip install comet_ml"),
    "install": ({}, {}, {"packages": []}, "warns", "pip install -e ."),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_gives_one_finding_with_its_remedy(name):
    args, machine, facts, level, remedy = SITUATIONS[name]
    (finding,) = find_problems(change(healthy(), args, machine, **facts))
    assert (finding.name, finding.level) == (name.strip(), level)
    assert remedy in finding.remedy
    assert would_run([finding]) == (level == "warns")


def test_weights_are_split_over_several_cards_where_one_does_not_hold_them_and_only_there():
    several = {"is_described": False, "num_gpus": 2}
    for memory, file in ((stored(1), "ddp"), (replace(stored(1), room=2**20), "fsdp2"), ("not known", "ddp")):
        remedies = {one.name: one.remedy for one in find_problems(change(healthy(), {}, several, memory=memory))}
        assert f"--config_file {file}.yaml --num_processes 2" in remedies["processes"]
    (finding,) = find_problems(change(healthy(), memory=stored(37)))
    assert finding.remedy.endswith("or several cards that share the weights (fsdp2.yaml)")


# The same situations, just on the other side of what is off.
CALM = {
    "described cards have no driver here": ({}, {"has_nvidia_driver": True, "num_gpus": 0}, {}),
    "one GPU, one process": ({}, {"is_described": False, "num_gpus": 1}, {}),
    "A100: 36.4 of 40 GiB are there": ({}, {}, {"memory": stored(36), "encoding_bytes": 36 * 2**30}),
    "budget that holds": ({"save_total_size_gb": 9.1}, {}, {"checkpoint": Sizes(GB, 2 * GB, 0)}),
    "Drive with room": ({}, COLAB, {}),
    "long run with a limit": ({"max_hours": 11.5}, COLAB, {"times": LONG}),
    "long run elsewhere": ({}, {}, {"times": LONG}),
    "offline with all weights": ({}, {"hub_is_offline": True}, {}),
    "no token and no push": ({}, {"has_token": False}, {}),
    "read-only downloads, all at hand": ({}, {"is_writable": {**MAY, "hub_cache": False}}, {}),
}


@pytest.mark.parametrize("name", CALM)
def test_nothing_fires_where_the_situation_is_not_met(name):
    args, machine, facts = CALM[name]
    assert find_problems(change(healthy(), args, machine, **facts)) == []


def test_bf16_on_a_t4_stops_and_names_fp16():
    (finding,) = find_problems(gather_facts("t4", bf16=True))
    assert (finding.level, finding.remedy) == ("stops", "use --fp16")
    assert "precision: bf16 is not native on T4" in finding.text
    assert names(gather_facts("a100", bf16=True)) == []


def test_an_old_or_missing_package_stops_with_the_pip_command():
    old = swap_package(healthy(), "peft", "0.9", ">=0.21", True)
    (finding,) = find_problems(old)
    assert (finding.level, finding.text) == ("stops", "peft 0.9: >=0.21 is wanted")
    assert finding.remedy == 'pip install "peft>=0.21"'
    assert find_problems(swap_package(healthy(), "peft", "0.21.2", ">=0.21", True)) == []


ASKED = {
    "torchao": {"optim": "adamw_torch_8bit"},
    "deepspeed": {"deepspeed": "zero2.json"},
    "flash-attn": {"attention": "flash_attn"},
}


@pytest.mark.parametrize("package", ASKED)
def test_an_optional_package_is_missed_only_where_it_is_asked_for(package):
    asked = change(healthy(), ASKED[package])
    assert names(swap_package(asked, package, None, ">=1", False)) == [("package", "stops")]
    assert names(swap_package(healthy(), package, None, ">=1", False)) == []


def test_what_stops_the_run_is_named_first():
    both = change(healthy(), {"push_to_hub": True}, {**COLAB, "output_dir": "/content/x", "has_token": False})
    assert names(both) == [("push", "stops"), ("drive", "warns")]

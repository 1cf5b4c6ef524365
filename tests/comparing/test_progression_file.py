"""Progression files: what they may say, what becomes of it on a command line, and what is refused with line and key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_ext.comparing.needs import find_problem
from hf_ext.comparing.progression_file import Phase, add_settings, as_flags, read_progression
from hf_ext.errors import ArgumentError

ROOT = Path(__file__).parents[2]
WHOLE = """
name: three phases
source: a paper
claimed: [3, 5]
common: {max-steps: 10, eval_strategy: no}
baseline:
  arguments: {preset: baseline, speedups: [tf32]}
  claimed_memory: 15
phases:
  - name: packing
    arguments: {speedups: [packing, tf32]}
    claimed: 1.5
  - name: bf16
    arguments: {bf16: yes, learning_rate: 1e-3, fsdp_config: {version: 2}}
    claimed: [1.1, 1.3]
    claimed_memory: 12.5
    launch: accelerate_configs/cpu.yaml
    needs: ampere
    judged_by: loop
    note: on newer cards
"""


def write(folder: Path, text: str) -> str:
    path = folder / "phases.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_is_read_as_it_is_written(tmp_path):
    found = read_progression(write(tmp_path, WHOLE))
    assert (found.name, found.source, found.claimed) == ("three phases", "a paper", (3.0, 5.0))
    assert found.common == {"max_steps": "10", "eval_strategy": "no"}
    assert found.baseline == Phase("baseline", {"preset": "baseline", "speedups": ["tf32"]}, None, 15.0)
    assert found.phases == (
        Phase("packing", {"speedups": ["packing", "tf32"]}, (1.5, 1.5)),
        Phase(
            "bf16",
            {"bf16": "yes", "learning_rate": "1e-3", "fsdp_config": '{"version": 2}'},
            (1.1, 1.3),
            12.5,
            "accelerate_configs/cpu.yaml",
            ("ampere",),
            "loop",
            "on newer cards",
        ),
    )


def test_lists_grow_and_other_values_are_replaced():
    below = {"speedups": ["tf32"], "bf16": "false", "seed": "1"}
    both = add_settings(below, {"speedups": ["packing", "tf32"], "bf16": "true"})
    assert both == {"speedups": ["tf32", "packing"], "bf16": "true", "seed": "1"}
    assert below == {"speedups": ["tf32"], "bf16": "false", "seed": "1"}
    assert as_flags(both) == ("--speedups", "tf32", "packing", "--bf16", "true", "--seed", "1")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("source:", "sourse:", "line 3: sourse: no such key, did you mean 'source'?"),
        ("name: three phases", "source: b", "'source' is already given on line 2"),
        ("name: three phases\n", "", "name: is missing"),
        ("claimed: [3, 5]", "claimed: [5, 3]", r"line 4: claimed: a range is two numbers, the smaller one first"),
        ("claimed: 1.5", "claimed: fast", "line 12: phases, number 1: claimed: must be a number above 0"),
        ("claimed: 1.5", "claimed: 0", "claimed: must be a number above 0"),
        ("claimed: 1.5", "claimd: 2", "phases, number 1: claimd: no such key, did you mean 'claimed'?"),
        ("- name: packing", "- note: packing", "line 10: phases, number 1: name: is missing"),
        ("- name: packing", "- name: bf16", "the name 'bf16' is there twice"),
        ("- name: packing", "- name: Baseline", "the name 'Baseline' is there twice"),
        ("- name: packing", "- name: a/b", "'a/b' names a folder as well"),
        ("needs: ampere", "needs: [cuda, amper]", "needs: 'amper' is not known, did you mean 'ampere'?"),
        ("judged_by: loop", "judged_by: run", "judged_by: 'run': must be step or loop"),
        ("{speedups: [packing, tf32]}", "[packing]", "phases, number 1: arguments: must be lines of 'key: value'"),
        ("bf16: yes", "bf16: ", "arguments: bf16: has no value"),
        ("bf16: yes", "bf16: *a", "aliases"),
        ("needs: ampere", "needs: {cuda: yes}", "needs: 'a list or mapping' is not known"),
        ("needs: ampere", "needs: [[cuda]]", "needs: 'a list or mapping' is not known"),
        ("{version: 2}", "{version: 2026-01-01}", "fsdp_config: must map names to texts, numbers and lists"),
        ("[packing, tf32]", "[[packing], tf32]", "speedups: a list inside of a list is no argument"),
        ("- name: packing", "- name: only bf16", "'only bf16' is what --singles calls another phase"),
        ("{version: 2}", "{version: 2, version: 1}", "line 14: 'version' is already given on line 14; keep one"),
        ("{version: 2}", "[{a: {b: 1, b: 2}}]", "line 14: 'b' is already given on line 14; keep one"),
        ("{max-steps: 10,", "{max-steps: 10, max_steps: 20,", "line 5: 'max_steps' is already given on line 5"),
        (
            "claimed_memory: 12.5",
            "claimed-memory: 1\n    claimed_memory: 2",
            "'claimed_memory' is already given on line 16",
        ),
        ("bf16: yes", "output_dir: a", "line 14: phases, number 2: arguments: output_dir: each run has a folder"),
        ("{max-steps: 10,", "{output-dir: a,", "line 5: common: output_dir: each run has a folder of its own"),
        (
            "- name: packing",
            f"- name: {'x' * 400}",
            "line 10: phases, number 1: name: names a folder as well, and has 400",
        ),
        ("- name: packing", "- name: " + "\u00e4" * 101, "and has 202 bytes: at most 200"),
        ("baseline:\n", "base:\n", "base: no such key, did you mean 'baseline'?"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_key(before, after, says, tmp_path):
    assert before in WHOLE
    path = write(tmp_path, WHOLE.replace(before, after))
    with pytest.raises(ArgumentError) as error:
        read_progression(path)
    assert says in str(error.value)
    assert str(error.value).startswith(path)


def test_a_file_without_phases_or_baseline_is_refused(tmp_path):
    start, baseline, _ = WHOLE.partition("baseline:\n")
    with pytest.raises(ArgumentError, match="baseline: is missing"):
        read_progression(write(tmp_path, start))
    with pytest.raises(ArgumentError, match="phases: must be a list of at least one phase"):
        read_progression(write(tmp_path, f"{start}{baseline}  arguments: {{}}\nphases: []\n"))


def test_what_this_machine_lacks_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert find_problem(("cuda",), None) == "needs a CUDA device, and this machine has none"
    assert "compute capability 8.0" in find_problem(("ampere",), None)
    gpus = str(ROOT / "accelerate_configs" / "4gpu_fsdp2.yaml")
    assert find_problem(("two_gpus",), gpus) == (
        "needs 2 CUDA devices, and this machine has none; for 4 GPU(s), and this machine has 0"
    )
    assert find_problem((), str(ROOT / "accelerate_configs" / "cpu.yaml")) is None
    with pytest.raises(ArgumentError, match="cannot be read"):
        find_problem((), "absent.yaml")


def test_a_card_that_is_there_is_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert find_problem(("cuda", "two_gpus"), None) is None
    assert find_problem(("ampere",), None) == "needs compute capability 8.0 or higher; Tesla T4 has 7.5"


def test_the_progressions_of_the_project_are_read_and_their_launch_files_are_there():
    paths = sorted((ROOT / "recipes" / "configs").glob("progression_*.yaml"))
    found = {path.stem: read_progression(str(path)) for path in paths}
    assert {name: len(one.phases) for name, one in found.items()} == {"progression_affinity": 10, "progression_pde": 8}
    for one in found.values():
        for phase in (one.baseline, *one.phases):
            if phase.launch:
                assert (ROOT / phase.launch).is_file()
    pde = found["progression_pde"]
    assert [phase.claimed for phase in pde.phases] == [(x, x) for x in (1.36, 1.45, 1.31, 1.07, 1.23, 1.10, 1.18, 1.13)]
    memory = [phase.claimed_memory for phase in (pde.baseline, *pde.phases)]
    assert memory == [15, 15, 18, 18, 18, 22, 22, 26, 26]
    assert (pde.claimed, found["progression_affinity"].claimed) == ((5.0, 5.0), (6.0, 8.0))

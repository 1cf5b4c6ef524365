"""Facts of the demo run on described machines, for tests of the doctor."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.data.arguments import DataArguments
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.doctor.facts import Facts
from hf_ext.doctor.findings import find_problems
from hf_ext.doctor.gathering import gather
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.training_args import FastTrainingArguments

GB = 10**9
FOLDERS = ("output_dir", "cache_dir", "hub_cache")


def look(
    device: str | None = "a100",
    *,
    model: Any = None,
    data: DataArguments | None = None,
    measure_seconds: float = 0.0,
    **arguments: Any,
) -> Facts:
    """What the doctor gathers about a demo run; a machine with room and without Colab, whatever this one is."""
    task = "masked_lm" if isinstance(model, MaskedLMArguments) else "affinity"
    args = FastTrainingArguments(**{"output_dir": "never_made", "speedups": ["all"], "report_to": "none", **arguments})
    doctor = DoctorArguments(device=device, measure_seconds=measure_seconds)
    facts = gather(task, model or AffinityArguments(), data or DataArguments(), args, doctor)
    calm = {
        "in_colab": False,
        "drive_is_mounted": False,
        "has_nvidia_driver": False,
        "num_gpus": 0,
        "cpu_cores": 8,
        "load_average": 0.0,
        "shared_memory_bytes": 8 * GB,
        "free_bytes": dict.fromkeys(FOLDERS, 100 * GB),
        "is_writable": dict.fromkeys(FOLDERS, True),
        "hub_is_offline": False,
        "has_token": True,
    }
    return dataclasses.replace(facts, machine=dataclasses.replace(facts.machine, **calm))


@functools.cache
def healthy() -> Facts:
    """An A100 on which nothing is off."""
    return look()


def change(facts: Facts, args: dict[str, Any] | None = None, machine: dict[str, Any] | None = None, **changes) -> Facts:
    """`facts` with some fields of its arguments, its machine and its own replaced; the original stays as it is."""
    if args:
        new = FastTrainingArguments(output_dir="never_made", report_to="none")
        vars(new).update({**vars(facts.args), **args})
        changes["args"] = new
    if machine:
        changes["machine"] = dataclasses.replace(facts.machine, **machine)
    return dataclasses.replace(facts, **changes)


def names(facts: Facts) -> list[tuple[str, str]]:
    return [(finding.name, finding.level) for finding in find_problems(facts)]

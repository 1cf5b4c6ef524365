"""Facts of runs on described machines, for tests of the doctor."""

import dataclasses
import functools
from typing import Any

from inside import GeneratorArguments, MaskedLMArguments, find_problems

from hf_ext.data import DataArguments
from hf_ext.doctor.gather import Facts, StageFacts, gather
from hf_ext.property import AffinityArguments
from hf_ext.tasks import Task, find_task
from hf_ext.training_args import FastTrainingArguments

GB = 10**9
FOLDERS = ("output_dir", "cache_dir", "hub_cache")
TASKS = {AffinityArguments: "affinity", MaskedLMArguments: "masked_lm", GeneratorArguments: "generation"}
CALM = {
    "in_colab": False,
    "drive_is_mounted": False,
    "has_nvidia_driver": False,
    "num_gpus": 0,
    "cpu_cores": 8,
    "free_bytes": dict.fromkeys(FOLDERS, 100 * GB),
    "is_writable": dict.fromkeys(FOLDERS, True),
    "hub_is_offline": False,
    "has_token": True,
}


def gather_facts(
    device: str | None = "a100",
    *,
    model: Any = None,
    data: DataArguments | None = None,
    task: Task | None = None,
    measure_seconds: float = 0.0,
    explicit: tuple[str, ...] = (),
    **arguments: Any,
) -> Facts:
    """What the doctor gathers about a run, the demo's if nothing is given; a machine with room and without Colab.

    `task`: of a script; None: the one of hf_ext that `model` is of.
    """
    model = model or AffinityArguments()
    task = task or find_task(TASKS[type(model)])
    args = FastTrainingArguments(**{"output_dir": "never_made", "speedups": ["all"], "report_to": "none", **arguments})
    args.mark_explicit(frozenset({*explicit, *arguments}))
    given = [model, data or DataArguments()][: len(task.arguments)]
    facts = gather(task, given, args, device, measure_seconds)
    return dataclasses.replace(facts, machine=dataclasses.replace(facts.machine, **CALM))


@functools.cache
def healthy() -> Facts:
    """An A100 on which nothing is off."""
    return gather_facts()


def main(facts: Facts) -> StageFacts:
    """The only stage."""
    assert facts.main is not None, facts.dry_run.problems
    return facts.main


def change(facts: Facts, args: dict[str, Any] | None = None, machine: dict[str, Any] | None = None, **changes) -> Facts:
    """`facts` with some fields of its arguments, machine, only stage and its own replaced; the original stays."""
    if args:
        new = FastTrainingArguments(output_dir="never_made", report_to="none")
        vars(new).update({**vars(facts.args), **args})
        changes["args"] = new
    if machine:
        changes["machine"] = dataclasses.replace(facts.machine, **machine)
    own = {name: changes.pop(name) for name in [*changes] if name in StageFacts.__dataclass_fields__}
    if own:
        changes["stages"] = [dataclasses.replace(main(facts), **own)]
    return dataclasses.replace(facts, **changes)


def names(facts: Facts) -> list[tuple[str, str]]:
    return [(finding.name, finding.level) for finding in find_problems(facts)]

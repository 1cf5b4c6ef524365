"""Look before you train: what this machine can do, what a command would take, what is off, and the remedy.

    hf-ext doctor --config gb1.yaml
    hf-ext doctor --config igt5_esm2.yaml --device t4
    hf-ext doctor --model_size esm2_650M --dataset_name proteins.fasta --device h100
    hf-ext doctor --stage auto --dataset_name pairs.csv --device v100 t4 a100 --dollars_per_hour 3.06 0.35 1.89

Takes every argument of `hf-ext train`; or, where one of them belongs to `hf-ext mlm` or `hf-ext generate` alone, of
that; `examine` takes a task of your own. Prints one screen: whether the command would run, how long, in how much
memory, what to change first; then what is off with its remedy, and what all this rests on. It is about your own data
where --dataset_name is given, else about the demo. Trains, downloads and writes nothing (of a model on the Hub its
config.json is read). Of several --device it prints a table instead. Exit status: 0 if the command would run, 1 if
something would stop it (on each of several).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import sys
from dataclasses import dataclass
from typing import Annotated

import yaml
from transformers.utils.logging import disable_progress_bar

from ..arguments import NOT_NEGATIVE, check_ranges, option, parse_command
from ..errors import ArgumentError, show_text
from ..files import CONFIGS, find_shipped
from ..hardware import describe_hardware
from ..tasks import TASKS, Task, find_task
from .findings import find_problems, would_run
from .gather import gather
from .page import format_machines, format_page


@dataclass
class DoctorArguments:
    """Which machine to look at, and how.

    Raises:
        ArgumentError: a `measure_seconds` that is no time, an unknown device.
    """

    _argument_group_name = "doctor"  # in --help
    _first_flags = ("device",)  # beside those of the run

    device: list[str] = option(
        [],
        "Look at another card instead of this machine: t4, a100, a100-80gb, h100, rtx-4090, sm86, ...; at several as "
        "one table.",
    )
    measure_seconds: Annotated[float, NOT_NEGATIVE] = option(
        2.0, "Seconds for timing a layer, or steps, of the model on this machine; 0 times nothing."
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in self.device:
            describe_hardware(name)


def guess_task(argv: list[str]) -> str:
    """Guesses the task by a flag, or a key of the YAML file, that only it has; "affinity" where all are common."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--config")
    given, words = scan.parse_known_args(argv)
    names = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    if given.config:
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # the parser says what is wrong with the file
            values = yaml.safe_load(find_shipped(given.config, CONFIGS).read_text())
            names |= set(values) if isinstance(values, dict) else set()
    names = {str(name).replace("-", "_") for name in names}
    own = {
        task: {spec.name for arguments in find_task(task).arguments for spec in dataclasses.fields(arguments)}
        for task in TASKS
    }
    if names & (own["generation"] - own["masked_lm"] - own["affinity"]):
        return "generation"
    if names & (own["masked_lm"] - own["affinity"]):
        return "masked_lm"
    return "affinity"


def main(argv: list[str] | None = None) -> int:
    """Prints the page of the task of hf_ext that the words are about; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return examine(find_task(guess_task(argv)), argv)


def examine(task: Task, argv: list[str] | None = None) -> int:
    """Prints the page of a run of `task`, which may be a script's own, or a table; returns the exit status.

    Args:
        argv: the words of the command line; None takes the process's own.

    Raises:
        ArgumentError: as the run; or prices of another number than of devices.

    Cost: that of `gather` for each device.
    """
    disable_progress_bar()  # of the demo encoders that are written to a temporary folder
    _, parsed = parse_command((*task.all_arguments, DoctorArguments), task.defaults, __doc__, argv)
    *_, given, asked = parsed
    if given.process_index > 0:
        return 0  # under a launcher the main process measures, with the machine to itself, and prints
    devices = asked.device or [None]
    prices = given.dollars_per_hour
    if len(prices) > 1 and len(prices) != len(devices):
        raise ArgumentError(
            f"dollars_per_hour={prices}: give one price, or one for each of the {len(devices)} devices."
        )
    looked = []
    for number, device in enumerate(devices):
        *arguments, args, _ = copy.deepcopy(parsed)  # which become what the run would make of them
        args.dollars_per_hour = (prices * len(devices))[number : number + 1]
        facts = gather(task, arguments, args, device, asked.measure_seconds)
        looked.append((facts, find_problems(facts)))
    print(show_text(format_page(*looked[0]) if len(looked) == 1 else format_machines(looked)))
    return 0 if any(would_run(findings) for _, findings in looked) else 1

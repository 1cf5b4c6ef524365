"""Sides of a comparison, and the command line that runs one of them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from ..arguments.config_file import read_nodes
from ..arguments.presets import PRESETS
from ..errors import ArgumentError
from ..files import CONFIGS, LAUNCHERS, RECIPES, find_shipped
from .arguments import CompareArguments

Role = Literal["baseline", "optimized", "without", "only"]
STOCK = ("--preset", "baseline", "--stock_trainer", "true")
LOGGING_STEPS = 10  # between points of the loss curves


@dataclass(frozen=True)
class Launch:
    """A file for `accelerate launch`, the processes that it starts, and more flags of the launcher."""

    file: str
    num_processes: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file without its ending, and how many processes where there are several."""
        stem = Path(self.file).stem
        return stem if self.num_processes == 1 else f"{stem} x{self.num_processes}"

    def __str__(self) -> str:
        return shlex.join([self.file, *self.flags])

    def command(self) -> list[str]:
        """What stands before the recipe, with this Python."""
        return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", self.file, *self.flags]


@dataclass(frozen=True)
class Side:
    """One way to run the recipe. `speedup` is what an ablation leaves out ("without") or runs alone ("only").

    `launch` is its own launch file, if it has one.
    """

    name: str
    role: Role
    arguments: tuple[str, ...]
    config: str | None = None
    speedup: str | None = None
    launch: Launch | None = None


def make_sides(args: CompareArguments) -> list[Side]:
    """All baselines, then the optimized side; launch files are part of names, equal names are numbered.

    Raises:
        ArgumentError: a side is no preset, no YAML file that is there, and not 'stock'; or see `read_launch`.
    """
    extras = _spread(args.baseline_args, len(args.baseline)) or [""] * len(args.baseline)
    sides = [_make_side(text, "baseline", extra) for text, extra in zip(args.baseline, extras)]
    sides.append(_make_side(args.optimized, "optimized", args.optimized_args))
    if args.optimized_launch:
        files = [*_spread(args.baseline_launch, len(args.baseline)), args.optimized_launch]
        sides = [_launch_side(side, file) for side, file in zip(sides, files)]
    named: list[Side] = []
    for side in sides:
        same = sum(side.name == other.name.partition("#")[0] for other in named)
        named.append(replace(side, name=f"{side.name}#{same + 1}") if same else side)
    return named


def _spread(values: list[str], count: int) -> list[str]:
    """One value for all, or one each."""
    return values * count if len(values) == 1 else values


def _launch_side(side: Side, text: str) -> Side:
    launch = read_launch(text, f"{side.role}_launch")
    return replace(side, name=f"{side.name} on {launch.name}", launch=launch)


def _make_side(text: str, role: Role, extra: str) -> Side:
    more = tuple(shlex.split(extra))
    if text == "stock":
        return Side("stock", role, (*STOCK, *more))
    if text.endswith((".yaml", ".yml")):
        path = find_shipped(text, CONFIGS)
        if not path.is_file():
            raise ArgumentError(f"--{role} {text}: no such file in {Path.cwd()}, and none that comes with hf_ext.")
        return Side(path.stem, role, more, config=str(path))
    unknown = [name for name in text.split("+") if name not in PRESETS]
    if unknown:
        raise ArgumentError(
            f"--{role} {text!r}: {unknown} is no preset. Give 'stock', a YAML file, or presets: {', '.join(PRESETS)}."
        )
    return Side(text, role, ("--preset", text, *more))


def make_ablations(optimized: Side, plan: dict[str, Any]) -> list[Side]:
    """For each speed-up that the optimized run's plan applied: all but that one, and that one alone."""
    decisions = {decision["name"]: decision["status"] for decision in plan["decisions"]}
    # `--without` replaces a list from a preset or YAML, so what was off before is named again.
    off = [name for name, status in decisions.items() if status == "off"]
    sides = []
    for name in (name for name, status in decisions.items() if status == "applied"):
        all_but = (*optimized.arguments, "--without", name, *off)
        alone = (*optimized.arguments, "--speedups", name)
        same = replace(optimized, speedup=name)
        sides.append(replace(same, name=f"without {name}", role="without", arguments=all_but))
        sides.append(replace(same, name=f"only {name}", role="only", arguments=alone))
    return sides


def make_command(args: CompareArguments, shared: Sequence[str], side: Side, folder: Path, round_: int) -> list[str]:
    """The command of one run. Later arguments win: this function's, those for all sides, the side's, the folder."""
    launcher = [sys.executable] if side.launch is None else side.launch.command()
    config = _config_of(args, side, folder)
    ours: dict[str, Any] = {
        "logging_strategy": "steps",
        "logging_steps": LOGGING_STEPS,
        "seed": args.seed + round_,
        "report_to": "none",
        "disable_tqdm": "true",
    }
    if side.arguments[: len(STOCK)] != STOCK:  # the stock Trainer has none
        # Each run pays for its own embeddings; a shared cache would give them to the second run for nothing.
        ours["embedding_cache_dir"] = folder / "embeddings"
    flags = [part for name, value in ours.items() for part in (f"--{name}", str(value))]
    own_config = ["--config", config] if config else []
    script = find_shipped(args.recipe, RECIPES)
    return [*launcher, str(script), *own_config, *flags, *shared, *side.arguments, "--output_dir", str(folder)]


def _config_of(args: CompareArguments, side: Side, folder: Path) -> str | None:
    """The YAML of a run: the shared one, the side's, or the side's on top of the shared one as a new file."""
    if not (args.config and side.config):
        return str(find_shipped(args.config, CONFIGS)) if args.config else side.config
    merged = folder.parent / f"{folder.name}.yaml"
    merged.parent.mkdir(parents=True, exist_ok=True)
    merged.write_text(merge_yaml(args.config, side.config), encoding="utf-8")
    return str(merged)


def merge_yaml(below: str, above: str) -> str:
    """The text of two YAML mappings in one; keys of `above` win. Values stay as they are written (`no` stays `no`).

    Raises:
        ArgumentError: a file cannot be read, or is no mapping.
    """
    first, second = read_nodes(below), read_nodes(above)
    taken = {_key(key) for key, _ in second.value}
    first.value = [pair for pair in first.value if _key(pair[0]) not in taken] + second.value
    return yaml.serialize(first, Dumper=yaml.SafeDumper)


def _key(node: yaml.Node) -> str:
    return str(node.value).replace("-", "_")


def read_launch(text: str, flag: str) -> Launch:
    """Reads a config file and checks that this machine can start it.

    Args:
        text: a YAML file as in accelerate_configs, or the name of one there; flags of `accelerate launch` may follow.
        flag: the argument that named it, for messages.

    Raises:
        ArgumentError: the file is absent, no Accelerate config, says no number of processes, or is for several machines
            or more GPUs than here.
    """
    file, *flags = shlex.split(text) or [""]
    path = str(find_shipped(file, LAUNCHERS))
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ArgumentError(f"--{flag} {path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ArgumentError(
            f"--{flag} {path}: no Accelerate config (distributed_type is missing). Those are in accelerate_configs; a "
            "recipe's YAML belongs to --config, --baseline or --optimized."
        )
    if config.get("num_machines", 1) > 1:
        raise ArgumentError(
            f"--{flag} {path}: for {config['num_machines']} machines; a comparison starts processes on this one only."
        )
    num_processes = _num_processes(config, flags)
    if num_processes is None:
        raise ArgumentError(
            f"--{flag} {path}: says no number of processes. Give it with the file, as one text: "
            f'--{flag} "{file} --num_processes 2".'
        )
    num_gpus = torch.accelerator.device_count()
    if not config.get("use_cpu", False) and num_processes > num_gpus:
        raise ArgumentError(
            f"--{flag} {path}: for {num_processes} GPU(s), and this machine has {num_gpus}. Start fewer, or give "
            'cpu.yaml, for several processes "cpu.yaml --multi_gpu --num_processes 2".'
        )
    return Launch(path, num_processes, tuple(flags))


def _num_processes(config: dict[str, Any], flags: list[str]) -> int | None:
    """Of the launcher's flags, else of its file; a file for one process need not say so."""
    known = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    known.add_argument("--num_processes", type=int, default=config.get("num_processes"))
    try:
        given = known.parse_known_args(flags)[0].num_processes
    except argparse.ArgumentError as error:
        raise ArgumentError(f"{shlex.join(flags)}: {error}") from error
    return 1 if given is None and config["distributed_type"] == "NO" else given

"""Sides of a comparison, and the command line that runs one of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from ..arguments.config_file import read_nodes
from ..arguments.presets import PRESETS
from ..errors import ArgumentError
from ..files import CONFIGS, RECIPES, find_shipped, shipped_folder
from .arguments import CompareArguments
from .launching import Launch, read_launch

Role = Literal["baseline", "optimized", "without", "only", "phase", "single"]
STOCK = ("--preset", "baseline", "--stock_trainer", "true")
ROW_BY_ROW = "row_by_row"
SLOW_SCRIPT = shipped_folder("benchmarks") / f"{ROW_BY_ROW}.py"  # of a clone
SLOW_RECIPE = "max_speed.py"  # whose arguments the script takes
# As such scripts are run: 12 rows per pass. Later arguments win over those for all sides.
SLOW_ARGUMENTS = (
    *("--preset", "baseline", "--per_device_train_batch_size", "12", "--gradient_accumulation_steps", "1"),
    *("--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"),
)


@dataclass(frozen=True)
class Side:
    """One way to run the recipe. `speedup` is what an ablation leaves out ("without") or runs alone ("only").

    `launch` is its own launch file, if it has one. `script` runs in the recipe's place; it trains on a sample of the
    rows only, so that nothing but its speed can be compared.
    """

    name: str
    role: Role
    arguments: tuple[str, ...]
    config: str | None = None
    speedup: str | None = None
    launch: Launch | None = None
    script: str | None = None


def make_sides(args: CompareArguments) -> list[Side]:
    """All baselines, then the optimized side; launch files are part of names, equal names are numbered.

    Raises:
        ArgumentError: a side is no preset, no YAML file that is there, and not 'stock'; 'row_by_row' of another recipe
            than the one that it is measured for, or outside of a clone; or see `read_launch`.
    """
    extras = _spread(args.baseline_args, len(args.baseline)) or [""] * len(args.baseline)
    sides = [
        _make_slow_side(args, extra) if text == ROW_BY_ROW else _make_side(text, "baseline", extra)
        for text, extra in zip(args.baseline, extras)
    ]
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


def _launch_side(side: Side, file: str) -> Side:
    launch = read_launch(file, f"{side.role}_launch")
    return replace(side, name=f"{side.name} on {Path(file).stem}", launch=launch)


def _make_slow_side(args: CompareArguments, extra: str) -> Side:
    if Path(args.recipe).name != SLOW_RECIPE or not SLOW_SCRIPT.is_file():
        raise ArgumentError(
            f"--baseline {ROW_BY_ROW} with --recipe {args.recipe}: it is benchmarks/{ROW_BY_ROW}.py of a clone, "
            f"with the arguments of recipes/{SLOW_RECIPE}. Run that recipe in a clone, or use 'stock' or a preset."
        )
    more = (*SLOW_ARGUMENTS, "--sample_rows", str(args.sample_rows), *shlex.split(extra))
    return Side(ROW_BY_ROW, "baseline", more, script=str(SLOW_SCRIPT))


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
        slow = f"'{ROW_BY_ROW}', " if role == "baseline" else ""
        raise ArgumentError(
            f"--{role} {text!r}: {unknown} is no preset. Give 'stock', a YAML file, {slow}or presets: "
            f"{', '.join(PRESETS)}."
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
    launcher = shlex.split(args.launch) if args.launch else [sys.executable]
    if side.launch is not None:
        launcher = side.launch.command()
    config = _config_of(args, side, folder)
    ours: dict[str, Any] = {
        "logging_strategy": "steps",
        "logging_steps": args.logging_steps,
        "seed": args.seed + round_,
        "report_to": "none",
        "disable_tqdm": "true",
    }
    if side.arguments[: len(STOCK)] != STOCK:  # the stock Trainer has none
        # Each run pays for its own embeddings; a shared cache would give them to the second run for nothing.
        ours["embedding_cache_dir"] = folder / "embeddings"
    flags = [part for name, value in ours.items() for part in (f"--{name}", str(value))]
    own_config = ["--config", config] if config else []
    script = side.script or str(find_shipped(args.recipe, RECIPES))
    return [*launcher, script, *own_config, *flags, *shared, *side.arguments, "--output_dir", str(folder)]


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

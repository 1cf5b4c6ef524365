"""What a comparison is asked to compare: its arguments, its sides, and the command line that runs one of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import yaml

from ..arguments import ABOVE_ZERO, FINITE, NOT_NEGATIVE, PRESETS, SEED, Count, check_ranges, option, ranges_in_types
from ..errors import ArgumentError
from ..files import CONFIGS, LAUNCHERS, Json, find_shipped
from ..reporting import PlanRecord

Role = Literal["baseline", "optimized", "without", "left out", "frozen", "lora", "full", "likelihood"]
STOCK = ("--preset", "baseline", "--stock_trainer", "true")
LOGGING_STEPS = 10  # between points of the loss curves
CRITERIA = ("min_speedup", "max_loss_delta", "max_memory_gib", "max_metric_drop")
# Of arguments that name sides otherwise: those that go with them.
OF_ALL = ("recipe", "output_dir", "seed")
GOES_WITH = {
    "sides": OF_ALL,
    "progression": (*OF_ALL, "rounds", "metric", "greater_is_better", "dollars_per_hour", *CRITERIA),
}


@dataclass
class CompareArguments:
    """Two or more sides of one recipe. What stands after `--` on the command line goes to all sides.

    Raises:
        ArgumentError: a number out of range, or two arguments that contradict each other.
    """

    _argument_groups = {
        "sides": (
            *("recipe", "sides", "progression", "baseline", "baseline_launch", "optimized", "optimized_launch"),
            "ablate",
        ),
        "measurement": ("output_dir", "rounds", "seed", "metric", "greater_is_better", "dollars_per_hour"),
        "criteria": CRITERIA,
    }
    _first_flags = (
        *("recipe", "sides", "progression", "baseline", "optimized", "ablate", "output_dir", "rounds", "metric"),
        *("greater_is_better", *CRITERIA),
    )

    output_dir: str = option("outputs/comparison", "Where runs and the report go.")
    recipe: str = option("train", "What all sides run: a command of hf-ext (train, mlm, generate), or a script.")
    sides: list[str] = option(
        [],
        "Instead of --baseline and --optimized: two or more of frozen, lora, full and likelihood, each with flags of "
        'its own in one quoted text, such as "lora --lora_r 16"; which way to train encoders scores better on the same '
        "test rows.",
    )
    progression: str | None = option(
        None,
        "Instead of --baseline and --optimized: a YAML file of phases, each on top of those before it, beside what is "
        "claimed of them; progression_affinity.yaml and progression_pde.yaml come with hf_ext.",
    )
    baseline: list[str] = option(
        ["baseline"],
        "One or more: a preset, a YAML file, or 'stock' (transformers.Trainer itself); with flags of its own in one "
        'quoted text, such as "stock --bf16 true".',
    )
    optimized: str = option("max_speed", "As --baseline.")
    rounds: Count = option(3, "How often every side runs; sides take turns. With more, those that are done are kept.")
    seed: Annotated[int, SEED] = option(42, "Of the first round; each round adds 1, for all sides alike.")
    baseline_launch: str | None = option(
        None, "Accelerate config file to launch baselines with; flags of the launcher may follow in the same text."
    )
    optimized_launch: str | None = option(None, "Accelerate config file to launch the optimized side with.")
    metric: str = option("eval_loss", "Final metric: a dotted path in all_results.json, or a logged name.")
    greater_is_better: bool = option(False, "Of --metric.")
    dollars_per_hour: Annotated[float, NOT_NEGATIVE] | None = option(
        None, "Price of the machine: what an epoch and a run of each side cost."
    )
    min_speedup: Annotated[float, ABOVE_ZERO] | None = option(
        None, "Pass where the ratio's interval begins here or above, fail where it ends below: every baseline."
    )
    max_loss_delta: float | None = option(None, "Fail if the final training loss is higher than a baseline's by more.")
    max_memory_gib: Annotated[float, ABOVE_ZERO] | None = option(
        None, "Fail if the optimized side's peak memory is larger."
    )
    max_metric_drop: float | str | None = option(
        None,
        "Fail if --metric is worse than a baseline's by more: by a number, or by a share of it, such as 3%%, which is "
        "judged by its interval, as --min_speedup is.",
    )
    ablate: bool = option(False, "Also run without each applied speed-up.")

    def __post_init__(self) -> None:
        drop = str(self.max_metric_drop or 0.0)
        self.drop_is_share = drop.endswith("%")
        try:
            number = float(drop.removesuffix("%"))
        except ValueError:
            raise ArgumentError(f"--max_metric_drop {drop}: give a number, or a share such as 3%.") from None
        if self.max_metric_drop is not None:
            self.max_metric_drop = number / 100 if self.drop_is_share else number
        check_ranges(self, {**dict.fromkeys(CRITERIA, FINITE), **ranges_in_types(CompareArguments)})
        for way in filter(partial(getattr, self), GOES_WITH):
            fitting = GOES_WITH[way]
            usual = {name: value for name, value in vars(CompareArguments()).items() if name not in (way, *fitting)}
            usual.pop("drop_is_share")  # of `max_metric_drop`, which stands for itself
            if other := [f"--{name}" for name in usual if getattr(self, name) != usual[name]]:
                raise ArgumentError(f"--{way} goes with --{', --'.join(fitting)} alone: leave out {', '.join(other)}.")


@dataclass(frozen=True)
class Side:
    """One way to run the recipe.

    Attributes:
        speedup: what an ablation leaves out.
        launch: words for `accelerate launch`.
        claimed, note: of a phase of a progression: least and most of its factor; what is said of it.
    """

    name: str
    role: Role
    arguments: tuple[str, ...]
    speedup: str | None = None
    launch: tuple[str, ...] = ()
    claimed: Sequence[float] = ()
    note: str = ""


def make_sides(args: CompareArguments, shared: Sequence[str] = ()) -> list[Side]:
    """Makes all baselines, then the optimized side; equal names are numbered.

    Raises:
        ArgumentError: a side is no preset, no YAML file that is there, and not 'stock'; is 'stock' of a generator; is a
            YAML file while `shared` names one; or see `read_launch`.
    """
    sides = [_make_side(text, "baseline", args.baseline_launch) for text in args.baseline]
    sides.append(_make_side(args.optimized, "optimized", args.optimized_launch))
    for side in sides:
        if side.name == "stock" and args.recipe == "generate":
            raise ArgumentError("--baseline stock: hf-ext generate has no stock side, give --baseline baseline.")
        if "--config" in side.arguments and "--config" in shared:
            raise ArgumentError(f"--{side.role} {side.name}: a YAML file, and --config after -- is another: give one.")
    return number_names(sides)


def number_names(sides: Sequence[Side]) -> list[Side]:
    """Returns the same sides; the second of a name is `NAME#2`."""
    named: list[Side] = []
    for side in sides:
        same = sum(side.name == other.name.partition("#")[0] for other in named)
        named.append(replace(side, name=f"{side.name}#{same + 1}") if same else side)
    return named


def _make_side(text: str, role: Role, launch: str | None) -> Side:
    name, *more = shlex.split(text) or [""]
    words = read_launch(launch, f"{role}_launch") if launch else ()
    if name == "stock":
        return Side(name, role, (*STOCK, *more), launch=words)
    if name.endswith((".yaml", ".yml")):
        path = find_shipped(name, CONFIGS)
        if not path.is_file():
            raise ArgumentError(f"--{role} {name}: no such file in {Path.cwd()}, and none that comes with hf_ext.")
        return Side(path.stem, role, ("--config", str(path), *more), launch=words)
    unknown = [one for one in name.split("+") if one not in PRESETS]
    if unknown:
        raise ArgumentError(
            f"--{role} {name!r}: {unknown} is no preset. Give 'stock', a YAML file, or presets: {', '.join(PRESETS)}."
        )
    return Side(name, role, ("--preset", name, *more), launch=words)


def make_ablations(optimized: Side, plan: PlanRecord) -> list[Side]:
    """Makes for each speed-up that the optimized run's plan applied a side with all but that one."""
    # `--without` replaces a list from a preset or YAML, so what was off before is named again.
    off = [one.name for one in plan.decisions if one.status == "off"]
    return [
        replace(
            optimized,
            name=f"without {one.name}",
            role="without",
            speedup=one.name,
            arguments=(*optimized.arguments, "--without", one.name, *off),
        )
        for one in plan.decisions
        if one.status == "applied"
    ]


def make_command(args: CompareArguments, shared: Sequence[str], side: Side, folder: Path, round_: int) -> list[str]:
    """Makes the command of one run. Later arguments win: ours, those for all sides, the side's, the folder."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", *side.launch] if side.launch else []
    ours: Json = {
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
    return [
        sys.executable,
        *launcher,
        *find_program(args.recipe),
        *flags,
        *shared,
        *side.arguments,
        "--output_dir",
        str(folder),
    ]


def find_program(recipe: str) -> list[str]:
    """Returns the words that start a recipe, a command of hf-ext or a script."""
    return [recipe] if recipe.endswith(".py") else ["-m", "hf_ext", recipe]


def read_launch(text: str, flag: str) -> tuple[str, ...]:
    """Returns the file of an Accelerate config, and the launcher's flags after it.

    Args:
        text: a YAML file as in accelerate_configs, or the name of one there; flags of `accelerate launch` may follow.
        flag: the argument that named it, for messages.

    Raises:
        ArgumentError: the file is absent, or no Accelerate config.
    """
    file, *flags = shlex.split(text) or [""]
    path = find_shipped(file, LAUNCHERS)
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ArgumentError(f"--{flag} {path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ArgumentError(
            f"--{flag} {path}: no Accelerate config (distributed_type is missing). Those are in accelerate_configs; a "
            "recipe's YAML is a side, or --config after --."
        )
    return str(path), *flags

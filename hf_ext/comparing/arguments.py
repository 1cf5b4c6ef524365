"""What a comparison needs to know."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ArgumentError


@dataclass
class CompareArguments:
    """Two or more sides of one recipe. What stands after `--` on the command line goes to all sides."""

    _argument_groups = {
        "sides": (
            *("recipe", "config", "baseline", "baseline_args", "optimized", "optimized_args", "ablate"),
            *("progression", "singles"),
        ),
        "measurement": (
            *("output_dir", "rounds", "max_rounds", "seed", "warmup_run", "logging_steps"),
            *("sample_rows", "metric"),
            *("greater_is_better", "timed_by"),
        ),
        "launching": ("launch", "baseline_launch", "optimized_launch"),
        "criteria": ("min_speedup", "max_loss_delta", "max_memory_gib", "max_metric_drop"),
    }
    _first_flags = (
        *("recipe", "config", "baseline", "baseline_args", "optimized", "optimized_args", "ablate", "progression"),
        *("output_dir", "rounds", "max_rounds", "seed", "metric", "greater_is_better", "baseline_launch"),
        *("optimized_launch", "min_speedup", "max_loss_delta", "max_memory_gib", "max_metric_drop"),
    )

    output_dir: str = field(default="outputs/comparison", metadata={"help": "Where runs and the report go."})
    recipe: str = field(default="recipes/max_speed.py", metadata={"help": "The recipe that all sides run."})
    config: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": "YAML of the recipe, shared by all sides; a side's own YAML goes on top."}
    )
    baseline: list[str] = field(
        default_factory=lambda: ["baseline"],
        metadata={
            "help": "One or more: a preset, a YAML file, 'stock' (transformers.Trainer itself), or for max_speed.py "
            "in a clone 'row_by_row' (each row by itself through the frozen encoders, in every epoch; of a sample)."
        },
    )
    baseline_args: list[str] = field(
        default_factory=list,
        metadata={"help": "More arguments, quoted as one text per baseline, or one text for all of them."},
    )
    optimized: str = field(default="max_speed", metadata={"help": "As --baseline."})
    optimized_args: str = field(default="", metadata={"help": "More arguments for the optimized side, as one text."})
    rounds: int = field(default=3, metadata={"help": "How often every side runs; sides take turns."})
    max_rounds: None | int = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "Rounds are added, up to so many, while --min_speedup is too noisy to tell; default: three times "
            "--rounds. Not with --progression."
        },
    )
    seed: int = field(default=42, metadata={"help": "Of the first round; each round adds 1, for all sides alike."})
    warmup_run: bool = field(default=False, metadata={"help": "Run every side once before, and discard that."})
    sample_rows: int = field(
        default=96, metadata={"help": "Training rows on which --baseline row_by_row is measured in each round."}
    )
    logging_steps: int = field(default=10, metadata={"help": "Steps between points of the loss curves."})
    launch: str = field(
        default="", metadata={"help": "Launcher, such as 'accelerate launch --num_processes 2'; else this Python."}
    )
    baseline_launch: list[str] = field(
        default_factory=list,
        metadata={"help": "Accelerate config file(s) to launch baselines with: one for all baselines, or one each."},
    )
    optimized_launch: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": "Accelerate config file to launch the optimized side with."}
    )
    metric: str = field(
        default="eval_loss", metadata={"help": "Final metric: a dotted path in all_results.json, or a logged name."}
    )
    greater_is_better: bool = field(default=False, metadata={"help": "Of --metric."})
    min_speedup: None | float = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "Pass where the ratio's interval begins here or above, fail where it ends below: every baseline."
        },
    )
    max_loss_delta: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Fail if the final training loss is higher than a baseline's by more."}
    )
    max_memory_gib: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Fail if the optimized side's peak memory is larger."}
    )
    max_metric_drop: None | float = field(  # noqa: RUF036
        default=None, metadata={"help": "Fail if --metric is worse than a baseline's by more."}
    )
    ablate: bool = field(
        default=False, metadata={"help": "Also run without each applied speed-up, and with each one alone."}
    )

    progression: None | str = field(  # noqa: RUF036
        default=None,
        metadata={"help": "YAML of phases that are switched on one after another, instead of two sides to compare."},
    )
    timed_by: Literal["clock", "processor"] = field(
        default="clock",
        metadata={"help": "What steps are timed by; processor where other programs share a CPU."},
    )
    singles: bool = field(default=False, metadata={"help": "With --progression: also run each phase alone."})

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("logging_steps", 1), ("sample_rows", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(f"--{name} {getattr(self, name)}: must be at least {least}.")
        for name in self._argument_groups["criteria"]:
            limit = getattr(self, name)
            if limit is not None and not math.isfinite(limit):
                raise ArgumentError(f"--{name} {limit}: must be a number, by which something can pass or fail.")
        if self.max_rounds is not None and self.max_rounds < self.rounds:
            raise ArgumentError(f"--max_rounds {self.max_rounds}: must be at least --rounds, {self.rounds}.")
        if self.max_rounds is not None and self.min_speedup is None and not self.progression:
            raise ArgumentError(f"--max_rounds {self.max_rounds} adds rounds until --min_speedup is decided: give one.")
        for name, what in (("baseline_args", "texts"), ("baseline_launch", "files")):
            given = len(getattr(self, name))
            if given not in (0, 1, len(self.baseline)):
                raise ArgumentError(
                    f"--{name} has {given} {what} for {len(self.baseline)} baselines: give one for all, or one each."
                )
        if bool(self.baseline_launch) != bool(self.optimized_launch):
            raise ArgumentError("--baseline_launch and --optimized_launch go together: give a file to each side.")
        self._check_progression()
        if self.launch and self.optimized_launch:
            raise ArgumentError(
                "--launch starts all sides, --baseline_launch and --optimized_launch each its own: choose."
            )

    @property
    def most_rounds(self) -> int:
        """Rounds that may be run until the criteria can be judged."""
        if self.min_speedup is None or self.progression:
            return self.rounds
        return 3 * self.rounds if self.max_rounds is None else self.max_rounds

    def _check_progression(self) -> None:
        if self.singles and not self.progression:
            raise ArgumentError("--singles runs the phases of --progression FILE alone: give a file.")
        sides = ("baseline", "baseline_args", "optimized", "optimized_args", "ablate", "optimized_launch", "max_rounds")
        defaults = vars(CompareArguments()) if self.progression else vars(self)
        changed = [name for name in sides if getattr(self, name) != defaults[name]]
        if changed:
            raise ArgumentError(f"--progression has sides of its own: leave --{' and --'.join(changed)} out.")

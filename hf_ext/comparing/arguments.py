"""What a comparison needs to know."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..arguments.training_fields import option
from ..errors import ArgumentError

CRITERIA = ("min_speedup", "max_loss_delta", "max_memory_gib", "max_metric_drop")


@dataclass
class CompareArguments:
    """Two or more sides of one recipe. What stands after `--` on the command line goes to all sides.

    Raises:
        ArgumentError: a number out of range, or two arguments that contradict each other.
    """

    _argument_groups = {
        "sides": (
            *("recipe", "config", "baseline", "baseline_args", "baseline_launch"),
            *("optimized", "optimized_args", "optimized_launch", "ablate"),
        ),
        "measurement": ("output_dir", "rounds", "max_rounds", "seed", "metric", "greater_is_better"),
        "criteria": CRITERIA,
    }
    _first_flags = (
        *("recipe", "config", "baseline", "optimized", "ablate", "output_dir", "rounds", "metric"),
        *("greater_is_better", *CRITERIA),
    )

    output_dir: str = option("outputs/comparison", "Where runs and the report go.")
    recipe: str = option("recipes/max_speed.py", "The recipe that all sides run.")
    config: str | None = option(None, "YAML of the recipe, shared by all sides; a side's own YAML goes on top.")
    baseline: list[str] = option(
        ["baseline"], "One or more: a preset, a YAML file, or 'stock' (transformers.Trainer itself)."
    )
    baseline_args: list[str] = option(
        [], "More arguments, quoted as one text per baseline, or one text for all of them."
    )
    optimized: str = option("max_speed", "The side that is judged; as --baseline.")
    optimized_args: str = option("", "More arguments for the optimized side, as one text.")
    rounds: int = option(3, "How often every side runs; sides take turns.")
    max_rounds: int | None = option(
        None,
        "Rounds are added, up to so many, while --min_speedup is too noisy to tell; left out: three times --rounds.",
    )
    seed: int = option(42, "Seed of the first round; each round adds 1, for all sides alike.")
    baseline_launch: list[str] = option(
        [],
        "Accelerate config file(s) to launch baselines with: one for all, or one each; its flags may follow.",
    )
    optimized_launch: str | None = option(None, "As --baseline_launch, for the optimized side.")
    metric: str = option("eval_loss", "Final metric: a dotted path in all_results.json, or a logged name.")
    greater_is_better: bool = option(False, "Whether a larger --metric is better.")
    min_speedup: float | None = option(
        None,
        "Pass if the interval of the speed ratio begins here or above, fail if it ends below; against every baseline.",
    )
    max_loss_delta: float | None = option(None, "Fail if the final training loss is higher than a baseline's by more.")
    max_memory_gib: float | None = option(None, "Fail if the optimized side's peak memory is larger.")
    max_metric_drop: float | None = option(None, "Fail if --metric is worse than a baseline's by more.")
    ablate: bool = option(False, "Also run without each applied speed-up, and with each one alone.")

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ArgumentError(f"--rounds {self.rounds}: must be at least 1.")
        for name in CRITERIA:
            limit = getattr(self, name)
            if limit is not None and not math.isfinite(limit):
                raise ArgumentError(f"--{name} {limit}: must be a number, by which something can pass or fail.")
        if self.max_rounds is not None and self.max_rounds < self.rounds:
            raise ArgumentError(f"--max_rounds {self.max_rounds}: must be at least --rounds, {self.rounds}.")
        if self.max_rounds is not None and self.min_speedup is None:
            raise ArgumentError(f"--max_rounds {self.max_rounds} adds rounds until --min_speedup is decided: give one.")
        for name, what in (("baseline_args", "texts"), ("baseline_launch", "files")):
            given = len(getattr(self, name))
            if given not in (0, 1, len(self.baseline)):
                raise ArgumentError(
                    f"--{name} has {given} {what} for {len(self.baseline)} baselines: give one for all, or one each."
                )
        if bool(self.baseline_launch) != bool(self.optimized_launch):
            raise ArgumentError("--baseline_launch and --optimized_launch go together: give a file to each side.")

    @property
    def most_rounds(self) -> int:
        """Rounds that may be run until the criteria can be judged."""
        if self.min_speedup is None:
            return self.rounds
        return 3 * self.rounds if self.max_rounds is None else self.max_rounds

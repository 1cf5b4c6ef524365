"""Three stages of training, each with its own size, rows and length, and what each must reach."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..models.generation.configuration import SIZES
from ..reporting.units import format_cell
from .judging.gates import NUM_ERRORS, REQUIREMENTS


@dataclass(frozen=True)
class Stage:
    """What a stage sets where the user did not; None leaves the recipe's default, or no limit.

    Attributes:
        goal: in a few words.
        size: of the model.
        max_train_samples, max_validation_samples: rows.
        min_affinity: training rows need a larger label.
        num_train_epochs, per_device_train_batch_size, gradient_accumulation_steps: of the Trainer.
        load_best_model_at_end, early_stopping_patience: stage 1 is to memorise its rows, so it keeps its last model.
    """

    goal: str
    size: str
    max_train_samples: int | None
    max_validation_samples: int | None
    min_affinity: float | None
    num_train_epochs: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    load_best_model_at_end: bool
    early_stopping_patience: int | None


STAGES: dict[int, Stage] = {
    1: Stage("proof", "tiny", 1_000, 100, 7.0, 10, 32, 1, False, None),
    2: Stage("quality", "small", 10_000, 1_000, 7.0, 20, 64, 1, True, 5),
    3: Stage("full", "full", None, None, None, 50, 64, 2, True, 5),
}
# Of AdamW, for layers 128 wide; of wider ones in inverse proportion (Yang et al., arXiv:2203.03466). Chosen by single
# runs of ten epochs on 1,000 real pairs at 1e-3 to 2e-2: LSTMs 128 and 256 wide, and the tiny Transformer with antigens
# cut short. Others are not tried.
LEARNING_RATES = {"lstm": 1e-2, "transformer": 3e-3, "light": 3e-3, "esm": 3e-3}
ENCODER_LEARNING_RATES = {"frozen": None, "lora": 3e-4, "full": 3e-5}  # usual for pretrained encoders, not measured


def settle_stage(number: int, model_args: Any, data_args: Any, args: Any, explicit: Collection[str]) -> dict[str, Any]:
    """Gives the arguments what a stage says, where the user said nothing; returns what was set.

    Args:
        number: 1, 2 or 3.
        model_args, data_args, args: `GeneratorArguments`, `DataArguments`, `FastTrainingArguments`; changed.
        explicit: names that the user set, and that stay.
    """
    stage, changed = STAGES[number], {}
    batch = {"per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size"}
    sets_batch = bool(batch & {*explicit}) or args.max_tokens_per_batch is not None
    own = {*explicit, *(batch if sets_batch else ()), *(("num_train_epochs",) if "max_steps" in explicit else ())}
    for name, value in vars(stage).items():
        if name != "goal" and name not in own:
            target = next(one for one in (data_args, model_args, args) if hasattr(one, name))
            setattr(target, name, value)
            changed[name] = value
    width_name = "hidden_size" if model_args.architecture == "lstm" else "d_model"
    width = model_args.shape.get(width_name) or SIZES[model_args.architecture][model_args.size][width_name]
    rates = {
        "learning_rate": float(f"{LEARNING_RATES[model_args.architecture] * 128 / width:.2g}"),
        "encoder_learning_rate": ENCODER_LEARNING_RATES[model_args.encoder_training],
    }
    for name, rate in rates.items():
        if name not in explicit and rate is not None:
            setattr(args, name, rate)
            changed[name] = rate
    return changed


def describe_stage(number: int, changed: dict[str, Any], is_alone: bool) -> str:
    """What the log says before anything is read."""
    listed = ", ".join(f"{name} {value}" for name, value in changed.items() if value is not None)
    lines = [f"Stage {number} ({STAGES[number].goal}): {listed or 'every value is your own'}."]
    if number > 1 and is_alone:
        lines.append(f"  Whether stage {number - 1} passed its gates is not looked at; --stage auto does so.")
    if number > 1 and not is_alone:
        lines.append(f"  New weights and another choice of rows: nothing of stage {number - 1} is carried over.")
    return "\n".join(lines)


def check_auto(args: Any) -> None:
    """Raises ArgumentError where `--stage auto` was given what only one stage can have."""
    if args.push_to_hub:
        raise ArgumentError("--stage auto with --push_to_hub: push the stage that you want, with --stage 1, 2 or 3.")
    if args.resume not in ("auto", "no") or args.resume_from_checkpoint:
        raise ArgumentError("--stage auto with a checkpoint: a checkpoint is of one stage; give --resume auto or no.")


def describe_defaults(name: str) -> str:
    """The default of each stage, for --help."""
    values = [getattr(stage, name) for stage in STAGES.values()]
    shown = ", ".join(f"{'none' if value is None else value} in stage {n}" for n, value in zip(STAGES, values))
    return f"Left out: {shown}."


def describe_gates() -> str:
    """The gates of each stage and their thresholds, for --help."""
    lines = []
    for stage, each in REQUIREMENTS.items():
        asked = (f"{one.name} {one.rule} {format_cell(one.threshold)}" for one in each if one.name != NUM_ERRORS)
        lines.append(f"Stage {stage}: {', '.join(asked)}.")
    return " ".join(lines)

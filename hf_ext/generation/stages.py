"""Three stages of training: what each sets where the user did not, and the gates that each must pass."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ArgumentError, RunEnded
from ..files import Facts, Json, StrPath
from ..models import SIZES
from ..text import format_cell, write_json
from ..training_args import FastTrainingArguments

GATES_NAME = "gates.json"


class Stage(NamedTuple):
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


def resolve_stage(
    number: int, model_args: Any, data_args: Any, args: FastTrainingArguments, explicit: Collection[str]
) -> Json:
    """Gives the arguments what a stage says, where the user said nothing; returns what was set.

    Args:
        number: 1, 2 or 3.
        model_args, data_args, args: `GeneratorArguments`, `DataArguments`, `FastTrainingArguments`; changed.
        explicit: names that the user set, and that stay.
    """
    batch = {"per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size"}
    own = {"goal", *explicit}
    if batch & own or args.max_tokens_per_batch is not None:
        own |= batch
    if "max_steps" in own:
        own.add("num_train_epochs")
    changed = {name: value for name, value in STAGES[number]._asdict().items() if name not in own}
    for name, value in changed.items():
        setattr(next(one for one in (data_args, model_args, args) if hasattr(one, name)), name, value)
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


def describe_stage(number: int, changed: Json) -> str:
    """Returns what the log says before anything is read."""
    listed = ", ".join(f"{name} {value}" for name, value in changed.items() if value is not None)
    return f"Stage {number} ({STAGES[number].goal}): {listed or 'every value is your own'}."


def check_auto(args: FastTrainingArguments) -> None:
    """Raises ArgumentError where `--stage auto` was given what only one stage can have."""
    if args.push_to_hub:
        raise ArgumentError("--stage auto with --push_to_hub: push the stage that you want, with --stage 1, 2 or 3.")
    if args.resume not in ("auto", "no") or args.resume_from_checkpoint:
        raise ArgumentError("--stage auto with a checkpoint: a checkpoint is of one stage; give --resume auto or no.")


# --- gates ----------------------------------------------------------------------------------------------------------

_RULES = {"at least": operator.ge, "at most": operator.le, "above": operator.gt}
_MEANINGS = {  # of a gate's number, with its unit
    "token_loss": "mean loss per token on the training rows in evaluation mode, nats",
    "reproduced": "share of training pairs that greedy decoding writes exactly",
    "valid": "share of outputs that are valid antibodies",
    "num_validation_falls": "evaluations whose validation loss is below all before",
    "share_above": "share of outputs with a predicted pKd above the threshold, by a discriminator to be believed",
    "unique": "distinct outputs by outputs",
    "correlation": "Spearman between asked-for and predicted pKd",
    "beats_random": "low end of the interval of the model less random residues",
}
# Stage -> gate -> rule and threshold, those of the specification.
GATES: dict[int, dict[str, tuple[str, float]]] = {
    1: {"token_loss": ("at most", 0.1), "reproduced": ("at least", 0.9), "valid": ("at least", 0.5)},
    2: {
        "num_validation_falls": ("at least", 1),
        "valid": ("at least", 0.5),
        "share_above": ("at least", 0.3),
        "unique": ("at least", 0.5),
    },
    3: {
        "correlation": ("above", 0.4),
        "valid": ("at least", 0.7),
        "share_above": ("at least", 0.5),
        "beats_random": ("above", 0.0),
    },
}
OF_AFFINITIES = ("share_above", "correlation")


class GatesFailed(RunEnded):
    """A stage did not reach what the next one needs; everything was written, `gates.json` says which gate failed."""


def check_gates(
    stage: int,
    numbers: Mapping[str, float | None],
    thresholds: Mapping[str, float] | None = None,
    has_affinities: bool = True,
) -> list[Json]:
    """Holds a stage's numbers against what it must reach.

    Args:
        stage: 1, 2 or 3.
        numbers: gate -> its number; None, or no entry: it was not measured, and the gate fails, as it does for a number
            that is not finite.
        thresholds: gate -> finite threshold in place of the usual one; gates of other stages are passed over.
        has_affinities: whether this run can have gates of affinities: else they neither pass nor fail.

    Returns:
        For each gate, JSON-able: `name`, `value`, `threshold`, `passed` (None: does not apply), and `reason`, a clause
        with both numbers.
    """
    gates = []
    for name, (rule, usual) in GATES[stage].items():
        value = numbers.get(name)
        threshold = float((thresholds or {}).get(name, usual))
        number = None if value is None or not math.isfinite(value) else float(value)
        passed: bool | None = number is not None and _RULES[rule](number, threshold)
        shown = "not measured" if value is None else format_cell(float(value))
        reason = f"{shown}; {rule} {format_cell(threshold)} is needed ({_MEANINGS[name]})"
        if name in OF_AFFINITIES and not has_affinities:
            passed = None
            reason = "does not apply: the data have no affinities (--label_column), and no --discriminator was given"
        gates.append({"name": name, "value": number, "threshold": threshold, "passed": passed, "reason": reason})
    return gates


def have_passed(gates: Sequence[Facts]) -> bool:
    """Returns whether the next stage may start: no gate failed, and one at least passed."""
    return all(gate["passed"] is not False for gate in gates) and any(gate["passed"] for gate in gates)


def write_gates(path: StrPath, stages: Mapping[int, Sequence[Facts]]) -> None:
    """Writes `gates.json`, whole or not at all: `passed`, and of each stage that was run its gates.

    Raises:
        OSError: the disk refuses.
    """
    found = {str(stage): {"passed": have_passed(gates), "gates": gates} for stage, gates in stages.items()}
    write_json(path, {"passed": all(one["passed"] for one in found.values()), "stages": found})


def check_passed(results: Facts) -> None:
    """Raises GatesFailed where a stage did not pass; `results` as its `all_results.json` holds them."""
    if results["gates_passed"]:
        return
    failed = [f"{gate['name']}: {gate['reason']}" for gate in results["gates"] if gate["passed"] is False]
    raise GatesFailed(
        f"Stage {results['stage']} did not pass its gates ({'; '.join(failed)}). Model and report are whole, in "
        f"{results['settings']['output_dir']}; {GATES_NAME} there has each gate. Train longer or on other data, "
        "take --architecture transformer if this was the LSTM, or give a threshold of your own (--gates)."
    )


def describe_gates() -> str:
    """Describes the gates of each stage and their thresholds, for --help."""
    lines = []
    for stage, each in GATES.items():
        asked = (f"{name} {rule} {format_cell(threshold)}" for name, (rule, threshold) in each.items())
        lines.append(f"Stage {stage}: {', '.join(asked)}.")
    return " ".join(lines)

"""Which values an argument may have: choices by its type, numbers by a table of ranges.

The command line refuses a word that a field's `Literal` does not list; code that builds the dataclass itself would not.
So the dataclasses ask here, and a wrong word is an error from Python, YAML and the command line alike.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from accelerate.utils import DynamoBackend

from .errors import ArgumentError

LARGEST_SEED = 2**32 - 1  # NumPy takes no larger one


class Range(NamedTuple):
    """Numbers that are allowed, and the words that complete "must be"."""

    words: str
    holds: Callable[[float], bool]


FINITE = Range("a finite number", math.isfinite)
COUNT = Range("at least 1", lambda value: 1 <= value < math.inf)
COUNT_FROM_ZERO = Range("at least 0", lambda value: 0 <= value < math.inf)
ABOVE_ZERO = Range("above 0 and finite", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Range("finite and not negative", lambda value: 0 <= value < math.inf)
NUM_WORKERS = Range("from 0 to 1024, a process each", lambda value: 0 <= value <= 1024)
WIDTH = Range("from 1 to 65536", lambda value: 1 <= value <= 2**16)
SHARE_BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
SEED = Range(f"from 0 to {LARGEST_SEED}", lambda value: 0 <= value <= LARGEST_SEED)


TRAINING_RANGES = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "effective_batch_size",
            "cached_batch_size",
            "max_tokens_per_batch",
            "eval_every_epochs",
            "early_stopping_patience",
            "torch_profiler",
            "baseline_batch_size",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        ("save_minutes", "max_hours", "save_total_size_gb", "max_eval_samples", "max_encoder_noise"),
        ABOVE_ZERO,
    ),
    "activation_budget_gb": ABOVE_ZERO,
    "baseline_batches_per_second": ABOVE_ZERO,
    "encoder_learning_rate": ABOVE_ZERO,
    **dict.fromkeys(
        ("early_stopping_min_delta", "dollars_per_hour", "learning_rate", "weight_decay"),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(("adam_epsilon", "warmup_steps", "neftune_noise_alpha"), NOT_NEGATIVE),
    **dict.fromkeys(("logging_steps", "eval_steps"), NOT_NEGATIVE),  # save_steps -1: stock Trainer saves by no steps
    "ddp_timeout": ABOVE_ZERO,
    "max_grad_norm": Range("a number; 0 and less clip nothing", lambda value: not math.isnan(value)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), SHARE_BELOW_ONE),
    "label_smoothing_factor": Range("from 0 to 1", lambda value: 0 <= value <= 1),
    "dataloader_num_workers": NUM_WORKERS,
    **dict.fromkeys(("seed", "data_seed"), SEED),
    "num_train_epochs": FINITE,
}
OPTIMIZER_EXTENSIONS = ("muon", "cpu_offload")
HUB_STRATEGIES = ("end", "best", "checkpoint", "every_save")


def check_choices(arguments: Any) -> None:
    """Refuses a word that the `Literal` of a dataclass field does not list, and None where its type has none.

    None is also allowed where it is the field's default, as other libraries' dataclasses have it.

    Raises:
        ArgumentError: names field, value and what is allowed.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    for name, hint in get_type_hints(type(arguments)).items():
        choices = _choices(hint)
        value = getattr(arguments, name, None)
        word = getattr(value, "value", value)  # an enum counts as its word
        if not choices or word in choices or (value is None and defaults.get(name) is None):
            continue
        raise ArgumentError(f"{name}={value!r}: allowed are {', '.join(map(str, choices))}.")


def _choices(hint: Any) -> tuple[Any, ...]:
    """What `Literal[...]` lists, and None, if it is beside it; () of any other type, and where that is beside it."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if all(part is NoneType or get_origin(part) is Literal for part in parts) and set(parts) != {NoneType}:
        return tuple(word for part in parts for word in (get_args(part) or (None,)))
    return ()


def check_ranges(arguments: Any, ranges: Mapping[str, Range]) -> None:
    """Refuses numbers outside of their ranges; of a list, each number. None, "not given", is always allowed.

    Raises:
        ArgumentError: names field, value and what is allowed.
    """
    for name, allowed in ranges.items():
        value = getattr(arguments, name)
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, Real) or not allowed.holds(float(number)):
                kind = ", and is text" if isinstance(number, str) else ""
                raise ArgumentError(f"{name}={value!r}: must be {allowed.words}{kind}.")


def check_forms(arguments: Any) -> None:
    """Refuses texts that Trainer would take apart, or look up, only after the data was read and the model built.

    Raises:
        ArgumentError: names field, value and what is allowed.
    """
    for name in ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs"):
        value = getattr(arguments, name)
        if value is not None and not isinstance(value, Mapping):
            raise ArgumentError(f'{name}={value!r}: must be a mapping, such as {{"name": 1}}.')
    for part in arguments.optim_args.replace(" ", "").split(",") if arguments.optim_args else ():
        if part.count("=") != 1:
            raise ArgumentError(f"optim_args={arguments.optim_args!r}: write name=value, with commas between several.")
    backends = [backend.value.lower() for backend in DynamoBackend]
    if arguments.torch_compile_backend and str(arguments.torch_compile_backend).lower() not in backends:
        raise ArgumentError(
            f"torch_compile_backend={arguments.torch_compile_backend!r}: allowed are {', '.join(backends)}."
        )


def read_hub_strategy(arguments: Any) -> str:
    """The word of `hub_strategy`, which stock Trainer knows but for "best".

    Raises:
        ArgumentError: another word, or "best" where nothing says which checkpoint is.
    """
    strategy = str(getattr(arguments.hub_strategy, "value", arguments.hub_strategy))
    if strategy not in HUB_STRATEGIES:
        raise ArgumentError(
            f"hub_strategy={strategy}: allowed are {', '.join(HUB_STRATEGIES)}. (all_checkpoints of stock Trainer "
            "would fill the repository with optimizers: checkpoint keeps the newest, from which a run continues.)"
        )
    knows_best = arguments.metric_for_best_model or arguments.load_best_model_at_end
    if strategy == "best" and arguments.push_to_hub and not knows_best:
        raise ArgumentError("hub_strategy=best: no checkpoint is the best one without --metric_for_best_model.")
    return strategy


def check_training_values(arguments: Any, trackers: Sequence[str]) -> None:
    """Refuses values that Trainer's arguments, or ours beside them, cannot have; of `report_to` all but `trackers`.

    Raises:
        ArgumentError: names field, value and what is allowed.
    """
    check_choices(arguments)
    check_ranges(arguments, TRAINING_RANGES)
    check_forms(arguments)
    for word in arguments.optim_ext or ():
        if word not in OPTIMIZER_EXTENSIONS:
            raise ArgumentError(f"optim_ext={word!r}: allowed are {', '.join(OPTIMIZER_EXTENSIONS)}.")
    if arguments.block_pattern is not None:
        try:
            re.compile(arguments.block_pattern)
        except re.error as error:
            raise ArgumentError(
                f"block_pattern={arguments.block_pattern!r}: no regular expression ({error})."
            ) from None
    budget = arguments.activation_budget_gb
    if (arguments.activation_policy == "auto") != (budget is not None):
        raise ArgumentError(
            f"activation_policy={arguments.activation_policy!r}, activation_budget_gb={budget!r}: auto needs a budget, "
            "and a budget needs auto."
        )
    _check_baseline(arguments)
    unknown = [name for name in arguments.report_to or [] if isinstance(name, str) and name not in trackers]
    if unknown:
        raise ArgumentError(f"report_to={unknown[0]!r}: allowed are {', '.join(trackers)}.")


def _check_baseline(arguments: Any) -> None:
    batches, rows = arguments.baseline_batches_per_second, arguments.baseline_batch_size
    if (batches is None) != (rows is None):
        raise ArgumentError(
            f"baseline_batches_per_second={batches!r}, baseline_batch_size={rows!r}: give both, since speeds are "
            "compared by rows."
        )
    if batches is not None and arguments.baseline_json is not None:
        raise ArgumentError("baseline_json and baseline_batches_per_second are two baselines: leave one of them out.")


def check_metric_name(given: str | None, known: Sequence[str]) -> None:
    """Refuses a `metric_for_best_model` that no evaluation will compute; stock Trainer does after the first one.

    Raises:
        ArgumentError: names it and what is allowed.
    """
    if given is not None and given.removeprefix("eval_").removeprefix("full_") not in known:
        raise ArgumentError(f"metric_for_best_model={given!r}: allowed are {', '.join(known)}.")

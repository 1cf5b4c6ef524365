"""Does a run continue the one that wrote a checkpoint? Facts of both, compared; what makes another run is refused.

Of arguments, all are compared that are not in `free_to_differ.py`, one with several parts part by part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments

from ..arguments import training_names
from ..data import compare_fingerprints, fingerprint
from ..errors import ArgumentError, CheckpointError
from ..evaluation import RowMetrics
from ..files import Facts, Json, StrPath
from ..models import unwrap_peft
from .free_to_differ import FREE_TO_DIFFER
from .manifest import CHECKPOINT_NAME, read_stored

# Decide which rows make up an optimizer step; harmless together as long as every step takes the same rows.
STEP_SIZE = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})

# No state of the old one fits the new one, so that not even `allow_changed` continues: weights alone could be a start.
OTHER_STATES = frozenset({"optim", "optim_args", "optim_target_modules", "lr_scheduler_type"})

# Of arguments, these may come to be others than the user gave.
NOT_AS_ASKED = STEP_SIZE | {"metric_for_best_model", "remove_unused_columns", "parallelism_config", "fsdp"}
NOT_AS_ASKED |= {"fsdp_config", "deepspeed"}
NOTHING: tuple[Any, ...] = (None, "", [], {})  # ways to give an argument nothing
SECRETS = ("token", "key", "secret", "password")  # ends of names in classes of the user's own, which no file may hold

GROUPS = ("all", "collator", "data", "eval_data", "model", "speedups", "test_data", "world_size")

# Of configurations: versions and places; what follows from the data or the machine and is compared as such; and what
# transformers sets while it trains.
_NO_SHAPE = frozenset(
    """
    _name_or_path name_or_path revision fingerprint base_model_name_or_path transformers_version peft_version
    architectures auto_mapping inference_mode runtime_config dtype torch_dtype use_cache
    label_mean label_std is_scaled layer_choice encoder_dtype encoder_autocast encoder_bits
    pad_token_id bos_token_id eos_token_id modules_to_save
    """.split()  # noqa: SIM905  readable as a paragraph
)
MAX_SHOWN = 120  # characters of a value
NEVER = ""  # names what no word in `allow_changed` lets pass
# What differs, as a line, and the word in `allow_changed` that lets it pass.
Difference = tuple[str, str]

logger = logging.getLogger(__name__)


# --- the facts of a run ----------------------------------------------------------------------------------------------


class Described(Protocol):
    """What of a trainer makes the run what it is."""

    train_dataset: Any
    data_collator: Any

    @property
    def args(self) -> TrainingArguments:
        """Returns those of now."""

    @property
    def model(self) -> nn.Module:
        """Returns the model that trains."""

    @property
    def compute_metrics(self) -> object:
        """Returns what scores evaluations, a `RowMetrics` perhaps."""


def describe_run(run: Described, held_out: Facts, written_by: str, speedups: Mapping[str, Facts]) -> Json:
    """Describes a run: the facts for the manifest of its checkpoints and for `compare_runs`.

    Call it at the same point of every run: after the plan was applied, before training begins.

    Args:
        held_out: evaluation sets by their prefix, and "test".
        written_by: what writes weights and states into checkpoints.
        speedups: settings that count of those that were applied, see `Plan.compared`.

    Returns:
        JSON-able, and equal to what JSON makes of it: world_size, devices_per_process, written_by, arguments, data,
        held_out, model, collator, speedups.

    Cost: that of `fingerprint`, some seconds per GB of a table.
    """
    args = run.args
    best = run.args.metric_for_best_model
    compute = run.compute_metrics
    if best and isinstance(compute, RowMetrics):
        best = compute.spell_out(best)  # with the threshold or the groups that decide its value
    facts = {
        "world_size": args.world_size,
        "devices_per_process": max(1, args.n_gpu),
        "written_by": written_by,
        "arguments": {**_compared_arguments(args), "metric_for_best_model": best},
        "data": fingerprint(run.train_dataset),
        "held_out": {name: fingerprint(rows) for name, rows in held_out.items() if rows is not None},
        "model": _describe_model(run.model),
        "collator": _describe_collator(run.data_collator),
        "speedups": speedups,
    }
    return _as_json(facts)


def _compared_arguments(args: TrainingArguments) -> Json:
    """Returns their values by name; those of `accelerator_config` by `accelerator_config.NAME`."""
    names = {spec.name for spec in dataclasses.fields(args)} | training_names()
    values = {name: getattr(args, name) for name in sorted(names) if not name.endswith(SECRETS)}
    config = values.pop("accelerator_config")
    values |= {f"accelerator_config.{name}": value for name, value in vars(config).items()}
    return {name: value for name, value in values.items() if name not in FREE_TO_DIFFER}


def _as_json(facts: Any) -> Any:
    return json.loads(json.dumps(facts, default=_to_json, skipkeys=True))


def _to_json(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    return type(value).__qualname__


def _describe_model(model: nn.Module) -> Json:
    inner = unwrap_peft(model)
    config: Any = getattr(inner, "config", None)
    adapters = getattr(model, "peft_config", None) or {}
    training = sorted(f"{name} {tuple(p.shape)}" for name, p in model.named_parameters() if p.requires_grad)
    terms: Any = getattr(inner, "terms", None)  # of the loss, beside the data's: part of what is learned
    return {
        **({"terms": terms} if dataclasses.is_dataclass(terms) else {}),
        "class": [_class_of(model), _class_of(inner)],
        "config": _shape(config.to_dict()) if hasattr(config, "to_dict") else {},
        "adapters": {name: _shape(adapter.to_dict()) for name, adapter in adapters.items()},
        "num_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "trainable_names": hashlib.blake2b("\n".join(training).encode(), digest_size=16).hexdigest(),
        "encoders": [_identity(spec) for spec in getattr(config, "encoder_specs", ())],
    }


def _class_of(model: nn.Module) -> str:
    """Names the class of a module, before FSDP2 put a class of its own in front."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)).__name__


def _shape(config: Any) -> Any:
    """Returns a configuration without what does not matter for the mathematics, or is left open."""
    if isinstance(config, dict):
        kept = {str(key): _shape(value) for key, value in config.items() if key not in _NO_SHAPE}
        return {key: value for key, value in kept.items() if value is not None}
    return [_shape(value) for value in config] if isinstance(config, list | tuple) else config


def _identity(spec: Any) -> str:
    """Returns an encoder's weights, wherever they lie: their hash, else what they are called."""
    fingerprint = str(spec.fingerprint or "")
    return fingerprint if fingerprint.startswith("sha256:") else f"{spec.name_or_path}@{spec.revision}"


def _describe_collator(collator: object) -> Json:
    """Describes class and settings: plain public attributes, the columns, and what its tokenizers make of residues."""
    facts: Json = {"class": getattr(collator, "__qualname__", type(collator).__qualname__)}
    for name, value in getattr(collator, "__dict__", {}).items():
        if not name.startswith("_") and (name == "columns" or isinstance(value, bool | int | float | str | None)):
            facts[name] = value
    tokenizers = getattr(collator, "tokenizers", None)
    if isinstance(tokenizers, Mapping):
        facts["tokenizers"] = {
            str(name): {"ids": t.fingerprint(), "max_residues": t.max_residues} for name, t in tokenizers.items()
        }
    return facts


# --- the comparison --------------------------------------------------------------------------------------------------


class Changes(NamedTuple):
    """What differs between a checkpoint's run and this one and makes the continuation another run.

    `contradictions` are lines; `allowed` the names of what differs and was allowed.
    """

    contradictions: list[str]
    allowed: set[str]


def compare_runs(old: Facts, new: Facts, allowed: Sequence[str] = ()) -> Changes:
    """Compares the facts of a checkpoint's run with those of this one, in what both have.

    Args:
        old, new: from `describe_run`.
        allowed: what may differ: names of arguments, or one of `GROUPS`.

    Raises:
        ArgumentError: an unknown name in `allowed`.
    """
    arguments = {*new.get("arguments", ())}
    unknown = {*allowed} - {*GROUPS, *arguments}
    if unknown:
        known = ", ".join((*GROUPS, *sorted(arguments - OTHER_STATES)))
        raise ArgumentError(f"allow_changed: unknown {sorted(unknown)}. Known: {known}.")
    found = list(_find_differences(old, new))
    passed = {name for _, name in found if name != NEVER and {"all", name} & {*allowed}}
    return Changes([text for text, name in found if name not in passed], passed)


def refuse(checkpoint: StrPath, contradictions: Sequence[str]) -> None:
    """Raises CheckpointError if there are any."""
    if contradictions:
        listed = "\n  ".join(contradictions)
        raise CheckpointError(
            f"{checkpoint} was written by a run that differs:\n  {listed}\nUse --resume no or another --output_dir to "
            'begin anew, the old values to continue as it was, or allow_changed=["NAME", ...] (--allow_changed NAME '
            "[NAME ...]) to continue with the new ones."
        )


def refuse_asked(args: Any) -> None:
    """Refuses what the user asks for and the checkpoint that is to be continued has otherwise; before rows are read.

    Of arguments that neither plan nor search changes: all others, data and model are compared when training begins.
    Reads one manifest.
    """
    asked = args.resume_from_checkpoint or args.resume
    if asked in (None, False, "no"):
        return
    is_newest = asked is True or asked == "auto"
    folders = Path(args.output_dir).glob("checkpoint-*") if is_newest else [Path(str(asked))]
    found = [
        read_stored(folder, int(step[1])) for folder in folders if (step := CHECKPOINT_NAME.fullmatch(folder.name))
    ]
    stored = max(filter(None, found), key=lambda one: one.step, default=None)
    if stored is not None:
        before = stored.manifest.facts["arguments"]
        now = _as_json(_compared_arguments(args))
        asked_for = (args.explicit_fields & now.keys()) - NOT_AS_ASKED
        now |= {name: value for name, value in before.items() if name not in asked_for}
        refuse(stored.path, compare_runs({"arguments": before}, {"arguments": now}, args.allow_changed).contradictions)


def _find_differences(old: Facts, new: Facts) -> Iterator[Difference]:
    both = old.keys() & new.keys()
    if "arguments" in both:
        yield from _compare_arguments(old["arguments"], new["arguments"])
    if "world_size" in both:
        yield from _compare_steps(old, new)
    if "data" in both:
        yield from _compare_rows("data", "data", old["data"], new["data"])
    before = old.get("held_out", {})
    now = new.get("held_out", {})
    for split in [split for split in before if split in now]:  # one that came or went contradicts no score of before
        group = "test_data" if split == "test" else "eval_data"
        place = group if split in ("test", "eval") else f"eval_data, set '{split.removeprefix('eval_')}'"
        yield from _compare_rows(place, group, before[split], now[split])
    for section in {"model", "collator"} & both:
        before, now = (dict(_leaves(one[section], section)) for one in (old, new))
        for place in before:  # what only one of them has, another version of a library may have added
            if place in now and before[place] != now[place]:
                yield _line(place, before[place], now[place]), section
    if "speedups" in both:
        for name in {**old["speedups"], **new["speedups"]}:
            one = old["speedups"].get(name, "off")
            other = new["speedups"].get(name, "off")
            if one != other:
                yield _line(f"speed-up {name}", one or "on", other or "on"), "speedups"
    if old.get("written_by") != new.get("written_by"):
        text = (
            f"weights and states are in the files of {old.get('written_by')}, this run reads those of "
            f"{new.get('written_by')}: launch it as before, or start a new run from its weights (of FSDP2's shards, "
            "`accelerate merge-weights` makes a file)"
        )
        yield text, NEVER


def _compare_rows(place: str, group: str, old: Facts, new: Facts) -> Iterator[Difference]:
    differences, untold = compare_fingerprints(old, new)
    yield from ((f"{place}: {text}", group) for text in differences)
    for text in untold:
        logger.info("%s: %s", place, text)


def _compare_arguments(before: Facts, now: Facts) -> Iterator[Difference]:
    idle = set(STEP_SIZE)  # compared as what they make together
    if min(before.get("max_steps", -1), now.get("max_steps", -1)) > 0:
        idle.add("num_train_epochs")
    if None in (before.get("metric_for_best_model"), now.get("metric_for_best_model")):
        idle |= {"metric_for_best_model", "greater_is_better"}  # nothing says which is best
    if missing := sorted(before.keys() ^ now.keys()):
        logger.debug("Not compared, since one of the runs has no such argument: %s", ", ".join(missing))
    for name in [name for name in before if name in now and name not in idle]:
        adds_group = name == "encoder_learning_rate" and None in (before[name], now[name])
        for line in _compare_values(name, before[name], now[name]):
            if name in OTHER_STATES or adds_group:
                yield f"{line}: its states do not fit; start from the weights alone", NEVER
            else:
                yield line, name


def _compare_values(name: str, one: Any, other: Any) -> Iterator[str]:
    """Yields a line where two values differ; for settings in a mapping, one for each that does."""
    before, now = (dict(_leaves(None if value in NOTHING else value, name)) for value in (one, other))
    for place in {**before, **now}:
        if before.get(place) != now.get(place):
            yield _line(place, before.get(place), now.get(place))


def _compare_steps(old: Facts, new: Facts) -> Iterator[Difference]:
    """Yields differences unless every optimizer step takes the same rows.

    Batch size, accumulation and processes may differ.
    """
    kind, size = _step_size(old)
    if (kind, size) == _step_size(new):
        return
    same = "--effective_batch_size" if kind == "rows" else "--gradient_accumulation_steps times processes ="
    for name in (*sorted(STEP_SIZE), "world_size", "devices_per_process"):
        one, other = (facts.get(name, facts["arguments"].get(name)) for facts in (old, new))
        if one != other:
            hint = f"; {same} {size} keeps the rows of every step" if name == "world_size" else ""
            yield _line(name, one, other) + hint, name if name in STEP_SIZE else "world_size"


def _step_size(facts: Facts) -> tuple[str, int]:
    """Describes the rows of a step: where it is equal, two runs take the same rows in the same order."""
    arguments = facts["arguments"]
    num_batches = arguments["gradient_accumulation_steps"] * facts["world_size"]
    if "token_budget" in facts["speedups"]:  # planned in steps of so many batches, whatever the batch size says
        return "tokens", num_batches
    return "rows", num_batches * arguments["per_device_train_batch_size"] * facts["devices_per_process"]


def _leaves(value: object, place: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted place, value) of everything in nested mappings and in lists of mappings."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{place}.{key}")
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{place}.{i}")
    else:
        yield place, value


def _line(name: str, one: object, other: object) -> str:
    return f"{name}: {_short(one)} in the checkpoint, {_short(other)} now"


def _short(value: object) -> str:
    text = str(value) or "''"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."

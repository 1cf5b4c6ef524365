"""Does a run continue the one that wrote a checkpoint? Facts of both, compared; what makes another run is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ..data.fingerprint import compare_fingerprints, fingerprint
from ..errors import ArgumentError, CheckpointError
from ..evaluation.row_metrics import RowMetrics
from ..models.lora import unwrap_peft
from ..optional import installed_version
from .manifest import CHECKPOINT_NAME, read_stored
from .weights import read_base

# Decide which rows make up an optimizer step; harmless together as long as every step takes the same rows.
STEP_SIZE = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})

# No state of the old one fits the new one, so that not even `allow_changed` continues: weights alone could be a start.
OTHER_STATES = frozenset({"optim", "optim_args", "optim_target_modules", "lr_scheduler_type"})

# A change makes the continuation another run: refused unless allowed. What is not here is noted. Some of that acts
# through others (`effective_batch_size` through accumulation, `use_peft` through the model), and these are compared.
ANOTHER_RUN = frozenset(
    """
    per_device_train_batch_size gradient_accumulation_steps max_steps num_train_epochs
    optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    learning_rate encoder_learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
    average_tokens_across_devices label_smoothing_factor neftune_noise_alpha
    bf16 fp16 tf32 load_in_8bit load_in_4bit seed data_seed parallelism_config fsdp fsdp_config deepspeed
    dataloader_drop_last train_sampling_strategy length_column_name max_tokens_per_batch
    metric_for_best_model greater_is_better
    """.split()  # noqa: SIM905  readable as a paragraph
)

# Of these, what a run has as the user gave it.
AS_ASKED = ANOTHER_RUN - STEP_SIZE - {"metric_for_best_model", "parallelism_config", "fsdp", "fsdp_config", "deepspeed"}

# Secrets, and where and how this call was made.
UNRECORDED = frozenset(
    "output_dir local_rank do_train do_eval do_predict resume_from_checkpoint resume allow_changed".split()  # noqa: SIM905
)

# Speed-ups that change the rows of a step, or numbers beyond rounding -> the settings by which they do. The others act
# through arguments or the model, or change last bits.
SPEEDUPS = {"token_budget": ("max_tokens", "max_batch_size"), "encoder_precision": ("dtype", "mode"), "muon": ()}

GROUPS = ("all", "collator", "data", "model", "speedups", "world_size")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "hf_ext")

# Of configurations: versions and places; what follows from the data or the machine and is compared as such; and what
# transformers sets while it trains.
_NO_SHAPE = frozenset(
    """
    _name_or_path name_or_path revision fingerprint base_model_name_or_path transformers_version peft_version
    architectures auto_mapping inference_mode runtime_config dtype torch_dtype use_cache
    label_mean label_std is_scaled encoder_dtype encoder_autocast encoder_bits pad_token_id bos_token_id eos_token_id
    modules_to_save
    """.split()  # noqa: SIM905  readable as a paragraph
)
_ABSENT = object()
NEVER = ""  # names what no word in `allow_changed` lets pass
# What differs, as a line, and the word in `allow_changed` that lets it pass: None where it is only noted.
Difference = tuple[str, str | None]


# --- the facts of a run ----------------------------------------------------------------------------------------------


def describe_run(trainer: Any) -> dict[str, Any]:
    """The facts of a run, for the manifest of its checkpoints and for `compare_runs`.

    Call it at the same point of every run: after the plan was applied, before training begins.

    Args:
        trainer: a `FastTrainer`.

    Returns:
        JSON-able, and equal to what JSON makes of it: machine, world_size, devices_per_process, written_by, arguments,
        data, model, collator, speedups. No tokens.

    Cost: that of `fingerprint`, some seconds per GB of a table.
    """
    args = trainer.args
    # Plain `TrainingArguments` hold ours without having them as fields.
    names = {spec.name for spec in dataclasses.fields(args)} | {name for name in ANOTHER_RUN if hasattr(args, name)}
    recorded = sorted(name for name in names - UNRECORDED if not name.endswith("_token"))
    applied = {one.name: one for one in trainer.plan.decisions if one.status == "applied"}
    versions = {name: installed_version(name) for name in PACKAGES}
    device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type
    best, compute = args.metric_for_best_model, trainer.compute_metrics
    if best and isinstance(compute, RowMetrics):
        best = compute.spell_out(best)  # with the threshold or the groups that decide its value
    machine = {"device": device, "threads": torch.get_num_threads(), "python": platform.python_version()}
    facts = {
        "machine": {**machine, **versions},
        "world_size": args.world_size,
        "devices_per_process": max(1, args.n_gpu),
        "written_by": trainer._ext_backend.written_by,
        "arguments": {**{name: getattr(args, name) for name in recorded}, "metric_for_best_model": best},
        "data": fingerprint(trainer.train_dataset),
        "model": _describe_model(trainer.model),
        "collator": _describe_collator(trainer.data_collator),
        "speedups": {name: decision.settings for name, decision in applied.items()},
    }
    return json.loads(json.dumps(facts, default=_to_json, skipkeys=True))


def _to_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    return type(value).__qualname__


def _describe_model(model: Any) -> dict[str, Any]:
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
        "base": read_base(model),
        "encoders": [_identity(spec) for spec in getattr(config, "encoder_specs", ())],
    }


def _class_of(model: Any) -> str:
    """Before FSDP2 put a class of its own in front."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)).__name__


def _shape(config: Any) -> Any:
    """A configuration without what says nothing about the model's mathematics, and without what is left open."""
    if isinstance(config, dict):
        kept = {str(key): _shape(value) for key, value in config.items() if key not in _NO_SHAPE}
        return {key: value for key, value in kept.items() if value is not None}
    return [_shape(value) for value in config] if isinstance(config, list | tuple) else config


def _identity(spec: Any) -> str:
    """An encoder's weights, wherever they lie: their hash, else what they are called."""
    fingerprint = str(spec.fingerprint or "")
    return fingerprint if fingerprint.startswith("sha256:") else f"{spec.name_or_path}@{spec.revision}"


def _describe_collator(collator: Any) -> dict[str, Any]:
    """Class and settings: plain public attributes, the columns, and what its tokenizers make of residues."""
    facts: dict[str, Any] = {"class": getattr(collator, "__qualname__", type(collator).__qualname__)}
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


@dataclass
class Changes:
    """What differs between a checkpoint's run and this one, a line each.

    `contradictions` make the continuation another run; `notes` do not, or were allowed; `allowed` are the names of what
    differs, matters and was allowed.
    """

    notes: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    allowed: set[str] = field(default_factory=set)


def compare_runs(old: Mapping[str, Any], new: Mapping[str, Any], allowed: Sequence[str] = ()) -> Changes:
    """Compares the facts of a checkpoint's run with those of this one, in what both have.

    Args:
        old, new: from `describe_run`.
        allowed: what may differ: names of arguments, or one of `GROUPS`.

    Raises:
        ArgumentError: an unknown name in `allowed`.
    """
    unknown = [name for name in allowed if name not in {*GROUPS, *ANOTHER_RUN}]
    if unknown:
        known = ", ".join((*GROUPS, *sorted(ANOTHER_RUN - OTHER_STATES)))
        raise ArgumentError(f"allow_changed: unknown {unknown}. Known: {known}.")
    changes = Changes()
    for text, name in _find_differences(old, new):
        if name is None:
            changes.notes.append(text)
        elif name != NEVER and {"all", name} & {*allowed}:
            changes.notes.append(f"{text} (allowed)")
            changes.allowed.add(name)
        else:
            changes.contradictions.append(text)
    return changes


def refuse(checkpoint: str | os.PathLike[str], contradictions: Sequence[str]) -> None:
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
        now = {name: getattr(args, name) for name in AS_ASKED & args.explicit_fields & before.keys()}
        now = before | json.loads(json.dumps(now, default=_to_json))
        refuse(stored.path, compare_runs({"arguments": before}, {"arguments": now}, args.allow_changed).contradictions)


def _find_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    both = old.keys() & new.keys()
    if "machine" in both:
        yield from _compare("machine", old["machine"], new["machine"])
    if "arguments" in both:
        yield from _compare_arguments(old["arguments"], new["arguments"])
    if "world_size" in both:
        yield from _compare_steps(old, new)
    if "data" in both:
        differences, untold = compare_fingerprints(old["data"], new["data"])
        yield from ((f"data: {text}", "data") for text in differences)
        yield from ((f"data: {text}", None) for text in untold)
    for section, default in (("model", None), ("collator", _ABSENT)):
        facts = [one.get(section, {}) if section in both else {} for one in (old, new)]
        for name in dict.fromkeys([*facts[0], *facts[1]]):
            one, other = (each.get(name, default) for each in facts)
            # Where weights came from is noted: frozen ones have a hash.
            yield from _compare(f"{section}.{name}", one, other, None if name == "base" else section)
    if "speedups" in both:
        yield from _compare_speedups(old["speedups"], new["speedups"])
    if old.get("written_by") != new.get("written_by"):
        text = (
            f"weights and states are in the files of {old.get('written_by')}, this run reads those of "
            f"{new.get('written_by')}: launch it as before, or start a new run from its weights (of FSDP2's shards, "
            "`accelerate merge-weights` makes a file)"
        )
        yield text, NEVER


def _compare(title: str, old: Any, new: Any, name: str | None = None, is_strict: bool = False) -> Iterator[Difference]:
    """Every leaf that differs. What only one side has, as with another version of a package, is noted."""
    before, now = {title: old}, {title: new}
    if isinstance(old, Mapping | list) and type(old) is type(new):
        before, now = dict(_leaves(old, title)), dict(_leaves(new, title))
    for place in dict.fromkeys([*before, *now]):
        one, other = before.get(place, _ABSENT), now.get(place, _ABSENT)
        if one != other:
            is_open = not is_strict and (one is _ABSENT or other is _ABSENT)
            yield _line(place, one, other), None if is_open else name


def _compare_arguments(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    idle = {"num_train_epochs"} if min(before.get("max_steps", -1), now.get("max_steps", -1)) > 0 else set()
    if None in (before.get("metric_for_best_model"), now.get("metric_for_best_model")):
        idle |= {"metric_for_best_model", "greater_is_better"}  # nothing says which is best
    for name in [name for name in before if name in now and name not in STEP_SIZE]:
        one, other = before[name], now[name]
        adds_group = name == "encoder_learning_rate" and one != other and None in (one, other)
        if one != other and (name in OTHER_STATES or adds_group):
            yield f"{_line(name, one, other)}: its states do not fit; start from the weights alone", NEVER
        else:
            yield from _compare(name, one, other, name if name in ANOTHER_RUN - idle else None, is_strict=True)


def _compare_steps(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    """Batch size, accumulation and processes: notes as long as every optimizer step takes the same rows."""
    kind, size = _step_size(old)
    is_same = (kind, size) == _step_size(new)
    same = "--effective_batch_size" if kind == "rows" else "--gradient_accumulation_steps times processes ="
    advice = f"; {same} {size} keeps the rows of every step"
    for name in (*sorted(STEP_SIZE), "world_size", "devices_per_process"):
        one, other = (facts.get(name, facts["arguments"].get(name)) for facts in (old, new))
        if one != other:
            hint = " (the same rows in every step)" if is_same else advice if name == "world_size" else ""
            word = name if name in STEP_SIZE else "world_size"
            yield _line(name, one, other) + hint, None if is_same else word


def _step_size(facts: Mapping[str, Any]) -> tuple[str, int]:
    """Equal sizes mean that the optimizer steps of two runs take the same rows in the same order."""
    arguments = facts["arguments"]
    num_batches = arguments["gradient_accumulation_steps"] * facts["world_size"]
    if "token_budget" in facts["speedups"]:  # planned in steps of so many batches, whatever the batch size says
        return "tokens", num_batches
    return "rows", num_batches * arguments["per_device_train_batch_size"] * facts["devices_per_process"]


def _compare_speedups(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys([*before, *now]):
        one, other = before.get(name), now.get(name)
        if one == other:
            continue
        decided = [settings and [settings.get(key) for key in SPEEDUPS.get(name, ())] for settings in (one, other)]
        then, here = ("off" if settings is None else _short(settings or "on") for settings in (one, other))
        text = f"speed-up {name}: {then} in the checkpoint, {here} now"
        yield text, "speedups" if name in SPEEDUPS and decided[0] != decided[1] else None


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """(dotted place, value) of everything in nested mappings and in lists of mappings."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{place}.{key}")
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{place}.{i}")
    else:
        yield place, value


def _line(name: str, one: Any, other: Any) -> str:
    then = "not recorded in the checkpoint" if one is _ABSENT else f"{_short(one)} in the checkpoint"
    return f"{name}: {then}, {'not there now' if other is _ABSENT else f'{_short(other)} now'}"


def _short(value: Any, limit: int = 120) -> str:
    text = str(value) or "''"
    return text if len(text) <= limit else f"{text[:limit]}..."

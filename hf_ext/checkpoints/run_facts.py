"""The facts of a run: what of arguments, rows, model and collator makes it the run that it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments

from ..arguments import training_names
from ..data import fingerprint
from ..evaluation import RowMetrics
from ..files import Facts, Json
from ..models import unwrap_peft
from .free_to_differ import FREE_TO_DIFFER

SECRETS = ("token", "key", "secret", "password")  # ends of names in classes of the user's own, which no file may hold
# Of configurations: versions and places; what follows from the data or the machine and is compared as such; and what
# transformers sets while it trains.
_NO_SHAPE = frozenset(
    """
    _name_or_path name_or_path revision fingerprint base_model_name_or_path transformers_version peft_version
    architectures auto_mapping inference_mode runtime_config dtype torch_dtype use_cache
    label_mean label_std is_scaled layer_choice encoder_dtype encoder_autocast encoder_bits base_bits
    pad_token_id bos_token_id eos_token_id modules_to_save
    """.split()  # noqa: SIM905  readable as a paragraph
)


def describe_run(run: Any, held_out: Facts, written_by: str, speedups: Mapping[str, Facts]) -> Json:
    """Describes a run: the facts for the manifest of its checkpoints and for `compare_runs`.

    Call it at the same point of every run: after the plan was applied, before training begins.

    Args:
        run: a trainer, of which arguments, model, rows, collator and `compute_metrics` are read.
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
        "arguments": {**compared_arguments(args), "metric_for_best_model": best},
        "data": fingerprint(run.train_dataset),
        "held_out": {name: fingerprint(rows) for name, rows in held_out.items() if rows is not None},
        "model": _describe_model(run.model),
        "collator": _describe_collator(run.data_collator),
        "speedups": speedups,
    }
    return _as_json(facts)


def compared_arguments(args: TrainingArguments) -> Json:
    """Returns their values by name, as JSON has them; those of `accelerator_config` by `accelerator_config.NAME`."""
    names = {spec.name for spec in dataclasses.fields(args)} | training_names()
    values = {name: getattr(args, name) for name in sorted(names) if not name.endswith(SECRETS)}
    config = values.pop("accelerator_config")
    values |= {f"accelerator_config.{name}": value for name, value in vars(config).items()}
    return _as_json({name: value for name, value in values.items() if name not in FREE_TO_DIFFER})


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

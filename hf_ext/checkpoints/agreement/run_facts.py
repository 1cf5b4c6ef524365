"""What a checkpoint says of the run that wrote it, so that another process can tell whether it continues that run."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch.distributed.fsdp import FSDPModule

from ...data.fingerprint import fingerprint
from ...models.lora import unwrap_peft
from ...optional import installed_version
from ..weights import read_base
from .argument_roles import ANOTHER_RUN, HARMLESS, UNRECORDED

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
_NO_DATA_ORDER = frozenset({"non_blocking", "use_configured_state"})  # of `accelerator_config`


def describe_run(
    args: Any,
    model: Any,
    train_dataset: Any,
    collator: Any,
    world_size: int,
    plan: Any,
    best: str | None = None,
    written_by: str = "Trainer",
) -> dict[str, Any]:
    """The facts of a run, for the manifest of its checkpoints and for `compare_runs`.

    Call it at the same point of every run: after the plan was applied, before training begins.

    Args:
        args: `FastTrainingArguments` as the plan left them; secrets and paths of this call are not recorded.
        model: not wrapped for distribution; None is allowed.
        train_dataset, collator: as for `FastTrainer`.
        world_size: number of processes.
        plan: `Plan`, or None.
        best: `metric_for_best_model` with what decides its value beside its name; None: its name.
        written_by: what writes weights and states into checkpoints, and alone can read them: see `Backend`.

    Returns:
        JSON-able: versions, world_size, devices_per_process, arguments, data, model, collator, speedups. Equal to what
        `json.loads(json.dumps(...))` makes of it.

    Cost: that of `fingerprint`, about 1 s per GB of a table.
    """
    decisions = plan.decisions if plan is not None else ()
    return {
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}},
        "world_size": world_size,
        "written_by": written_by,
        "devices_per_process": max(1, args.n_gpu),
        "arguments": {**_describe_arguments(args), **({"metric_for_best_model": best} if best else {})},
        "data": fingerprint(train_dataset),
        "model": _describe_model(model),
        "collator": _describe_collator(collator),
        "speedups": {d.name: {"kind": d.kind, **_plain(d.settings)} for d in decisions if d.status == "applied"},
    }


def _describe_arguments(args: Any) -> dict[str, Any]:
    own = {name for name in ANOTHER_RUN | HARMLESS if hasattr(args, name)}  # no fields of plain `TrainingArguments`
    names = sorted(own | {spec.name for spec in dataclasses.fields(args)})
    recorded = [name for name in names if name not in UNRECORDED and not name.endswith("_token")]
    values = {name: _plain(getattr(args, name)) for name in recorded}
    accelerator = values.get("accelerator_config")
    if isinstance(accelerator, dict):
        values["accelerator_config"] = {key: accelerator[key] for key in accelerator if key not in _NO_DATA_ORDER}
    return values


def _describe_model(model: Any) -> dict[str, Any]:
    if model is None:
        return {}
    inner = unwrap_peft(model)
    config: Any = getattr(inner, "config", None)
    adapters = getattr(model, "peft_config", None) or {}
    training = sorted(f"{name} {tuple(p.shape)}" for name, p in model.named_parameters() if p.requires_grad)
    terms: Any = getattr(inner, "terms", None)  # of the loss, beside the data's: part of what is learned
    return {
        **({"terms": _plain(terms)} if dataclasses.is_dataclass(terms) else {}),
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
    return [_shape(value) for value in config] if isinstance(config, list | tuple) else _plain(config)


def _identity(spec: Any) -> str:
    """An encoder's weights, wherever they lie: their hash or commit, else what they are called."""
    fingerprint = str(spec.fingerprint or "")
    if fingerprint.startswith("sha256:"):
        return fingerprint
    return f"{spec.name_or_path}@{spec.revision}"


def _describe_collator(collator: Any) -> dict[str, Any]:
    """Class and settings: plain public attributes, the columns, and what its tokenizers make of residues."""
    if collator is None:
        return {}
    facts: dict[str, Any] = {"class": getattr(collator, "__qualname__", type(collator).__qualname__)}
    for name, value in getattr(collator, "__dict__", {}).items():
        if not name.startswith("_") and (name == "columns" or isinstance(value, bool | int | float | str | None)):
            facts[name] = _plain(value)
    tokenizers = getattr(collator, "tokenizers", None)
    if isinstance(tokenizers, Mapping):
        facts["tokenizers"] = {
            str(name): {"ids": t.fingerprint(), "max_residues": t.max_residues} for name, t in tokenizers.items()
        }
    return facts


def _plain(value: Any) -> Any:
    """`value` as JSON would bring it back; of objects that JSON does not know, the class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(vars(value))
    return type(value).__qualname__

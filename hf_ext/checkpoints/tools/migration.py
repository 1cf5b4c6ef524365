"""From a `.pth` of another training script to a model folder, and a checkpoint to continue from where that is exact."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from ...errors import ArgumentError, CheckpointError
from ...models.affinity import AffinityModel
from ...models.configuration import AffinityConfig
from ...models.encoders import load_encoder
from ..format.manifest import hash_file
from ..format.tensor_files import as_bytes, describe_names, read_json
from ..state.entry_matching import check_entries, match_names
from .old_files import OldFile, read_old_file
from .old_optimizer import write_old_checkpoint

CONVERSION = "conversion.json"
# The model computes these itself; releases of transformers differ in whether they are saved.
_COMPUTED = re.compile(r"(^|\.)(position_ids|inv_freq)$")
# An affinity model's standardisation of its inputs, which is the identity until it is measured.
_STANDARDISATION = frozenset({"head.input_mean", "head.input_scale"})
# What turns text into inputs; the rest of a model folder belongs to its own weights.
_COMPANIONS = """
inputs.json tokenizers tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.txt
vocab.json merges.txt spiece.model sentencepiece.bpe.model
""".split()  # noqa: SIM905  readable as a paragraph

_NOTES = (
    ("widened", "widened to float32"),
    ("left_out", "left out (--drop)"),
    ("computed_by_the_model", "computed by the model itself"),
    ("not_taken", "entries of the file that are no weights, optimizer or numbers"),
)


@dataclass(frozen=True)
class ConversionSettings:
    """How names and units of the old file become those of the model.

    Attributes:
        rename: (old prefix, new prefix) pairs; of several that fit a name, the first. "" stands for every name.
        drop: prefixes, after renaming, of entries to leave out.
        weights_key: entry of the file that holds the weights; None looks for it.
        label_scale: mean and standard deviation, in label units, by which the old script standardised its labels.
    """

    rename: Sequence[tuple[str, str]] = ()
    drop: Sequence[str] = ()
    weights_key: str | None = None
    label_scale: tuple[float, float] = (0.0, 1.0)


def convert(
    old: Path, model_folder: Path, output_dir: Path, settings: ConversionSettings | None = None
) -> dict[str, Any]:
    """Writes the weights of `old` as a model that `from_pretrained` loads, every entry checked by name, shape and bits.

    Where the optimizer's state certainly belongs to the model's parameters, also `checkpoint-<step>`, from which
    `--resume auto` continues. `conversion.json`, written last, says what was taken, renamed, left out, and why.

    Args:
        old: of tensors and numbers; nothing else in it is built, nothing is run.
        model_folder: `config.json` of the model that the weights are for; its weights, if any, are not used.
        output_dir: new or empty.

    Returns:
        What `conversion.json` holds.

    Raises:
        ArgumentError: `output_dir` is not empty, `model_folder` names no model class, a rename or drop fits no name.
        CheckpointError: the file cannot be read, or its entries are not those of the model; names them.

    Cost: memory for the file and two models.
    """
    settings = settings or ConversionSettings()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ArgumentError(f"--output_dir {output_dir}: not empty. Nothing is overwritten: give a new folder.")
    file = read_old_file(old, settings.weights_key)
    model = model_from_config(model_folder)
    names = _new_names(file.weights, settings)
    report = {"format": 1, "source": old.name, "sha256": hash_file(old).sha256, "model_class": type(model).__name__}
    report |= {"weights_key": file.weights_key, "prefixes_removed": list(file.prefixes)}
    report |= _load(model, file, names, old)
    report |= {"values": file.values, "not_taken": file.others}
    if isinstance(model, AffinityModel):
        config: Any = model.config
        config.label_mean, config.label_std, config.is_scaled = *settings.label_scale, True
        report["label_scale"] = list(settings.label_scale)
    output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(output_dir), save_original_format=False)
    _copy_companions(model_folder, output_dir)
    _check_saved(model, output_dir)
    order = [new for new in names.values() if new is not None]
    report["optimizer"] = write_old_checkpoint(model, file, order, output_dir)
    (output_dir / CONVERSION).write_text(json.dumps(report, indent=2) + "\n")
    return report


def model_from_config(folder: Path) -> Any:
    """A model of the class and sizes that `config.json` in `folder` names; weights not yet loaded, float32.

    Raises:
        ArgumentError: no configuration, or a class that is not transformers' own or `AffinityModel`.
    """
    if not (folder / "config.json").is_file():
        raise ArgumentError(f"--model {folder}: no config.json there. Give a folder that save_pretrained wrote.")
    if read_json(folder / "config.json").get("model_type") == AffinityConfig.model_type:
        return AffinityModel(AffinityConfig.from_pretrained(folder))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--model {folder}: {str(error).splitlines()[0]}") from error
    name = (config.architectures or [None])[0]
    cls = getattr(transformers, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ArgumentError(
            f"--model {folder}: config.json names the class {name}, which is none of transformers' models. Put the "
            'class into it, for example "architectures": ["EsmForMaskedLM"].'
        )
    return cls(config)


def _new_names(weights: dict[str, torch.Tensor], settings: ConversionSettings) -> dict[str, str | None]:
    """Name in the file -> name in the model, None where it is to be left out."""
    names: dict[str, str | None] = {}
    unused = {f"--rename {old}={new}" for old, new in settings.rename} | {f"--drop {p}" for p in settings.drop}
    for name in weights:
        changed = name
        for old, new in settings.rename:
            if name.startswith(old):
                changed = new + name[len(old) :]
                unused.discard(f"--rename {old}={new}")
                break
        dropped = [prefix for prefix in settings.drop if changed.startswith(prefix)]
        unused -= {f"--drop {prefix}" for prefix in dropped}
        names[name] = None if dropped else changed
    if unused:
        raise ArgumentError(f"{', '.join(sorted(unused))}: no name fits. The file has {describe_names(list(names))}.")
    kept = [name for name in names.values() if name is not None]
    twice = sorted({name for name in kept if kept.count(name) > 1}) if len(set(kept)) < len(kept) else []
    if twice:
        raise ArgumentError(f"--rename: several entries would become one: {describe_names(twice)}.")
    return names


def _load(model: Any, file: OldFile, names: dict[str, str | None], old: Path) -> dict[str, Any]:
    """Gives the model the file's weights; returns what was done with each."""
    tensors = {new: file.weights[name] for name, new in names.items() if new is not None}
    _attach_encoders(model, tensors)
    state = model.state_dict(keep_vars=True)
    computed = [name for name in tensors if name not in state and _COMPUTED.search(name)]
    found, unexpected = match_names(state, {n: t for n, t in tensors.items() if n not in computed})
    widened = {name: tensor for name, tensor in found.items() if _is_narrower(tensor, state[name])}
    found |= {name: tensor.to(state[name].dtype) for name, tensor in widened.items()}
    standing = {name for name in state if _COMPUTED.search(name)} | (_STANDARDISATION & state.keys())
    referenced = getattr(model, "_keys_to_ignore_on_save", None) or set()
    try:
        check_entries(old, state, found, unexpected, state.keys() - standing - referenced)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}\nNames: --rename OLD=NEW changes the beginning of names, --drop PREFIX leaves entries out. This "
            f"model has {describe_names(list(state))}; the file {describe_names(list(tensors))}."
        ) from error
    _check_referenced(old, state, {name: found[name] for name in found if name in referenced})
    model.load_state_dict(found, strict=False)
    return {
        "taken": {new: name for name, new in names.items() if new is not None and new not in computed},
        "widened": {name: f"{tensor.dtype}".removeprefix("torch.") for name, tensor in widened.items()},
        "left_out": [name for name, new in names.items() if new is None],
        "computed_by_the_model": sorted({*computed, *(standing - found.keys())}),
    }


def _attach_encoders(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Loads what an affinity model stores by reference and the file holds too, so that the two can be compared."""
    if not isinstance(model, AffinityModel) or not any(name.startswith("encoders.") for name in tensors):
        return
    if not model.config.save_full:
        for index, spec in enumerate(model.config.encoder_specs):
            if spec.training == "lora":  # built without the weights that its adapters stand on
                model.encoders[str(index)] = load_encoder(spec)
    model.attach_encoders()


def _is_narrower(tensor: torch.Tensor, entry: torch.Tensor) -> bool:
    """Whether float32 holds the tensor's values exactly."""
    return entry.dtype == torch.float32 and tensor.dtype in (torch.float16, torch.bfloat16)


def _check_referenced(old: Path, state: dict[str, Any], found: dict[str, torch.Tensor]) -> None:
    """Encoder weights that the model names instead of storing must be the file's, or they would be lost."""
    changed = [name for name, tensor in found.items() if not torch.equal(as_bytes(tensor), as_bytes(state[name]))]
    if changed:
        raise CheckpointError(
            f"{old}: {describe_names(changed)} are not the weights of the encoders that this model names. If they were "
            'trained, give a model whose towers train ("training": "full"); if the encoders only were in another '
            "precision, leave them out with --drop encoders. and the original ones are used."
        )


def _check_saved(model: Any, folder: Path) -> None:
    """What `from_pretrained` reads must be what was converted, bit for bit."""
    loaded, info = type(model).from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True)
    here, there = model.state_dict(), loaded.state_dict()
    wrong = [name for name in there if name in here and not torch.equal(as_bytes(here[name]), as_bytes(there[name]))]
    wrong += [*info["missing_keys"], *info["unexpected_keys"]]
    if wrong:
        raise CheckpointError(f"{folder} does not load as it was written: {describe_names(sorted(wrong))}.")


def _copy_companions(source: Path, target: Path) -> None:
    for name in _COMPANIONS:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        elif (source / name).is_file():
            shutil.copy2(source / name, target / name)


def describe_conversion(report: dict[str, Any], folder: Path) -> str:
    """What `convert` did and how to go on, for a terminal."""
    optimizer = report["optimizer"]
    lines = [
        f"{report['source']}: {len(report['taken'])} tensors are now a {report['model_class']} in {folder}, checked by "
        "name, shape and bits.",
        *(f"  {len(report[part])} {text}" for part, text in _NOTES if report[part]),
        *(f"  {name}: {value}" for name, value in report["values"].items()),
    ]
    if "checkpoint" in optimizer:
        lines += [
            f"AdamW's state is in {folder / optimizer['checkpoint']}: --output_dir {folder} --resume auto goes on from "
            f"step {optimizer['step']} with its learning rate of {optimizer['learning_rate']:g}. Random states and the "
            "order of the data begin anew.",
        ]
    else:
        lines += [f"Optimizer: left out. {optimizer['left_out']}"]
    return "\n".join([*lines, f"Details: {folder / CONVERSION}"])

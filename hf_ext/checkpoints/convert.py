"""From a `.pth` of another training script to a model folder that `from_pretrained` loads, compared bit for bit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..errors import ArgumentError, CheckpointError
from ..models.affinity import AffinityModel
from ..models.configuration import AffinityConfig
from .finished_model import TOKENIZER
from .weights import name_some

WEIGHT_KEYS = ("model_state_dict", "state_dict", "model", "model_state", "net", "network", "weights", "module")
# Models compute these themselves; releases of transformers differ in whether they are saved.
_COMPUTED = re.compile(r"(^|\.)(position_ids|inv_freq)$")
# An affinity model's standardisation of its inputs, which is the identity until it is measured.
_STANDARDISATION = ("head.input_mean", "head.input_scale")
# What turns text into inputs; the rest of a model folder belongs to its own weights.
_COMPANIONS = re.compile(rf"inputs\.json|tokenizers|{TOKENIZER}")
# What SciPy and NumPy return as a metric, which scripts save beside the weights, is pickled by this function.
_NUMBERS: list[Any] = [np.dtype, type(np.dtype("f4")), type(np.dtype("f8"))]
_NUMBERS += [(np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]


def convert(
    old: Path,
    model_folder: Path,
    output_dir: Path,
    rename: Sequence[tuple[str, str]] = (),
    drop: Sequence[str] = (),
    label_scale: tuple[float, float] = (0.0, 1.0),
) -> dict[str, list[str]]:
    """Writes the weights of `old` as a model. What is written is loaded again, and every entry compared by its bits.

    Args:
        old: of tensors, numbers and dictionaries of them; nothing in it is run.
        model_folder: with the `config.json` of the model that the weights are for; its own weights are not used.
        output_dir: new or empty.
        rename: (old prefix, new prefix) of names; of several that fit a name, the first. "" stands for every name.
        drop: prefixes, after renaming, of entries to leave out.
        label_scale: mean and standard deviation, in label units, by which the old script standardised its labels.

    Returns:
        Names: "taken" by the model, "dropped" of the file, "computed" by the model itself.

    Raises:
        ArgumentError: `output_dir` is not empty, or `model_folder` names no model class.
        CheckpointError: the file cannot be read, or its entries are not those of the model; names them.

    Cost: memory for the file and two models.
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ArgumentError(f"--output_dir {output_dir}: not empty. Nothing is overwritten: give a new folder.")
    weights = _read_weights(old)
    renamed = {}
    for name in weights:
        before, after = next((pair for pair in rename if name.startswith(pair[0])), ("", ""))
        renamed[name] = after + name.removeprefix(before)
    dropped = [name for name, new in renamed.items() if new.startswith(tuple(drop))]
    tensors = {new: weights[name] for name, new in renamed.items() if name not in dropped}
    if len(tensors) + len(dropped) < len(weights):
        raise ArgumentError("--rename: several entries of the file would have one name.")
    tensors = {name: tensor for name, tensor in tensors.items() if not _COMPUTED.search(name)}
    model = _build_model(model_folder)
    if isinstance(model.config, AffinityConfig):
        model.config.label_mean, model.config.label_std, model.config.is_scaled = *label_scale, True
    computed = _load(model, tensors, old)
    _compare(model, tensors)
    output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(output_dir), save_original_format=False)
    for path in filter(lambda path: _COMPANIONS.fullmatch(path.name), model_folder.iterdir()):
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, output_dir / path.name)
    _compare(type(model).from_pretrained(str(output_dir), dtype=torch.float32), tensors)
    return {"taken": [*tensors], "dropped": dropped, "computed": computed}


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Name -> tensor, without the prefixes that torch.compile and DataParallel (DDP too) put before names."""
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a file that torch.save wrote, found no file.")
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises for a damaged or hostile file has no common class
        asked = re.search(r"GLOBAL (\S+) ", str(error))
        raise CheckpointError(
            f"{path}: damaged, or more than tensors and numbers; nothing was run"
            f"{f' (asks for {asked[1]})' if asked else ''}. If you made this file yourself, load it where it was made "
            "and save its tensors alone: torch.save({'model_state_dict': model.state_dict()}, NEW)."
        ) from error
    candidates = [content, *map(content.get, WEIGHT_KEYS)] if isinstance(content, Mapping) else []
    weights = next(filter(_is_weights, candidates), None)
    if weights is None:
        raise CheckpointError(
            f"{path}: expected names and tensors, as model.state_dict(), alone or as one of {', '.join(WEIGHT_KEYS)}. "
            "Save such a file where it was made: torch.save({'model_state_dict': model.state_dict()}, NEW)."
        )
    names = [name.replace("_orig_mod.", "") for name in weights]
    if all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.").replace("_orig_mod.", "") for name in names]
    return dict(zip(names, weights.values()))


def _is_weights(value: Any) -> bool:
    """Whether it is name -> tensor, as `Module.state_dict()` returns it."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(name, str) and isinstance(entry, torch.Tensor) for name, entry in value.items())


def _build_model(folder: Path) -> Any:
    """A model of the class and sizes that `config.json` in `folder` names, in float32."""
    if not (folder / "config.json").is_file():
        raise ArgumentError(f"--model {folder}: no config.json there. Give a folder that save_pretrained wrote.")
    if PretrainedConfig.get_config_dict(folder)[0].get("model_type") == AffinityConfig.model_type:
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


def _load(model: Any, tensors: dict[str, torch.Tensor], old: Path) -> list[str]:
    """Gives the model the tensors, all that it needs and no more; returns the names of what it computes itself."""
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        problems = []
    except RuntimeError as error:  # of another shape: names them, with both shapes
        missing, unexpected, problems = [], [], [str(error)]
    computed = [name for name in missing if _COMPUTED.search(name) or name in _STANDARDISATION]
    missing = [name for name in missing if name not in computed]
    problems += [f"missing: {name_some(missing)}"] if missing else []
    problems += [f"not in this model: {name_some(unexpected)}"] if unexpected else []
    if problems:
        text = "\n  ".join(problems)
        raise CheckpointError(
            f"{old} does not fit this model; nothing was written.\n  {text}\n--rename OLD=NEW changes the beginning of "
            f"names, --drop PREFIX leaves entries out. This model has {name_some(list(model.state_dict()))}; the file "
            f"{name_some(list(tensors))}. Frozen encoders are named by an affinity model, not stored in it: drop them, "
            'unless they were trained; then give a model whose towers train ("training": "full").'
        )
    return computed


def _compare(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Each entry must be what the file held: equal in the file's own precision, which float32 may widen."""
    state = model.state_dict()
    wrong = [name for name, tensor in tensors.items() if not torch.equal(state[name].to(tensor.dtype), tensor)]
    if wrong:
        raise CheckpointError(
            f"{name_some(wrong)} would not be what the file holds: NaN, more digits than float32 has, or two values "
            "for weights that are one in this model. Convert a file without them."
        )

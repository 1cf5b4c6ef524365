"""A finished model: a manifest says what its files are, and whoever loads it checks these, and its weights."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import INPUTS_NAME
from ..errors import ArgumentError, CheckpointError
from ..files import StrPath
from ..pretrained import fetch_folder, reading
from ..text import write_json
from .manifest import Manifest, check_files, hash_file, read_json

MODEL_MANIFEST = "model_manifest.json"
WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|adapter_model\.safetensors"
_TOKENIZER = (
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(txt|json)|"
    r"merges\.txt|spiece\.model|tokenizer\.model|sentencepiece\.bpe\.model|chat_template\.jinja"
)
_CONFIG = r"(generation_|adapter_)?config\.json|inputs\.json"
PART = re.compile(rf"{WEIGHTS}|{_CONFIG}|(tokenizers/\d+/)?({_TOKENIZER})")

# Files that a model needs; never pickled weights, whatever else lies in a repository.
_FILES = [
    *("config.json", INPUTS_NAME, "model*.safetensors", "model.safetensors.index.json", "tokenizers/*"),
    MODEL_MANIFEST,
]

MEMBERS = "members.json"  # of a folder of several models, whose mean predicts
_MEMBER = re.compile(r"((fold_[\w.-]+|final)/)?seed_\d+")
_FOLDERS = ("fold_*/", "final/", "seed_*/")

logger = logging.getLogger(__name__)


def write_model_manifest(folder: StrPath, step: int = 0, epoch: float = 0.0) -> None:
    """Writes `model_manifest.json`: size and sha256 of what loading reads, not of card, report or records.

    Raises:
        OSError: the disk failed.

    Cost: reads the files once, see `hash_file`.
    """
    files = {name: hash_file(Path(folder) / name) for name in list_files(folder, PART)}
    Manifest("", step, epoch, {}, files).write(folder, MODEL_MANIFEST)


def check_model(folder: StrPath) -> None:
    """Refuses a folder whose files are not those of its manifest; one without a manifest is named in the log.

    Raises:
        ArgumentError: with every file that differs, or the manifest itself.

    Cost: reads the files once, see `hash_file`.
    """
    if not os.path.lexists(Path(folder) / MODEL_MANIFEST):
        logger.info("%s has no %s: its files cannot be verified.", folder, MODEL_MANIFEST)
        return
    try:
        manifest = Manifest.read(folder, MODEL_MANIFEST, may_link=True)  # the Hub's cache is made of links
        problems = check_files(folder, manifest, may_link=True)
    except CheckpointError as error:
        problems = [str(error).rstrip(".")]
    if problems:
        raise ArgumentError(
            f"Model {folder} is not what was saved: {'; '.join(problems)}. Copy it, or download it, again; if you "
            f"changed it on purpose, delete its {MODEL_MANIFEST}."
        )


def open_model(cls: Any, folder: StrPath) -> Any:
    """Opens the model of class `cls` in a folder, from safetensors, verified by its manifest, with finite weights.

    Args:
        folder: its files are those that were saved, where it has a manifest.

    Raises:
        ArgumentError: files are missing, damaged or not those of the manifest, or weights are not finite.

    Cost: one read of a folder's files to verify them, see `hash_file`, and one to load them.
    """
    check_model(folder)
    with reading(f"Model {folder} cannot be loaded", str(folder), "Copy it, or download it, again."):
        opened = cls.from_pretrained(folder, use_safetensors=True)
    check_finite(folder, opened.state_dict())
    return opened


def check_finite(folder: StrPath, tensors: Mapping[str, Tensor]) -> None:
    """Refuses a loaded model that would answer every question with NaN.

    Args:
        folder: where it came from, for the message.
        tensors: its state dict.

    Raises:
        ArgumentError: with the first names that are NaN or infinite.
    """
    wrong = not_finite((name, tensor) for name, tensor in tensors.items() if tensor.device.type != "meta")
    if wrong:
        raise ArgumentError(
            f"Model {folder}: {', '.join(wrong[:5])} ({len(wrong)} in all) hold NaN or infinity, so that it can "
            "predict nothing. Take another model, or train it again."
        )


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of tensors that hold NaN or infinity, in the order given; of sharded tensors, this process's shard.

    Args:
        tensors: pairs of name and tensor, as `model.named_parameters()`; other dtypes than floating ones are finite.

    Cost: one fused pass over the bytes and one device synchronisation (7 ms for 200 MB on a CPU core), and where that
    is not finite, a pass per tensor that names them.
    """
    pairs = [(name, _floating(tensor)) for name, tensor in tensors]
    floating = [(name, tensor) for name, tensor in pairs if tensor is not None]
    # A norm that overflows is not finite either: the second pass finds no name then.
    if torch.nn.utils.get_total_norm([tensor for _, tensor in floating]).isfinite():
        return []
    return [name for name, tensor in floating if not tensor.isfinite().all()]


def list_files(folder: StrPath, allowed: re.Pattern[str]) -> list[str]:
    """Lists files of a model folder with such a name. No links: one has an allowed name and leads to anything."""
    root = Path(folder)
    here = root.resolve()
    paths = [path.relative_to(root) for path in (*root.glob("*"), *root.glob("tokenizers/*/*")) if path.is_file()]
    names = [path.as_posix() for path in paths if (root / path).resolve() == here / path]
    return sorted(filter(allowed.fullmatch, names))


def _floating(tensor: Tensor) -> Tensor | None:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    return tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no norm


def find_model(name_or_path: str | Path, revision: str | None = None) -> Path:
    """Finds the folder of a trained affinity model: a local one as it is, or a Hub model's snapshot.

    Raises:
        ArgumentError: as `find_members`; or it holds several models.
    """
    first, *others = find_members(name_or_path, revision)
    if others:
        raise ArgumentError(
            f"Model {name_or_path}: {1 + len(others)} models, whose mean predicts, and here one is needed. Give the "
            f"folder of one, such as {first}."
        )
    return first


def find_members(name_or_path: str | Path, revision: str | None = None) -> list[Path]:
    """Finds the folders of the trained affinity models whose mean predicts: mostly one, the folder itself.

    Raises:
        ArgumentError: neither a folder nor a model that the Hub hands out; no model of `recipes/max_speed.py`; or a
            folder of several models whose list is damaged, or of which one is not what was listed.

    Cost: of a Hub model one download, of the files that loading needs; the Hub's cache keeps them.
    """
    files = [start + name for start in ("", *_FOLDERS) for name in _FILES]
    folder = fetch_folder(name_or_path, revision, [MEMBERS, *files])
    folders = [folder / name for name in read_members(folder)] or [folder]
    if not all((one / INPUTS_NAME).is_file() for one in folders):
        raise ArgumentError(
            f"Model {name_or_path}: no {INPUTS_NAME} there. Give the output folder of a finished `hf-ext train`, or "
            "the Hub id it was pushed to."
        )
    return folders


def write_members(folder: StrPath, names: Iterable[str]) -> None:
    """Writes `members.json`: folders of models, relative, each with the sha256 of its manifest.

    Raises:
        OSError: the disk refuses.
    """
    members = {name: hash_file(Path(folder, name, MODEL_MANIFEST)).sha256 for name in names}
    write_json(Path(folder, MEMBERS), {"format": 1, "members": members})


def read_members(folder: StrPath) -> list[str]:
    """Reads the names of the models in a folder of several; none where it is no such folder.

    Raises:
        ArgumentError: the list is damaged, or a model is another one than it was.
    """
    path = Path(folder, MEMBERS)
    if not path.is_file():
        return []
    try:
        members = read_json(path.resolve())["members"]  # the Hub's cache is made of links
        hashes = {name: hash_file(path.parent / name / MODEL_MANIFEST) for name in filter(_MEMBER.fullmatch, members)}
        wrong = [name for name in members if name not in hashes or hashes[name].sha256 != members[name]]
    except (CheckpointError, OSError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"Model {path}: damaged ({error}). Copy it, or download it, again.") from error
    if wrong or not members:
        raise ArgumentError(f"Model {path}: {', '.join(wrong) or 'no model'}: not what was saved. Copy it again.")
    return [*members]

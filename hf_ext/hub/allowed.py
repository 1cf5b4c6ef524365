"""Which files may leave this machine, and with what content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import cast

from ..checkpoints.finished_model import CONFIG, MODEL_MANIFEST, TOKENIZER, WEIGHTS, check_model
from ..checkpoints.manifest import CHECKPOINT_NAME, MANIFEST, FileRecord, Manifest
from ..errors import ArgumentError

CARD = "README.md"
LAST_CHECKPOINT = "last-checkpoint"  # where in the repository, as stock Trainer names it

# By name in the repository: the content as it was when it was taken, or of weights the place that is read later.
Files = dict[str, bytes | Path]

_ABOUT = r"README\.md|LICENSE|report\.(html|md)|(loss|scatter)\.png"
_ALLOWED = re.compile(rf"{WEIGHTS}|{CONFIG}|{_ABOUT}|{re.escape(MODEL_MANIFEST)}|(tokenizers/\d+/)?({TOKENIZER})")
_WEIGHTS = re.compile(WEIGHTS)
# What decides which weights `from_pretrained` reads. A leftover of an earlier push would be read beside or instead of
# the new model: model.safetensors before an index, adapters on top of a full model; or would vouch for another model.
_DECIDES_LOADING = re.compile(
    rf"{WEIGHTS}|{re.escape(MODEL_MANIFEST)}|adapter_config\.json|(pytorch|adapter)_model.*\.bin(\.index\.json)?"
)
_LARGE = (".safetensors", ".pt", ".pth")
_OF_CHECKPOINT = (*_LARGE, ".json", ".txt", ".md", ".model", ".jinja")  # nothing that can be run
_STORED_WHOLE = {"hf_ext_affinity": ["full"], "hf_ext_generator": ["full", "lora"]}  # how encoders in the folder train
_ANY_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{34}")  # the form of the Hub's access tokens
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"

logger = logging.getLogger(__name__)


def holds_model(folder: str | os.PathLike[str]) -> bool:
    """Whether there are weights that `from_pretrained` reads; checkpoints may hold only those that train, or pieces."""
    return any(_WEIGHTS.fullmatch(name) for name in os.listdir(folder))


def model_files(folder: str | os.PathLike[str]) -> Files:
    """The files of a model folder that may leave this machine: those known to be needed, and no others.

    Weights as safetensors (whole, sharded, adapters), configuration, tokenizers, `inputs.json`, the manifest of these,
    the card and the report with its two figures. So never pickles, arguments, optimizer, random states, logs, the plan,
    predictions or data. Symbolic links are left out: a link may have an allowed name and lead to anything. Paths of
    encoders whose weights are in the folder are shortened to their last part: they name people and machines. PEFT's
    template of a card, in which nobody has written, stays too.

    Raises:
        ArgumentError: no such folder, it holds no weights, or other files than its manifest says.
        OSError: a file cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ArgumentError(f"{root} is no folder, or is one no longer. Give one that `save_model` wrote.")
    if not holds_model(root):
        raise ArgumentError(
            f"{root} holds no weights to push: no model.safetensors, shards of it, or adapter_model.safetensors. "
            "Give a folder that `save_model` or `save_pretrained` wrote. (A checkpoint may hold only what trains, or "
            "pieces: then --hub_strategy checkpoint pushes it whole, and the trained model is pushed at the end.)"
        )
    check_model(root)
    here = root.resolve()
    paths = [path.relative_to(root) for path in [*root.glob("*"), *root.glob("tokenizers/*/*")] if path.is_file()]
    names = [path.as_posix() for path in paths if (root / path).resolve() == here / path]
    files = {name: _content(root / name) for name in sorted(names) if _ALLOWED.fullmatch(name)}
    if is_draft(files.get(CARD)):
        del files[CARD]
    _hide_paths(files, root)
    if _ADAPTER in files:
        _warn_if_local(json.loads(cast(bytes, files[_ADAPTER])).get("base_model_name_or_path"), root)
    return files


def checkpoint_files(folder: str | os.PathLike[str], place: str) -> Files:
    """All files of a checkpoint of hf_ext, under `place`: what a run needs that continues from it elsewhere.

    So also optimizer and random states, and the arguments, without tokens. Files that its manifest does not list stay.

    Raises:
        ArgumentError: it holds a library's files, as checkpoints of models spread by FSDP or DeepSpeed do, or pickled
            arguments.
        CheckpointError: no checkpoint of hf_ext, or its manifest is damaged.
    """
    names = sorted([MANIFEST, *Manifest.read(folder).files])
    others = [name for name in names if not name.endswith(_OF_CHECKPOINT)]
    if others:
        raise ArgumentError(f"{folder} holds {', '.join(others)}; only {', '.join(_OF_CHECKPOINT)} leave this machine.")
    return {f"{place}/{name}": _content(Path(folder, name)) for name in names}


def is_draft(card: bytes | Path | None) -> bool:
    """Whether a README.md is PEFT's template, in which nobody has written."""
    return isinstance(card, bytes) and card.count(b"[More Information Needed]") > 3


def find_token(files: Files, token: str) -> str | None:
    """The name of a file, other than weights, that contains `token` or anything that has the form of a token."""
    texts = {name: content for name, content in files.items() if isinstance(content, bytes)}
    return next((name for name, text in texts.items() if token.encode() in text or _ANY_TOKEN.search(text)), None)


def find_replaced(present: list[str], files: Files) -> list[str]:
    """Of the names `present` in a repository, what an earlier push left there and `files` take the place of."""
    has_model = any(_WEIGHTS.fullmatch(name) for name in files)
    has_checkpoint = any(name.startswith(f"{LAST_CHECKPOINT}/") for name in files)
    return [
        name
        for name in present
        if name not in files
        if (has_model and _DECIDES_LOADING.fullmatch(name))
        or (has_checkpoint and name.startswith(f"{LAST_CHECKPOINT}/"))
    ]


def _content(path: Path) -> bytes | Path:
    return path if path.suffix in _LARGE else path.read_bytes()


def _hide_paths(files: Files, root: Path) -> None:
    """Shortens the paths of encoders whose weights are in the folder, which nothing reads; its manifest follows."""
    config = json.loads(cast(bytes, files.get(_CONFIG, b"{}")))
    whole = _STORED_WHOLE.get(config.get("model_type", ""))
    if whole is None:
        return
    for encoder in [*config.get("encoders", []), *filter(None, [config.get("antigen_encoder")])]:
        path = encoder["name_or_path"]
        encoder["config"].pop("_name_or_path", None)  # the same path again
        if not (config["save_full"] or encoder["training"] in whole):
            _warn_if_local(path, root)
        elif os.path.isabs(path):
            encoder["name_or_path"] = os.path.basename(os.path.normpath(path))
    files[_CONFIG] = content = (json.dumps(config, indent=2) + "\n").encode()
    if MODEL_MANIFEST in files:
        manifest, digest = Manifest.read(root, MODEL_MANIFEST), hashlib.sha256(content).hexdigest()
        changed = {**manifest.files, _CONFIG: FileRecord(len(content), digest)}
        with tempfile.TemporaryDirectory() as draft:
            dataclasses.replace(manifest, files=changed).write(draft, MODEL_MANIFEST)
            files[MODEL_MANIFEST] = Path(draft, MODEL_MANIFEST).read_bytes()


def _warn_if_local(base: str | None, root: Path) -> None:
    """Warns of an encoder or base model that others do not have; not with each checkpoint of a run."""
    if (not base or os.path.isdir(base)) and not CHECKPOINT_NAME.fullmatch(root.name):
        logger.warning(
            "The model on the Hub cannot be loaded elsewhere: %s is known to this machine alone, and its name was "
            "pushed, not its weights. Train with an encoder of the Hub, or with --save_full (affinity models), or push "
            "merged weights.",
            base or "the base model, which has no name,",
        )

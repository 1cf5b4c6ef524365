"""Which files may leave this machine, and with what content."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from ..checkpoints import MEMBERS, MODEL_MANIFEST, PART, WEIGHTS, check_model, list_files, read_members
from ..errors import ArgumentError
from ..files import StrPath

CARD = "README.md"

# By name in the repository: the content as it was when it was taken, or of weights the place that is read later.
Files = dict[str, bytes | Path]

_ABOUT = r"README\.md|LICENSE|report\.html|(loss|scatter)\.png"
_OF_MODEL = re.compile(rf"{PART.pattern}|{re.escape(MODEL_MANIFEST)}")
_ALLOWED = re.compile(rf"{_OF_MODEL.pattern}|{_ABOUT}|{re.escape(MEMBERS)}")
# What decides which weights `from_pretrained` reads. A leftover of an earlier push would be read beside or instead of
# the new model: model.safetensors before an index, adapters on top of a full model; or would vouch for another model.
DECIDES_LOADING = re.compile(
    rf"{WEIGHTS}|{re.escape(MODEL_MANIFEST)}|{re.escape(MEMBERS)}|adapter_config\.json|(pytorch|adapter)_model.*\.bin(\.index\.json)?"
)
_ANY_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{34}")  # the form of the Hub's access tokens

logger = logging.getLogger(__name__)


def model_files(folder: StrPath) -> Files:
    """Lists the files of a model folder that may leave this machine: those known to be needed, and no others.

    Weights as safetensors (whole, sharded, adapters), configuration, tokenizers, `inputs.json`, the manifest of these,
    the card and the report with its two figures. So never pickles, arguments, optimizer, random states, logs, the plan,
    predictions or data. Symbolic links are left out: a link may have an allowed name and lead to anything. PEFT's
    template of a card, untouched, stays too. Of a folder of several models, card, report and list, and the models.

    Raises:
        ArgumentError: no such folder, it holds no weights, or other files than its manifest says.
        OSError: a file cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ArgumentError(f"{root} is no folder, or is one no longer. Give one that `save_model` wrote.")
    members = read_members(root)
    if not members and not any(re.fullmatch(WEIGHTS, name) for name in os.listdir(root)):
        raise ArgumentError(
            f"{root} holds no weights to push: no model.safetensors, shards of it, or adapter_model.safetensors. "
            "Give a folder that `save_model` or `save_pretrained` wrote. (A checkpoint may hold only what trains, or "
            "pieces: then the trained model is pushed at the end.)"
        )
    for part in members or [""]:
        check_model(root / part)
    files: Files = {}
    inside = [f"{part}/{name}" for part in members for name in list_files(root / part, _OF_MODEL)]
    for name in (*list_files(root, _ALLOWED), *inside):
        path = root / name
        files[name] = path if path.suffix == ".safetensors" else path.read_bytes()
    if is_draft(files.get(CARD)):
        del files[CARD]
    return files


def is_draft(card: bytes | Path | None) -> bool:
    """Tells whether a README.md is PEFT's template, untouched."""
    return isinstance(card, bytes) and card.count(b"[More Information Needed]") > 3


def find_token(files: Files, token: str) -> str | None:
    """Finds a file, other than weights, that contains `token` or anything that has the form of a token."""
    texts = {name: content for name, content in files.items() if isinstance(content, bytes)}
    return next((name for name, text in texts.items() if token.encode() in text or _ANY_TOKEN.search(text)), None)

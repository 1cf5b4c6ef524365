"""The folder of a finished model: a manifest says what its files are, and whoever loads the model checks them."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from ..errors import ArgumentError, CheckpointError
from .manifest import Manifest, check_files, hash_file

MODEL_MANIFEST = "model_manifest.json"
WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|adapter_model\.safetensors"
TOKENIZER = (
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(txt|json)|"
    r"merges\.txt|spiece\.model|tokenizer\.model|sentencepiece\.bpe\.model|chat_template\.jinja"
)
CONFIG = r"(generation_|adapter_)?config\.json|inputs\.json"
_PART = re.compile(rf"{WEIGHTS}|{CONFIG}|(tokenizers/\d+/)?({TOKENIZER})")

logger = logging.getLogger(__name__)


def write_model_manifest(folder: str | os.PathLike[str], step: int = 0, epoch: float = 0.0) -> None:
    """Writes `model_manifest.json`: size and sha256 of what loading reads, not of card, report or records.

    Raises:
        OSError: the disk failed.

    Cost: reads the files once, see `hash_file`.
    """
    files = {name: hash_file(Path(folder) / name) for name in _list_parts(Path(folder))}
    Manifest("", step, epoch, {}, files).write(folder, MODEL_MANIFEST)


def check_model(folder: str | os.PathLike[str]) -> None:
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


def _list_parts(root: Path) -> list[str]:
    paths = [*root.glob("*"), *root.glob("tokenizers/*/*")]
    names = [path.relative_to(root).as_posix() for path in paths if path.is_file() and not path.is_symlink()]
    return sorted(name for name in names if _PART.fullmatch(name))

"""What goes wrong while reading published configurations, tokenizers and weights, in one sentence each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .errors import ArgumentError

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@contextmanager
def reading(what: str, source: str | Path, remedy: str) -> Iterator[None]:
    """Turns all that transformers raises for missing, damaged or hostile files into an error that names them.

    Args:
        what: begins the sentence and says what could not be had, such as "Encoder 'x' cannot be loaded".
        source: the folder or Hub id that is read.
        remedy: the sentence after it.

    Raises:
        ArgumentError: "{what} ({reason}). {remedy}". Nothing in a file was run, and no advice to run it is passed on.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a damaged or hostile folder sets off has no common class
        raise ArgumentError(f"{what} ({_explain(error, Path(source))}). {remedy}") from error


def check_index(folder: str | os.PathLike[str]) -> None:
    """Refuses an index of weights that names files elsewhere, which transformers would read.

    Raises:
        ArgumentError: with the first such name; or the index is damaged.
    """
    for index in (Path(folder) / name for name in _INDEXES):
        if not os.path.lexists(index):
            continue
        try:
            names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ArgumentError(
                f"{index}: damaged, no weight_map ({error}). Copy it, or download it, again."
            ) from error
        outside = sorted(name for name in names if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name))
        if outside:
            raise ArgumentError(
                f"{index} names {outside[0]!r}, which is not a file of this folder. Do not use this model."
            )


def _explain(error: Exception, folder: Path) -> str:
    text = str(error)
    if "trust_remote_code" in text or ("backend tokenizer" in text and _names_code(folder)):
        return "it needs code of its own, which is never run here; give one of transformers' own architectures"
    if "weights_only" in text or "Unsupported class" in text:
        asked = re.search(r"GLOBAL (\S+) ", text)
        more = f": it asks for {asked[1]}" if asked else ""
        return f"its weights are pickled and damaged, or more than tensors; nothing was run{more}"
    if "ignore_mismatched_sizes" in text:
        return "its weights have other shapes than its config.json says"
    if "NoneType" in text and "os.PathLike" in text:  # of a tokenizer, whose file transformers looked for in vain
        return "a file that it needs is missing, such as vocab.txt"
    if isinstance(error, SafetensorError):
        return f"{', '.join(_damaged(folder)) or 'its weights'}: damaged, {text}"
    return _first_sentence(text or type(error).__name__)


def _first_sentence(text: str) -> str:
    """The first line, with the next one where it only announces that."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [text]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")


def _names_code(folder: Path) -> bool:
    """Whether a local folder's tokenizer is a class of its own."""
    try:
        return "auto_map" in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _damaged(folder: Path) -> list[str]:
    """Names of the safetensors files in a local folder that cannot be opened."""
    return [path.name for path in sorted(folder.glob("*.safetensors")) if not _opens(path)]


def _opens(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False

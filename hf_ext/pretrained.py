"""What goes wrong while reading published configurations, tokenizers and weights, in one sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .errors import ArgumentError


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


def _explain(error: Exception, folder: Path) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return "it needs code of its own, which is never run here; give one of transformers' own architectures"
    if "weights_only" in text or "Unsupported class" in text:
        asked = re.search(r"GLOBAL (\S+) ", text)
        more = f": it asks for {asked[1]}" if asked else ""
        return f"its weights are pickled and damaged, or more than tensors; nothing was run{more}"
    if isinstance(error, SafetensorError):
        return f"{', '.join(_damaged(folder)) or 'its weights'}: damaged, {text}"
    return (text or type(error).__name__).splitlines()[0].rstrip(".")


def _damaged(folder: Path) -> list[str]:
    """Names of the safetensors files in a local folder that cannot be opened."""
    return [path.name for path in sorted(folder.glob("*.safetensors")) if not _opens(path)]


def _opens(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False

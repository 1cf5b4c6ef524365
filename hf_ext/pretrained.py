"""Fetches published models, and says in one sentence what goes wrong while their files are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from safetensors import SafetensorError, safe_open

from .errors import ArgumentError
from .files import nearest_existing, parse_json


def fetch_folder(name_or_path: str | Path, revision: str | None, files: Sequence[str]) -> Path:
    """Fetches a model's folder: a local one as it is, or a snapshot of a Hub model with those of its files.

    Args:
        revision: commit, tag or branch of a Hub model.
        files: patterns of the names that are downloaded; pickled weights should match none.

    Raises:
        ArgumentError: neither a folder nor a model that the Hub hands out, or a revision of a folder.

    Cost: of a Hub model one download; the Hub's cache keeps it.
    """
    if Path(name_or_path).is_dir():
        if revision is not None:
            raise ArgumentError(f"revision={revision!r}: {name_or_path} is a folder here, which has no revisions.")
        return Path(name_or_path)
    name = str(name_or_path)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*files]))
    except (HFValidationError, HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ArgumentError(
            f"Model {name!r}{at}: no folder here, and the Hub did not hand it out ({' '.join(str(error).split())}). "
            "Check the name (OWNER/NAME), the revision and the network; for a private or gated model run `hf auth "
            "login` or set HF_TOKEN."
        ) from error


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


def check_folder(name: str, what: str) -> str:
    """Refuses what can only be a path and is no folder here.

    Args:
        name: as it was typed; a Hub id is NAME or OWNER/NAME.
        what: begins the sentence, such as "Encoder".

    Returns:
        A sentence with the folder that may be meant, where OWNER is a folder here, so that it may be a path as well; ""
        for folders that are here, and for what can only be a Hub id.

    Raises:
        ArgumentError: with the folder that may be meant; a file; a `~` that was not expanded.
    """
    if os.path.isdir(name):
        return ""
    if os.path.isfile(name):
        raise ArgumentError(f"{what} {name!r} is a file: give its folder, {os.path.dirname(name) or '.'!r}.")
    full = os.path.expanduser(name)
    if os.path.isdir(full):
        raise ArgumentError(f"{what} {name!r}: write the folder in full, {full!r}.")
    is_path = name.startswith(("/", ".", "~")) or name.endswith("/")
    if is_path or name.count("/") > 1 or "\\" in name:
        raise ArgumentError(f"{what} {name!r}: there is no such folder. {_similar_folders(Path(full))}")
    if "/" in name and os.path.isdir(os.path.dirname(name)):
        return _similar_folders(Path(name))
    return ""


def _similar_folders(path: Path) -> str:
    """Returns the folders that a misspelt path may mean, and from where on it leads nowhere."""
    there = nearest_existing(path)
    missing = path.absolute().relative_to(there).parts[0]
    try:
        names = sorted(entry.name for entry in there.iterdir() if entry.is_dir())
    except OSError:  # a file, or a folder that may not be read
        return f"{there} holds no {missing!r}."
    near = get_close_matches(missing, names, n=3, cutoff=0.4)
    shown = f"Nearest names there: {', '.join(near)}" if near else f"Folders there: {', '.join(names[:10]) or 'none'}"
    return f"{there} holds no {missing!r}. {shown}."


def _explain(error: Exception, folder: Path) -> str:
    text = str(error)
    if "trust_remote_code" in text or ("backend tokenizer" in text and _names_code(folder)):
        return "it needs code of its own, which is never run here; take one of transformers' own: biohub/ESMC-300M, say"
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
    """Returns the first line, with the next one where it only announces that."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [text]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")


def _names_code(folder: Path) -> bool:
    """Returns whether a local folder's tokenizer is a class of its own."""
    try:
        return "auto_map" in parse_json((folder / "tokenizer_config.json").read_bytes())
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

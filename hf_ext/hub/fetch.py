"""A model's folder by its name, which may be a folder here or a model on the Hub; and why there is none, in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from ..errors import ArgumentError


def fetch_folder(name_or_path: str | Path, revision: str | None, files: Sequence[str]) -> Path:
    """A model's folder: a local one as it is, or a snapshot of a Hub model with those of its files.

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

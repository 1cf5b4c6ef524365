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
    RepositoryNotFoundError,
    RevisionNotFoundError,
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
    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*files]))
    except (HFValidationError, HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ArgumentError(f"Model {name!r}{at}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    if isinstance(error, HFValidationError):
        return "neither a folder here nor a Hub id. Give a folder, or OWNER/NAME."
    if isinstance(error, RevisionNotFoundError):
        return "the Hub has no such revision of it. Give a commit, tag or branch, or leave it out."
    if isinstance(error, RepositoryNotFoundError):
        return (
            "no folder here, and the Hub hands out no such model. Check the name; for a private or gated one run "
            "`hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return (
            "no folder here and not in the Hub's cache, and the Hub cannot be reached. Connect this machine (and unset "
            "HF_HUB_OFFLINE), or load it once where there is a network and copy the folder."
        )
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return "the Hub refuses the token. Run `hf auth login`, or set HF_TOKEN to one that may read this model."
    return f"the Hub did not hand it out ({str(error).splitlines()[0]}). Try again."

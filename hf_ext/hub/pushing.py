"""Sends a model folder as one commit from a pinned copy, and compares what comes back byte for byte."""

from __future__ import annotations

import glob
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token

from ..checkpoints.manifest import hash_file
from ..errors import ArgumentError
from .allowed import DECIDES_LOADING, IS_WEIGHTS, allow_list, refuse_tokens
from .attempts import Attempts, HubError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Push:
    """A model that the Hub has accepted.

    Attributes:
        repo_id: with the owner ("me/model").
        commit: 40 hex digits.
        url: of the commit.
        files: name in the repository -> sha256 (64 hex digits) of what was sent.
        repeat: the command that pushes the same folder again.
    """

    repo_id: str
    commit: str
    url: str
    files: dict[str, str]
    repeat: str


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool = True,
    endpoint: str | None = None,
    message: str = "Model trained with hf_ext",
    retries: int = 3,
    wait_s: float = 2.0,
) -> Push:
    """Uploads the allowed files of a model folder as one commit, from a pinned copy that rotation cannot delete.

    Weights that an earlier push left in the repository and that this one does not replace are deleted by the same
    commit (its history keeps them), since `from_pretrained` would read them.

    Args:
        folder: where the model lies; weights are pinned beside it by hard link where the disk can, else by copy.
        repo_id: "owner/name", or "name" for the token's owner. It is created if it is not there.
        token: with the right to write; None takes `HF_TOKEN` or the one that `hf auth login` stored.
        private: for a new repository, and a demand on an existing one: a public one is refused. False leaves an
            existing repository as it is.
        endpoint: of the Hub; None takes `HF_ENDPOINT` or https://huggingface.co.
        message: of the commit.
        retries: further attempts after 408, 429, 5xx and lost connections, beside those that huggingface_hub makes
            for each request.
        wait_s: before the first of them in seconds; doubles each time, up to 60.

    Returns:
        The commit and the sha256 of every file, for `verify_push`.

    Raises:
        ArgumentError: as `allow_list`.
        HubError: the Hub cannot be reached or refuses; there is no token; a file contains a token (nothing is then
            sent); the repository is public; the weights were written to while they were sent.
        OSError: the disk is full, or the folder vanished before it was pinned.

    Cost: beside the upload about 1 s per GB to look for tokens and to hash; disk for a copy where hard links do not
    work.
    """
    root = Path(folder)
    names = allow_list(root)
    repeat = _repeat_command(root, repo_id, private, endpoint)
    token = _resolve_token(token, repeat)
    api = HfApi(endpoint=endpoint, token=token)
    attempt = Attempts(retries, wait_s, token, f"{root} was not pushed to {repo_id}", repeat)
    with _pinned(root, names) as pinned:
        refuse_tokens(pinned, names, token)
        files = {name: hash_file(pinned / name).sha256 for name in names}
        before = _modified(pinned, names)
        owned = attempt(lambda: api.create_repo(repo_id, private=private, exist_ok=True).repo_id)
        commit = attempt(lambda: _commit(api, owned, pinned, names, private, message))
        if _modified(pinned, names) != before:
            raise HubError(f"The weights in {root} were written to while they were pushed to {owned}. Run: {repeat}")
    return Push(owned, commit.oid, commit.commit_url, files, repeat)


def verify_push(
    push: Push,
    into: str | os.PathLike[str],
    *,
    token: str | None = None,
    endpoint: str | None = None,
    retries: int = 3,
    wait_s: float = 2.0,
) -> None:
    """Downloads what was pushed into a fresh folder and compares every byte (sha256); the folder can then be loaded.

    Args:
        push: what `push_folder` returned.
        into: a folder that is not there yet or is empty. It stays.
        token, endpoint, retries, wait_s: as for `push_folder`.

    Raises:
        ArgumentError: `into` is not empty; a file that is there would not be downloaded.
        HubError: the Hub cannot be reached; files are missing there or differ, all of them named.
        OSError: the disk is full.

    Cost: one download of the model, disk for it, one read.
    """
    target = Path(into)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ArgumentError(f"{target} is not an empty folder. Name a new one: the download must be fresh.")
    token = _resolve_token(token, push.repeat)
    api = HfApi(endpoint=endpoint, token=token)
    attempt = Attempts(retries, wait_s, token, f"{push.repo_id} could not be downloaded to check it", push.repeat)
    patterns = [glob.escape(name) for name in push.files]
    attempt(
        lambda: api.snapshot_download(push.repo_id, revision=push.commit, local_dir=target, allow_patterns=patterns)
    )
    wrong = [
        name if (target / name).is_file() else f"{name} (missing)"
        for name, expected in push.files.items()
        if not (target / name).is_file() or hash_file(target / name).sha256 != expected
    ]
    if wrong:
        raise HubError(
            f"{push.repo_id} at {push.commit[:12]} is not what was pushed: {', '.join(wrong)} of {len(push.files)} "
            f"files came back different. The model on this disk is whole. Run: {push.repeat}"
        )


def _commit(api: HfApi, repo_id: str, pinned: Path, names: list[str], private: bool, message: str) -> CommitInfo:
    there = api.model_info(repo_id)
    if private and not there.private:
        raise HubError(
            f"{repo_id} is public and the push is private; nothing was sent. Choose another name, make that repository "
            "private in its settings, or push publicly (private=False, or --public)."
        )
    present = [sibling.rfilename for sibling in there.siblings or []]
    stale = [name for name in present if DECIDES_LOADING.fullmatch(name) and name not in names]
    if stale:
        logger.warning("Deleted from %s, since this model would not load with them: %s", repo_id, ", ".join(stale))
    # Made anew for every attempt: huggingface_hub marks operations as done.
    adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=pinned / name) for name in names]
    return api.create_commit(
        repo_id, [*adds, *(CommitOperationDelete(path_in_repo=name) for name in stale)], commit_message=message
    )


@contextmanager
def _pinned(root: Path, names: list[str]) -> Iterator[Path]:
    # Beside the folder: hard links do not cross disks.
    with tempfile.TemporaryDirectory(prefix=".push-", dir=root.resolve().parent) as scratch:
        for name in names:
            target = Path(scratch, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            # A link survives deletion but not rewriting, so the small files, which a run rewrites, are copied.
            if not (IS_WEIGHTS.fullmatch(name) and _link(root / name, target)):
                shutil.copyfile(root / name, target)
        yield Path(scratch)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # FAT, many network folders and some containers have no hard links
        return False
    return True


def _modified(pinned: Path, names: list[str]) -> list[tuple[int, int]]:
    found = [os.stat(pinned / name) for name in names]
    return [(status.st_size, status.st_mtime_ns) for status in found]


def _resolve_token(token: str | None, repeat: str) -> str:
    found = token or get_token()
    if not found:
        raise HubError(f"There is no token for the Hub. Run `hf auth login` or set HF_TOKEN, and then: {repeat}")
    return found


def _repeat_command(folder: Path, repo_id: str, private: bool, endpoint: str | None) -> str:
    words = ["python", "-m", "hf_ext.hub", os.path.abspath(folder), repo_id]
    words += [] if private else ["--public"]
    words += [] if endpoint is None or endpoint == constants.ENDPOINT else ["--endpoint", endpoint]
    return shlex.join(words)

"""Sends a model folder as one commit from a pinned copy, and compares what comes back byte for byte."""

from __future__ import annotations

import glob
import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    constants,
    get_token,
)

from ..checkpoints.finished_model import MODEL_MANIFEST, check_model, write_model_manifest
from ..checkpoints.format.manifest import hash_file
from ..errors import ArgumentError
from .allowed import DECIDES_LOADING, allow_list, checkpoint_files, refuse_tokens, shorten_encoder_paths
from .attempts import Attempts, HubError
from .pins import pinned_files

LAST_CHECKPOINT = "last-checkpoint"  # as stock Trainer names it

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
    checkpoint: str | os.PathLike[str] | None = None,
    token: str | None = None,
    private: bool = True,
    endpoint: str | None = None,
    revision: str | None = None,
    message: str = "Model trained with hf_ext",
    retries: int = 3,
    wait_s: float = 2.0,
) -> Push:
    """Uploads the allowed files of a model folder as one commit, from a pinned copy that rotation cannot delete.

    Weights that an earlier push left in the repository and that this one does not replace are deleted by the same
    commit (its history keeps them), since `from_pretrained` would read them. Absolute paths of encoders are
    sent as their last part where their weights are in the folder.

    Args:
        folder: where the model lies; weights are pinned beside it by hard link where the disk can, else by copy.
        repo_id: "owner/name", or "name" for the token's owner. It is created if it is not there.
        checkpoint: a checkpoint of hf_ext that is sent whole, with optimizer, random states and the arguments with
            their paths, as `last-checkpoint/` in place of the one there; a run continues from its download
            (`--resume DOWNLOADED/last-checkpoint`).
        token: with the right to write; None takes `HF_TOKEN` or the one that `hf auth login` stored.
        private: for a new repository, and a demand on an existing one: a public one is refused. False leaves an
            existing repository as it is.
        endpoint: of the Hub; None takes `HF_ENDPOINT` or https://huggingface.co.
        revision: branch, made if it is not there; None is the repository's main one.
        message: of the commit.
        retries: further attempts after 408, 429, 5xx and lost connections, beside those that huggingface_hub makes
            for each request.
        wait_s: before the first of them in seconds; doubles each time, up to 60.

    Returns:
        The commit and the sha256 of every file, for `verify_push`.

    Raises:
        ArgumentError: as `allow_list` and `checkpoint_files`; the files are not those of the model's manifest.
        HubError: the Hub cannot be reached or refuses; there is no token; a file contains a token (nothing is then
            sent); the repository is public; the weights were written to while they were sent.
        OSError: the disk is full, or the folder vanished before it was pinned.

    Cost: beside the upload about 1 s per GB to look for tokens and to hash; disk for a copy where hard links do not
    work.
    """
    root = Path(folder)
    sources = list_sources(root, checkpoint)
    repeat = _repeat_command(root, repo_id, private, endpoint, revision, checkpoint)
    token = resolve_token(token, repeat)
    api = HfApi(endpoint=endpoint, token=token)
    attempt = Attempts(retries, wait_s, token, f"{root} was not pushed to {repo_id}", repeat)
    with pinned_files(sources, root.resolve().parent, root.resolve().name) as pinned:
        names = [*sources]
        refuse_tokens(pinned, names, token)
        if MODEL_MANIFEST in names:
            check_model(pinned)
        shorten_encoder_paths(pinned)
        if MODEL_MANIFEST in names:
            write_model_manifest(pinned)  # of the paths as they are sent
        files = {name: hash_file(pinned / name).sha256 for name in names}
        before = _modified(pinned, names)
        owned = attempt(lambda: _create(api, repo_id, private, revision))
        commit = attempt(lambda: _commit(api, owned, pinned, names, private, revision, message))
        if _modified(pinned, names) != before:
            raise HubError(f"The weights in {root} were written to while they were pushed to {owned}. Run: {repeat}")
    return Push(owned, commit.oid, commit.commit_url, files, repeat)


def list_sources(
    folder: Path, checkpoint: str | os.PathLike[str] | None = None, needs_model: bool = True
) -> dict[str, Path]:
    """Name in the repository -> file, of everything that a push of `folder` sends.

    Args:
        folder, checkpoint: as for `push_folder`.
        needs_model: False: the model is put beside them later.

    Raises:
        ArgumentError: as `push_folder`.
    """
    sources = {name: folder / name for name in allow_list(folder, needs_model)}
    if checkpoint is not None:
        names = checkpoint_files(checkpoint)
        sources.update({f"{LAST_CHECKPOINT}/{name}": Path(checkpoint, name) for name in names})
    return sources


def open_repository(
    repo_id: str,
    *,
    token: str | None = None,
    private: bool = True,
    endpoint: str | None = None,
    revision: str | None = None,
    retries: int = 3,
    wait_s: float = 2.0,
) -> str:
    """Makes the repository if it is not there and proves that this token may write to it: before days of training.

    Args: as for `push_folder`.

    Returns:
        Its name with the owner.

    Raises:
        HubError: no token, or one without the right to write; no Hub; the repository is public and `private` is set.

    Cost: three requests, with `revision` four.
    """
    again = "the same command"
    token = resolve_token(token, again)
    api = HfApi(endpoint=endpoint, token=token)
    attempt = Attempts(retries, wait_s, token, f"{repo_id} on the Hub cannot be written to", again)
    owned = attempt(lambda: _create(api, repo_id, private, revision))
    attempt(lambda: api.auth_check(owned, write=True))  # creating says nothing of one that is there
    attempt(lambda: _require_private(api.model_info(owned), private))
    return owned


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
    token = resolve_token(token, push.repeat)
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


def _create(api: HfApi, repo_id: str, private: bool, revision: str | None) -> str:
    owned = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(owned, branch=revision, exist_ok=True)
    return owned


def _require_private(there: ModelInfo, private: bool) -> None:
    if private and not there.private:
        raise HubError(
            f"{there.id} is public and the push is private; nothing was sent. Choose another name, make that "
            "repository private in its settings, or push publicly (--hub_private_repo false; private=False; --public)."
        )


def _commit(
    api: HfApi, repo_id: str, pinned: Path, names: list[str], private: bool, revision: str | None, message: str
) -> CommitInfo:
    there = api.model_info(repo_id, revision=revision)
    _require_private(there, private)
    present = [sibling.rfilename for sibling in there.siblings or []]
    stale = [name for name in present if _is_replaced(name, names) and name not in names]
    if stale:
        logger.warning("Deleted from %s, of an earlier push and not of this one: %s", repo_id, ", ".join(stale))
    # Made anew for every attempt: huggingface_hub marks operations as done.
    adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=pinned / name) for name in names]
    deletes = [CommitOperationDelete(path_in_repo=name) for name in stale]
    return api.create_commit(repo_id, [*adds, *deletes], commit_message=message, revision=revision)


def _is_replaced(name: str, names: list[str]) -> bool:
    """Whether this push takes the place of a file in the repository, be it under the same name or not."""
    sends_checkpoint = any(sent.startswith(f"{LAST_CHECKPOINT}/") for sent in names)
    return bool(DECIDES_LOADING.fullmatch(name)) or (sends_checkpoint and name.startswith(f"{LAST_CHECKPOINT}/"))


def _modified(pinned: Path, names: list[str]) -> list[tuple[int, int]]:
    found = [os.stat(pinned / name) for name in names]
    return [(status.st_size, status.st_mtime_ns) for status in found]


def resolve_token(token: str | None, repeat: str) -> str:
    """`token`, or the one that is stored here. Raises HubError, with the command to `repeat`, where there is none."""
    found = token or get_token()
    if not found:
        raise HubError(f"There is no token for the Hub. Run `hf auth login` or set HF_TOKEN, and then: {repeat}")
    return found


def _repeat_command(
    folder: Path,
    repo_id: str,
    private: bool,
    endpoint: str | None,
    revision: str | None,
    checkpoint: str | os.PathLike[str] | None,
) -> str:
    words = ["python", "-m", "hf_ext.hub", os.path.abspath(folder), repo_id]
    words += [] if private else ["--public"]
    words += [] if revision is None else ["--revision", revision]
    words += [] if checkpoint is None else ["--checkpoint", os.path.abspath(checkpoint)]
    words += [] if endpoint is None or endpoint == constants.ENDPOINT else ["--endpoint", endpoint]
    return shlex.join(words)

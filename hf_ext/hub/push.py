"""One push: a commit of allowed files, repeated where the Hub did not answer, and compared with what the Hub has."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_session,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from ..checkpoints import MODEL_MANIFEST, hash_file
from ..errors import HfExtError, RunEnded
from ..files import StrPath, parse_json
from ..models import replaced
from .allowed import DECIDES_LOADING, find_token, model_files

WAITS_S = (2.0, 4.0, 8.0)  # before each further attempt
SILENCE_S = 120.0  # after which a connection counts as lost: huggingface_hub 2.4 waits for ever
# RuntimeError: of an LFS or Xet upload; the last three: what the Hub answers makes no sense, or it rejects the card.
_NO_SENSE = (ValueError, LookupError, TypeError)
_FAILURES = (HTTPError, OSError, RuntimeError, *_NO_SENSE)

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class HubError(RunEnded):
    """A push did not succeed; the model on this disk is whole, and the message says how to repeat it."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


def open_repository(
    repo_id: str, *, token: str | None = None, private: bool = True, revision: str | None = None
) -> str:
    """Makes the repository if it is not there and proves that this token may write to it: before days of training.

    Args: as for `push_folder`.

    Returns:
        Its name with the owner.

    Raises:
        HubError: no token, or one without the right to write; no Hub; the repository is public and `private` is set.

    Cost: three requests, with `revision` four.
    """
    repeat = "the same command"
    api = HfApi(token=_find_own_token(token, repeat))
    failed = f"{repo_id} on the Hub cannot be written to"
    return _attempt(lambda: _open(api, repo_id, private, revision).id, failed, repeat, str(api.token))


def push_folder(
    folder: StrPath,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool = True,
    revision: str | None = None,
    message: str = "Model trained with hf_ext",
) -> CommitInfo:
    """Uploads the allowed files of a model folder as one commit, and compares them with the Hub's own list.

    Weights that an earlier push left in the repository and that this one does not replace are deleted by the same
    commit (its history keeps them), since `from_pretrained` would read them. All is done in the calling thread.

    Args:
        folder: where the model lies.
        repo_id: "owner/name", or "name" for the token's owner. It is created if it is not there.
        token: with the right to write; None takes `HF_TOKEN` or the one that `hf auth login` stored.
        private: for a new repository, and a demand on an existing one: a public one is refused. False leaves an
            existing repository as it is.
        revision: branch, made if it is not there; None is the repository's main one.
        message: of the commit.

    Raises:
        ArgumentError: as `model_files`.
        HubError: the Hub cannot be reached or refuses; there is no token; a file contains a token (nothing is then
            sent); the repository is public; a file changed meanwhile; what arrived is not what was sent.
        OSError: a file cannot be read.

    Cost: beside the upload 3 s per GB to verify and to hash twice, without the interpreter lock.
    """
    words = ["python", "-m", "hf_ext.hub", os.path.abspath(folder), repo_id, *([] if private else ["--public"])]
    repeat = shlex.join([*words, *([] if revision is None else ["--revision", revision])])
    api = HfApi(token=_find_own_token(token, repeat))
    files = model_files(folder)
    named = find_token(files, str(api.token))
    if named is not None:
        raise HubError(
            f"{named} contains an access token of the Hub; nothing was sent. Take it out of the file, and if others "
            "could read the file, revoke the token at https://huggingface.co/settings/tokens."
        )
    promised: dict[str, str] = {}
    for name, manifest in files.items():
        if name.endswith(MODEL_MANIFEST) and isinstance(manifest, bytes):
            start = name.removesuffix(MODEL_MANIFEST)
            promised |= {start + one: record["sha256"] for one, record in parse_json(manifest)["files"].items()}

    def work() -> CommitInfo:
        before = _open(api, repo_id, private, revision)
        # Made anew for every attempt: huggingface_hub marks operations as done.
        adds = [CommitOperationAdd(name, content) for name, content in files.items()]
        for add in adds:  # several at once would go to a pool, whose threads keep Python from ending
            api.preupload_lfs_files(before.id, [add], revision=revision, free_memory=False)
        if changed := ", ".join(_find_changed(adds, promised)):
            raise HubError(f"{changed} in {folder} changed during the push; nothing was committed. Run: {repeat}")
        present = {sibling.rfilename for sibling in before.siblings or []}
        stale = sorted(filter(DECIDES_LOADING.fullmatch, present - files.keys()))
        if stale:
            logger.warning("Deleted from %s, of an earlier push and not of this one: %s", before.id, ", ".join(stale))
        # Not `upload_folder`: with Xet it may make several commits, and a repository of which half is new.
        operations: list[Any] = [*adds, *(CommitOperationDelete(name) for name in stale)]
        commit = api.create_commit(before.id, operations, commit_message=message, revision=revision)
        if wrong := ", ".join(_find_different(api, before.id, commit.oid, adds)):
            raise HubError(
                f"{before.id} at {commit.oid[:12]} is not what was sent: {wrong} of {len(adds)} files differ or are "
                f"missing. The model on this disk is whole. Run: {repeat}"
            )
        return commit

    return _attempt(work, f"{folder} was not pushed to {repo_id}", repeat, str(api.token))


def _find_own_token(token: str | None, repeat: str) -> str:
    found = token or get_token()
    if not found:
        raise HubError(f"There is no token for the Hub. Run `hf auth login` or set HF_TOKEN, and then: {repeat}")
    return found


def _open(api: HfApi, repo_id: str, private: bool, revision: str | None) -> ModelInfo:
    """Opens the repository, made where it is not there; returns the branch and what it holds."""
    owned = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(owned, branch=revision, exist_ok=True)
    api.auth_check(owned, write=True)  # creating says nothing of one that is there
    there = api.model_info(owned, revision=revision)
    if private and not there.private:
        raise HubError(
            f"{owned} is public and the push is private; nothing was sent. Choose another name, make that repository "
            "private in its settings, or push publicly (--hub_private_repo false; private=False; --public)."
        )
    return there


def _find_changed(adds: Sequence[CommitOperationAdd], promised: Mapping[str, str]) -> list[str]:
    """Names of files that are, after their upload, not as they were hashed for it or by the manifest beside them."""
    changed = []
    for add in adds:
        sent = add.upload_info.sha256.hex()
        hashes = {sent, promised.get(add.path_in_repo, sent)}
        if isinstance(add.path_or_fileobj, str):  # a file, read three times: for the manifest, the name, the upload
            hashes.add(hash_file(add.path_or_fileobj).sha256)
        if len(hashes) > 1:
            changed.append(add.path_in_repo)
    return changed


def _find_different(api: HfApi, repo_id: str, commit: str, adds: Sequence[CommitOperationAdd]) -> list[str]:
    """Names of files that are not there as they were sent, by the Hub's own list."""
    entries = api.list_repo_tree(repo_id, recursive=True, revision=commit)
    there = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    return [add.path_in_repo for add in adds if not _is_same(add, there.get(add.path_in_repo))]


def _is_same(add: CommitOperationAdd, entry: RepoFile | None) -> bool:
    if entry is None:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == add.upload_info.sha256.hex()
    with add.as_file() as file:
        return entry.blob_id == git_hash(file.read())


def _attempt(work: Callable[[], Result], failed: str, repeat: str, token: str) -> Result:
    """Returns what `work` returns; tries again, then raises HubError with what failed and how to repeat it."""
    for number, wait_s in enumerate((*WAITS_S, None), 1):
        try:
            with replaced(get_session(), timeout=SILENCE_S):
                return work()
        except _FAILURES as error:
            if isinstance(error, HfExtError):
                raise
            cause = error.__cause__ or error  # of what an upload wraps
            said = "; ".join(f"{type(one).__name__}: {one}" for one in dict.fromkeys((error, cause)))
            reason = " ".join(said.replace(token, "<token>").split()).rstrip(".")
            if isinstance(error, LookupError | TypeError):
                reason = f"the Hub's answer was not understood ({reason}), so that what it holds now is not known"
            if wait_s is None or not _is_transient(error, cause):
                # Not chained: the cause repeats what the server said, which may hold the token.
                raise HubError(
                    f"{failed}, after {number} attempt(s): {reason}. The model on this disk is whole. Run, logged in "
                    f"(`hf auth login`) or with HF_TOKEN set: {repeat}"
                ) from None
        logger.warning("The Hub: %s. Attempt %d follows in %.0f s.", reason, number + 1, wait_s)
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _is_transient(error: BaseException, cause: BaseException) -> bool:
    statuses = [one.response.status_code for one in (error, cause) if isinstance(one, HfHubHTTPError)]
    if statuses:
        return statuses[-1] in (408, 429) or statuses[-1] >= 500
    # What is left of OSError and RuntimeError: an upload that broke off.
    return not isinstance(error, _NO_SENSE) and not isinstance(cause, OfflineModeIsEnabled)

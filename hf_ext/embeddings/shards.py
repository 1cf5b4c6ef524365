"""One file of embeddings: sorted keys and rows of values, written whole or not at all, verified when first read."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..files import follow_umask, sync

KEY_BYTES = 16
MAX_SHARD_BYTES = 2**29  # merging holds three times as much in memory
SHARD_GLOB = "rows-*.safetensors"  # another layout has another name: files of before are not looked at


class Shard:
    """One file, mapped into memory, not read: keys in order, and of each some rows of values.

    Args:
        path: a regular file.
        is_whole: whether its content is known to be what was written.

    Raises:
        SafetensorError: the file is no shard, or not all of one.

    Attributes:
        keys: (n,) of 16 bytes, sorted.
        starts: (n + 1,) int64, the first row of each, and the number of rows.
        values: (rows, width).
    """

    def __init__(self, path: Path, is_whole: bool = False):
        self.path, self.is_whole, self.status = path, is_whole, path.stat()
        with safe_open(path, framework="pt") as file:
            self._tensors = {name: file.get_tensor(name) for name in ("keys", "starts", "values")}
            self._promised = (file.metadata() or {}).get("sha256")
        self.keys = self._tensors["keys"].numpy().view(f"S{KEY_BYTES}").ravel()
        self.starts, self.values = self._tensors["starts"].numpy(), self._tensors["values"]

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.path, self.is_whole)  # data workers that are spawned map it themselves

    def verify(self) -> bool:
        """Whether the content is what was written. Cost: the first time it is read and hashed, about 1 s per GB."""
        self.is_whole = self.is_whole or _content_hash(self._tensors) == self._promised
        return self.is_whole

    def remove(self) -> None:
        """Deletes the file, unless another process has put a new one in its place."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), self.status):
                self.path.unlink()


def write_shard(folder: Path, keys: np.ndarray, lengths: np.ndarray, values: torch.Tensor) -> Shard:
    """Writes one into `folder`, sorted, each key once; its name is the hash of its keys.

    Args:
        keys: (n,) of 16 bytes; `lengths`: (n,), how many rows of `values`, (rows, width), each has, one after another.
    """
    keys, order = np.unique(keys, return_index=True)
    starts, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
    ends = np.cumsum(lengths)
    rows = np.repeat(starts - ends + lengths, lengths) + np.arange(lengths.sum())
    tensors = {
        "keys": torch.from_numpy(keys.view(np.uint8).reshape(-1, KEY_BYTES)),
        "starts": torch.from_numpy(np.concatenate([[0], ends])),
        "values": values[torch.from_numpy(rows)],
    }
    path = folder / f"rows-{hashlib.sha256(keys.tobytes()).hexdigest()[:20]}.safetensors"
    with writing(path) as draft:
        save_file(tensors, draft, metadata={"sha256": _content_hash(tensors)})
    return Shard(path, is_whole=True)


def is_damaged(path: Path) -> bool:
    """Whether a file is not a whole shard. Cost: reads and hashes all of it."""
    try:
        return not Shard(path).verify()
    except SafetensorError:
        return True


def pack(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Shards of one dtype that fit a file together, two or more, in the order of their names."""
    groups: list[list[Shard]] = []
    room = 0
    for shard in sorted(shards, key=lambda shard: (str(shard.values.dtype), shard.path.name)):
        room -= shard.status.st_size
        if room < 0 or shard.values.dtype != groups[-1][0].values.dtype:
            groups.append([])
            room = MAX_SHARD_BYTES - shard.status.st_size
        groups[-1].append(shard)
    return [group for group in groups if len(group) > 1]


def common_keys(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where two sorted arrays of distinct keys have the same ones: positions in each.

    Cost: of each key of the shorter one a binary search in the longer, of which no more is read from disk.
    """
    if len(one) > len(other):
        there, here = common_keys(other, one)
        return here, there
    place = np.minimum(np.searchsorted(other, one), len(other) - 1)
    here = np.flatnonzero(other[place] == one)
    return here, place[here]


def _content_hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Gives a draft that no other process has; it takes the name of `path` once all of it is on the disk."""
    draft = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        yield draft
        follow_umask(draft)
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)

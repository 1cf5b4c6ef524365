"""One file of embeddings, mapped into memory; and files that a kill cannot half-write."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..files import follow_umask, sync

KEY_BYTES = 16


class Shard:
    """One file, mapped into memory, not read.

    Args:
        path: a regular file.
        is_whole: whether its content is known to be what was written.

    Raises:
        SafetensorError: the file is no shard, or not all of one.
    """

    def __init__(self, path: Path, is_whole: bool = False):
        self.path = path
        self.is_whole = is_whole
        self.status = path.stat()
        with safe_open(path, framework="pt") as file:
            self._tensors = {name: file.get_tensor(name) for name in ("keys", "starts", "values")}
            self._promised = (file.metadata() or {}).get("sha256")
        self.keys = self._tensors["keys"].numpy().view(f"S{KEY_BYTES}").ravel()
        self.starts = self._tensors["starts"].numpy()
        self.values = self._tensors["values"]

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.path, self.is_whole)  # data workers that are spawned map it themselves

    def verify(self) -> bool:
        """Checks whether the content is what was written.

        Cost: the first time it is read and hashed, about 1 s per GB.
        """
        self.is_whole = self.is_whole or content_hash(self._tensors) == self._promised
        return self.is_whole

    def remove(self) -> None:
        """Deletes the file, unless another process has put a new one in its place."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), self.status):
                self.path.unlink()


def content_hash(tensors: dict[str, torch.Tensor]) -> str:
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

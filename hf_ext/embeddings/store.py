"""Where embeddings live between runs: content-addressed shards that a kill cannot half-write."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..data.text_files import irregular_kind
from ..errors import CacheError
from .finite import refuse_not_finite
from .shortening import WHOLE, Shortening

logger = logging.getLogger(__name__)

HASH_BYTES = 16
SHARD_SEQUENCES = 1024  # what a kill can cost at most, per process
LEFTOVER_S = 3600.0  # a file that is written for so long has no writer any more
_SHARD_GLOB = "shard-*.safetensors"


def hash_sequence(sequence: str) -> bytes:
    """Identity of one encoder input: residues, with `|` between the parts of a pair."""
    return hashlib.blake2b(sequence.encode("ascii"), digest_size=HASH_BYTES).digest()


Shard = dict[str, torch.Tensor]


class EmbeddingStore:
    """Embeddings of one encoder input kind, in `<cache_dir>/<hash of key>/`.

    A shard is written beside its final name, fsynced, and renamed; its name is the hash of the sequences it holds and
    its header carries the sha256 of its content. Opening verifies every shard and drops, with a warning, what does not
    verify, so that it is encoded again; so are rows that are NaN or infinite, which `add` refuses. Files do not depend
    on when or how often a run was interrupted.

    Args:
        cache_dir: folder shared by all keys.
        key: everything that decides the value of every embedding (encoder, weights, tokenizer, pooling, dtype);
            JSON-able.
        shortening: what happens to inputs above a limit. It is part of what those are known by, and of no others: an
            input that is not cut is found under every rule.

    Raises:
        CacheError: the folder holds another key (a hash collision or an edited `key.json`), cannot be made, or holds
            a folder, pipe or device where a file belongs, which is left as it is.

    Cost: opening reads and hashes every shard once, about 1 s per GB.

    Attributes:
        shard_sequences: the most that a shard holds, where nobody says otherwise.
    """

    shard_sequences = SHARD_SEQUENCES
    _tensors: tuple[str, ...] = ("hashes", "embeddings")  # of a shard: what they are of, and what they are

    def __init__(self, cache_dir: str | os.PathLike[str], key: dict[str, Any], shortening: Shortening = WHOLE):
        self.key, self.shortening = key, shortening
        text = json.dumps(key, sort_keys=True, indent=1)
        self.folder = Path(cache_dir) / hashlib.sha256(text.encode()).hexdigest()[:20]
        _make_folder(self.folder)
        self._check_key(text)
        self._index: dict[bytes, tuple[Path, int]] = {}
        self.num_corrupt = self.num_not_finite = 0
        self.refresh()

    def __len__(self) -> int:
        return len(self._index)

    def _digest(self, sequence: str) -> bytes:
        return hash_sequence(self.shortening.identify(sequence))

    def _check_key(self, text: str) -> None:
        path = self.folder / "key.json"
        if not path.exists():
            _write_atomically(path, text.encode())
            return
        _check_regular(path)
        found = path.read_bytes()
        if found != text.encode():
            raise CacheError(
                f"{path} describes other embeddings than this run needs:\n{found.decode(errors='replace')}\n"
                f"needed:\n{text}\nGive another --embedding_cache_dir or delete this folder."
            )

    def refresh(self) -> None:
        """Reads the index of all shards that verify, drops rows not finite, removes leftovers of writers long gone."""
        self._index.clear()
        for path in self.folder.glob("*.tmp-*"):
            with suppress(FileNotFoundError):  # its writer has just finished
                if path.is_file() and time.time() - path.stat().st_mtime > LEFTOVER_S:
                    path.unlink()
        for path in sorted(self.folder.glob(_SHARD_GLOB)):
            _check_regular(path)
            shard = _read_verified(path, self._tensors)
            if shard is None:
                self.num_corrupt += 1
                logger.warning("Embedding shard %s is corrupt; removed, its sequences are encoded again.", path)
                path.unlink(missing_ok=True)
                continue
            finite = self._find_finite(shard)
            if not finite.all():
                self._drop_rows(path, shard, finite)
                continue
            for row, digest in enumerate(shard["hashes"].numpy()):
                self._index[digest.tobytes()] = (path, row)

    def missing(self, sequences: Iterable[str]) -> list[str]:
        """Those of `sequences` that are not stored, each once, longest first and then alphabetical."""
        absent = {sequence for sequence in sequences if self._digest(sequence) not in self._index}
        return sorted(absent, key=lambda sequence: (-len(sequence), sequence))

    def add(self, sequences: Sequence[str], embeddings: Any) -> Path:
        """Writes one shard; returns its path. `embeddings`: (len(sequences), width).

        Raises:
            NotFiniteError: an embedding is NaN or infinite, with its sequence; nothing is written.
        """
        refuse_not_finite(sequences, embeddings, "to be stored")
        digests = np.frombuffer(b"".join(map(self._digest, sequences)), np.uint8).reshape(-1, HASH_BYTES)
        return self._write({"hashes": torch.from_numpy(digests.copy()), **self._as_tensors(embeddings)})

    def _as_tensors(self, embeddings: Any) -> Shard:
        """What a shard holds beside the hashes of its sequences."""
        return {"embeddings": embeddings.cpu().contiguous()}

    def _find_finite(self, shard: Shard) -> torch.Tensor:
        """Which sequences of a shard have finite embeddings: (rows,), bool."""
        return torch.isfinite(shard["embeddings"]).all(1)

    def _keep(self, shard: Shard, kept: torch.Tensor) -> Shard:
        """A shard with those sequences alone that are `kept`, (rows,), bool."""
        return {name: tensor[kept] for name, tensor in shard.items()}

    def _write(self, tensors: Shard) -> Path:
        """Writes one shard and adds it to the index."""
        digests = tensors["hashes"].numpy()
        path = self.folder / f"shard-{hashlib.sha256(digests.tobytes()).hexdigest()[:20]}.safetensors"
        _write_atomically(path, save(tensors, metadata={"sha256": _content_hash(tensors)}))
        for row, digest in enumerate(digests):
            self._index[digest.tobytes()] = (path, row)
        return path

    def _drop_rows(self, path: Path, shard: Shard, finite: torch.Tensor) -> None:
        """Writes a shard anew without the rows that are not finite; they are missing from then on."""
        num_dropped = int((~finite).sum())
        logger.warning("Embedding shard %s: %d NaN or infinite; dropped, to be encoded again.", path, num_dropped)
        self.num_not_finite += num_dropped
        if finite.any():
            self._write(self._keep(shard, finite))
        path.unlink(missing_ok=True)

    def gather(self, sequences: Sequence[str], out: torch.Tensor | None = None) -> Any:
        """Embeddings of stored sequences, in order: (len(sequences), width), float32, into `out` if given.

        Raises:
            KeyError: a sequence is not stored.
        """
        by_shard: dict[Path, list[tuple[int, int]]] = {}
        for position, sequence in enumerate(sequences):
            path, row = self._index[self._digest(sequence)]
            by_shard.setdefault(path, []).append((position, row))
        for path, pairs in by_shard.items():
            with safe_open(path, framework="pt") as shard:
                block = shard.get_tensor("embeddings")
            positions, rows = map(list, zip(*pairs))
            if out is None:
                out = torch.empty(len(sequences), block.shape[1])
            out[positions] = block[rows].to(out.dtype)
        return torch.empty(0, 0) if out is None else out

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, shards only."""
        return sum(path.stat().st_size for path in self.folder.glob(_SHARD_GLOB))


def _make_folder(folder: Path) -> None:
    try:
        os.fspath(folder).encode()  # safetensors opens no other names, and a shard would count as corrupt
        folder.mkdir(parents=True, exist_ok=True)
    except UnicodeEncodeError as error:
        raise CacheError(f"embedding_cache_dir={str(folder.parent)!r}: not UTF-8; give another folder.") from error
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        raise CacheError(
            f"embedding_cache_dir={str(folder.parent)!r}: the folder {folder} cannot be made ({error.strerror}). Give "
            "one that can be written to."
        ) from error


def _check_regular(path: Path) -> None:
    """Raises CacheError for a folder, or for a pipe or device, which may never end; passes what is not there."""
    kind = irregular_kind(path) if path.exists() else ""
    if kind:
        raise CacheError(
            f"{path}: is {kind}, not a regular file. Give another --embedding_cache_dir, or move it out of the way."
        )


def _content_hash(tensors: Shard) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_verified(path: Path, names: Sequence[str]) -> Shard | None:
    """`hashes`, (rows, HASH_BYTES) uint8, and the others of `names`; None where the file is not what it promises."""
    try:
        with safe_open(path, framework="pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in names}
            promised = (shard.metadata() or {}).get("sha256")
    except (SafetensorError, OSError, ValueError):
        return None
    return tensors if _content_hash(tensors) == promised else None


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

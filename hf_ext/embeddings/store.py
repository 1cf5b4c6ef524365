"""Where embeddings live between runs: shards that a kill cannot half-write, found by sorted keys of 16 bytes.

A shard is one safetensors file: `keys` (n, 16) in order, `starts` (n + 1,), the first row of each in `values` and the
number of rows, and `values` (rows, width): one row of each sequence, or one for each of its tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CacheError, DataError, NotFiniteError
from ..files import Json
from ..labels import Array, list_some
from .shards import KEY_BYTES, Shard, content_hash, writing

Embeddings = Tensor | Sequence[Tensor]  # (n, width); or of each sequence its tokens' states
Places = list[tuple[Shard, Array, Array]]  # shards that have some of n sequences: positions, numbers there

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 2**26  # merging holds three times as much in memory
MAX_SMALL = 16  # shards of less than half of it that are left as they are
SHARD_GLOB = "rows-*.safetensors"  # another layout has another name: files of before are not looked at
LEFTOVER_S = 3600.0  # a file that is written for so long has no writer any more
SHOWN = 3
_DAMAGED = "Embedding shard %s is damaged; removed, its sequences are encoded again."


class EmbeddingStore:
    """Embeddings of one encoder input kind, pooled or of every token, in `<cache_dir>/<hash of key>/`.

    A shard is written beside its final name, fsynced, and renamed; its name is the hash of the sequences it holds and
    its header carries the sha256 of its content. A shard that is not what it promises is dropped, with a warning, so
    that its sequences are encoded again: one of another size when the store is opened, one of other content when
    something of it is first asked for. `add` refuses what is NaN or infinite. Files do not depend on when or how often
    a run was interrupted.

    Args:
        cache_dir: folder shared by all keys.
        key: everything that decides the value of every embedding (encoder, weights, tokenizer, pooling, dtype; or that
            they are of every token); JSON-able.
        max_residues: what the encoder takes of one input, a pair counting both parts, None for any length. It is part
            of what a longer input, which is cut, is known by, and of no other: so what was cut is never taken for what
            was not, nor for what was cut otherwise.
        overlap: of the windows in which longer inputs are read instead of being cut; they are known by it, too.

    Raises:
        CacheError: the folder cannot be made.

    Cost: opening reads headers, of a hundred files for ten million sequences; keys stay on disk, 16 bytes each.
    """

    def __init__(self, cache_dir: Path | str, key: Json, max_residues: int | None = None, overlap: int | None = None):
        self.key = key
        self.max_residues = max_residues
        self.overlap = overlap
        text = json.dumps(key, sort_keys=True, indent=1)
        self.folder = Path(cache_dir) / hashlib.sha256(text.encode()).hexdigest()[:20]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(
                f"embedding_cache_dir={str(cache_dir)!r} cannot be made ({error}); give another."
            ) from error
        if not (self.folder / "key.json").exists():
            with writing(self.folder / "key.json") as draft:
                draft.write_text(text)
        self._shards: list[Shard] = []
        self.refresh()

    def __len__(self) -> int:
        return sum(len(shard.keys) for shard in self._shards)

    @property
    def width(self) -> int | None:
        """Of every embedding; None where there is none yet."""
        return self._shards[0].values.shape[1] if self._shards else None

    def refresh(self) -> None:
        """Opens shards that others have written since, and removes leftovers of writers long gone."""
        for path in self.folder.glob("*.tmp-*"):
            with suppress(FileNotFoundError):  # its writer has just finished
                if time.time() - path.stat().st_mtime > LEFTOVER_S:
                    path.unlink()
        known = {shard.path: shard for shard in self._shards}
        self._shards = []
        for path in sorted(self.folder.glob(SHARD_GLOB)):
            try:
                self._shards.append(known.get(path) or Shard(path))
            except FileNotFoundError:  # another run has just merged it
                continue
            except SafetensorError:
                logger.warning(_DAMAGED, path)
                path.unlink(missing_ok=True)

    def missing(self, sequences: Iterable[str]) -> list[str]:
        """Lists those of `sequences` that are not stored, each once, longest first and then alphabetical."""
        distinct = [*set(sequences)]
        absent = [distinct[i] for i in np.flatnonzero(~self._find(distinct)[0])]
        return sorted(absent, key=lambda sequence: (-len(sequence), sequence))

    def add(self, sequences: Sequence[str], embeddings: Embeddings) -> None:
        """Writes one shard.

        Args:
            embeddings: (n, width); or of each sequence its tokens' states, (tokens, width). They keep their dtype, of
                several the highest.

        Raises:
            NotFiniteError: an embedding is NaN or infinite, with its sequence; nothing is written.
            DataError: another number of them than of sequences, or other shapes.
        """
        blocks = [embeddings] if isinstance(embeddings, Tensor) else [*embeddings]
        are_states = isinstance(embeddings, Sequence)
        lengths = np.array([*map(len, blocks)], np.int64) if are_states else np.ones(len(embeddings), np.int64)
        widths = {tuple(block.shape[1:]) for block in blocks} | ({(self.width,)} if self._shards else set())
        if not 0 < len(sequences) == len(embeddings) or len(widths) != 1 or not lengths.all():
            raise DataError(
                f"Embeddings of {len(embeddings)} sequences for {len(sequences)}, widths {sorted(widths)} with what is "
                "stored: give (n, width), or (tokens, width) for each, of one width, with at least one token."
            )
        refuse_not_finite(sequences, embeddings, "to be stored")
        self._write(self._keys(sequences), lengths, torch.cat([block.cpu() for block in blocks]))

    def gather(self, sequences: Sequence[str], out: Tensor | None = None) -> Tensor:
        """Gathers pooled embeddings of stored sequences, in order: (n, width), float32, into `out` if given.

        Raises:
            KeyError: a sequence is not stored.
            DataError: the store holds states of every token.
        """
        out = torch.empty(len(sequences), self.width or 0) if out is None else out
        for shard, positions, numbers in self._find_all(sequences):
            if len(shard.values) > len(shard.keys):
                raise DataError(f"{self.folder} holds states of every token: read them with gather_states.")
            out[torch.from_numpy(positions)] = shard.values[torch.from_numpy(shard.starts[numbers])].to(out.dtype)
        return out

    def gather_states(self, sequences: Sequence[str]) -> list[Tensor]:
        """Gathers states of all tokens of stored sequences, in order: (tokens, width) each, float32.

        Raises:
            KeyError: a sequence is not stored.
        """
        found = [torch.empty(0)] * len(sequences)
        for shard, positions, numbers in self._find_all(sequences):
            for position, number in zip(positions, numbers):
                rows = slice(*shard.starts[number : number + 2])
                found[position] = shard.values[rows].to(torch.float32, copy=True)
        return found

    def merge(self) -> None:
        """Merges shards where more than 16 are small: as few as fit `MAX_SHARD_BYTES`, whoever wrote them.

        For one process, while others of its run neither read nor write; other runs keep what they have opened. Cost:
        reads and writes all small shards. A kill may leave both old and new ones, which takes space and no more.
        """
        small = [shard for shard in self._shards if 2 * shard.status.st_size < MAX_SHARD_BYTES]
        if len(small) <= MAX_SMALL:
            return
        groups: list[list[Shard]] = [[]]
        for shard in sorted(filter(self._is_whole, small), key=lambda one: (str(one.values.dtype), one.path.name)):
            size = sum(one.status.st_size for one in [*groups[-1], shard])
            if groups[-1] and (size > MAX_SHARD_BYTES or shard.values.dtype != groups[-1][0].values.dtype):
                groups.append([])
            groups[-1].append(shard)
        for group in (group for group in groups if len(group) > 1):
            keys = np.concatenate([shard.keys for shard in group])
            lengths = np.concatenate([np.diff(shard.starts) for shard in group])
            self._write(keys, lengths, torch.cat([shard.values for shard in group]))
            for shard in group:
                self._drop(shard)

    # --- keys and files ---------------------------------------------------------------------------------------------

    def _keys(self, sequences: Sequence[str]) -> Array:
        """Returns what sequences are known by, (n,) of 16 bytes. Cost: 1 us each."""
        longest = self.max_residues
        long = f" truncate {longest}" if self.overlap is None else f" windows of {longest} overlap {self.overlap}"
        keys = []
        for sequence in sequences:
            digest = hashlib.blake2b(sequence.encode("ascii"), digest_size=KEY_BYTES)
            if longest is not None and len(sequence) - sequence.count("|") > longest:
                digest.update(long.encode("ascii"))
            keys.append(digest.digest())
        return np.array(keys, f"S{KEY_BYTES}")

    def _find(self, sequences: Sequence[str]) -> tuple[Array, Places]:
        """Finds which sequences are stored, (n,) bool.

        And shards that have some, all whole: which, by position, and where.

        Cost: per shard a binary search, of keys in its own or the other way, whichever are fewer, which reads no more
        of its keys from disk.
        """
        distinct, inverse = np.unique(self._keys(sequences), return_inverse=True)
        is_stored = np.zeros(len(inverse), bool)
        places = []
        for shard in [*self._shards]:
            here, there = _common(distinct, shard.keys)
            if len(here) and self._is_whole(shard):
                numbers = np.full(len(distinct), -1)
                numbers[here] = there
                positions = np.flatnonzero((numbers >= 0)[inverse] & ~is_stored)
                is_stored[positions] = True
                places.append((shard, positions, numbers[inverse[positions]]))
        return is_stored, places

    def _find_all(self, sequences: Sequence[str]) -> Places:
        is_stored, places = self._find(sequences)
        if not is_stored.all():
            raise KeyError(f"{self.folder}: {(~is_stored).sum()} of {len(is_stored)} sequences are not stored.")
        return places

    def _write(self, keys: Array, lengths: Array, values: Tensor) -> None:
        """Writes a shard, sorted, each key once.

        `lengths` (n,): how many of the `values` each has, one after another.
        """
        keys, order = np.unique(keys, return_index=True)
        starts = (np.cumsum(lengths) - lengths)[order]
        lengths = lengths[order]
        ends = np.cumsum(lengths)
        rows = np.repeat(starts - ends + lengths, lengths) + np.arange(lengths.sum())
        tensors = {
            "keys": torch.from_numpy(keys.view(np.uint8).reshape(-1, KEY_BYTES)),
            "starts": torch.from_numpy(np.concatenate([[0], ends])),
            "values": values[torch.from_numpy(rows)],
        }
        path = self.folder / f"rows-{hashlib.sha256(keys.tobytes()).hexdigest()[:20]}.safetensors"
        with writing(path) as draft:
            save_file(tensors, draft, metadata={"sha256": content_hash(tensors)})
        self._shards.append(Shard(path, is_whole=True))

    def _is_whole(self, shard: Shard) -> bool:
        if not shard.verify():
            logger.warning(_DAMAGED, shard.path)
            self._drop(shard)
        return shard.is_whole

    def _drop(self, shard: Shard) -> None:
        shard.remove()
        self._shards = [kept for kept in self._shards if kept is not shard]


def find_not_finite(embeddings: Embeddings) -> list[int]:
    """Finds which of n sequences' embeddings hold a NaN or an infinity. Cost: one reduction; of states, one each."""
    if isinstance(embeddings, Tensor):
        return (~torch.isfinite(embeddings).all(1)).nonzero().flatten().tolist()
    return [i for i, states in enumerate(embeddings) if not torch.isfinite(states).all()]


def name_sequences(sequences: Sequence[str]) -> str:
    """Names the first few of them, shortened, with their lengths."""
    return list_some([f"{s if len(s) <= 40 else s[:40] + '...'} ({len(s)} residues)" for s in sequences], SHOWN)


def refuse_not_finite(sequences: Sequence[str], embeddings: Embeddings, what: str) -> None:
    """Raises NotFiniteError with the sequences whose `embeddings` are not finite."""
    if rows := find_not_finite(embeddings):
        raise NotFiniteError(
            f"Embeddings {what} are NaN or infinite for {len(rows)} of {len(sequences)} sequences: "
            f"{name_sequences([sequences[row] for row in rows])}. None of them was stored. Either the encoder's "
            "weights are damaged (are other sequences all right?), or these sequences are: leave them out."
        )


def _common(one: Array, other: Array) -> tuple[Array, Array]:
    """Finds where two sorted arrays of distinct keys have the same ones: positions in each."""
    if len(one) > len(other):
        return _common(other, one)[::-1]
    place = np.minimum(np.searchsorted(other, one), len(other) - 1)
    here = np.flatnonzero(other[place] == one)
    return here, place[here]

"""Where embeddings live between runs: shards that a kill cannot half-write, found by sorted keys of 16 bytes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from ..errors import CacheError, DataError, NotFiniteError
from .shards import KEY_BYTES, MAX_SHARD_BYTES, SHARD_GLOB, Shard, common_keys, is_damaged, pack, write_shard, writing

logger = logging.getLogger(__name__)

REMEMBERED = 2**18  # hashes of sequences, which a run asks for again and again
MAX_SMALL = 16  # shards of less than half of it that are left as they are
LEFTOVER_S = 3600.0  # a file that is written for so long has no writer any more
SHOWN = 3
_DAMAGED = "Embedding shard %s is damaged; removed, its sequences are encoded again."


def identify(sequence: str, limits: tuple[int | None, str, int] = (None, "error", 0)) -> str:
    """The text by which the embedding of an encoder input is known: of one that is not cut, the input itself.

    So the rule for long inputs matters to long inputs alone, and what was cut is never taken for what was not, nor for
    what was cut otherwise.

    Args:
        sequence: parts of a pair are joined by `|`.
        limits: what the encoder takes of one input, a pair counting both parts, None for any length; "error",
            "truncate" or "window", as in `SequenceCollator`; and residues that neighbouring windows share.
    """
    max_residues, too_long, overlap = limits
    if max_residues is None or len(sequence) - sequence.count("|") <= max_residues:
        return sequence
    return f"{sequence} {too_long} {max_residues} {overlap if too_long == 'window' else 0}"


@lru_cache(maxsize=REMEMBERED)
def hash_sequence(sequence: str) -> bytes:
    """Identity of one encoder input: residues, with `|` between the parts of a pair."""
    return hashlib.blake2b(sequence.encode("ascii"), digest_size=KEY_BYTES).digest()


class EmbeddingStore:
    """Embeddings of one encoder input kind, pooled or of every token, in `<cache_dir>/<hash of key>/`.

    A shard is written beside its final name, fsynced, and renamed; its name is the hash of the sequences it holds and
    its header carries the sha256 of its content. A shard that is not what it promises is dropped, with a warning, so
    that its sequences are encoded again: one of another size when the store is opened, one of other content when
    something of it is first asked for. `add` refuses what is NaN or infinite. Files do not depend on when or how often
    a run was interrupted.

    Wherever sequences are expected, an array that `keys_of` returned for them will do, which hashes nothing.

    Args:
        cache_dir: folder shared by all keys.
        key: everything that decides the value of every embedding (encoder, weights, tokenizer, pooling, dtype; or that
            they are of every token); JSON-able.
        known_as: text by which an input is known; where long ones are cut, `partial(identify, limits=...)`.

    Raises:
        CacheError: the folder cannot be made.

    Cost: opening reads headers, of tens of files for ten million sequences; keys stay on disk, 16 bytes each.
    """

    def __init__(
        self, cache_dir: str | os.PathLike[str], key: dict[str, Any], known_as: Callable[[str], str] = identify
    ):
        self.key, self.known_as = key, known_as
        text = json.dumps(key, sort_keys=True, indent=1)
        self.folder = Path(cache_dir) / hashlib.sha256(text.encode()).hexdigest()[:20]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.fspath(self.folder).encode()  # safetensors opens no other names
        except (OSError, UnicodeEncodeError) as error:
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
                if path.is_file() and time.time() - path.stat().st_mtime > LEFTOVER_S:
                    path.unlink()
        known, self._shards = {shard.path: shard for shard in self._shards}, []
        for path in sorted(filter(Path.is_file, self.folder.glob(SHARD_GLOB))):
            try:
                self._shards.append(known.get(path) or Shard(path))
            except FileNotFoundError:  # another run has just merged it
                continue
            except SafetensorError:
                logger.warning(_DAMAGED, path)
                path.unlink(missing_ok=True)

    def keys_of(self, sequences: Iterable[str] | np.ndarray) -> np.ndarray:
        """What sequences are known by, (n,) of 16 bytes; an array is taken for such keys."""
        if isinstance(sequences, np.ndarray):
            return sequences
        return np.array([*map(hash_sequence, map(self.known_as, sequences))], f"S{KEY_BYTES}")

    def missing(self, sequences: Iterable[str]) -> list[str]:
        """Those of `sequences` that are not stored, each once, longest first and then alphabetical."""
        distinct = list(set(sequences))
        absent = [distinct[i] for i in np.flatnonzero(self._locate(distinct)[1] < 0)]
        return sorted(absent, key=lambda sequence: (-len(sequence), sequence))

    def add(self, sequences: Sequence[str] | np.ndarray, embeddings: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Writes one shard.

        Args:
            embeddings: (n, width); or of each sequence its tokens' states, (tokens, width). They keep their dtype, of
                several the highest.

        Raises:
            NotFiniteError: an embedding is NaN or infinite, with its sequence; nothing is written.
            DataError: another number of them than of sequences, or other shapes.
        """
        blocks = [embeddings] if isinstance(embeddings, torch.Tensor) else [*embeddings]
        are_states = isinstance(embeddings, Sequence)
        lengths = np.array([*map(len, blocks)], np.int64) if are_states else np.ones(len(embeddings), np.int64)
        widths = {tuple(block.shape[1:]) for block in blocks} | ({(self.width,)} if self._shards else set())
        if not 0 < len(sequences) == len(embeddings) or len(widths) != 1 or not lengths.all():
            raise DataError(
                f"Embeddings of {len(embeddings)} sequences for {len(sequences)}, widths {sorted(widths)} with what is "
                "stored: give (n, width), or (tokens, width) for each, of one width, with at least one token."
            )
        refuse_not_finite(sequences, embeddings, "to be stored")
        values = torch.cat([block.cpu() for block in blocks])
        self._shards.append(write_shard(self.folder, self.keys_of(sequences), lengths, values))

    def _locate(self, sequences: Sequence[str] | np.ndarray) -> tuple[list[Shard], np.ndarray, np.ndarray]:
        """Some shards; which of them has each sequence, -1 for none; its number there. All of these verify."""
        distinct, inverse = np.unique(self.keys_of(sequences), return_inverse=True)
        owners, numbers = np.full((2, len(distinct)), -1)
        shards: list[Shard] = []
        for shard in [*self._shards]:
            here, there = common_keys(distinct, shard.keys)
            if len(here) and self._is_whole(shard):
                owners[here], numbers[here] = len(shards), there
                shards.append(shard)
        return shards, owners[inverse], numbers[inverse]

    def _find(self, sequences: Sequence[str] | np.ndarray) -> Iterator[tuple[Shard, np.ndarray, np.ndarray]]:
        """Of each shard that has some of them: which, by position, and their numbers there, in order.

        Raises:
            KeyError: a sequence is not stored.
        """
        shards, owners, numbers = self._locate(sequences)
        if len(absent := np.flatnonzero(owners < 0)):
            raise KeyError(f"{self.folder}: {len(absent)} of {len(owners)} sequences are not stored.")
        order = np.lexsort((numbers, owners))
        for shard, chosen in zip(shards, np.split(order, np.searchsorted(owners[order], range(1, len(shards))))):
            yield shard, chosen, numbers[chosen]

    def gather(self, sequences: Sequence[str] | np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Pooled embeddings of stored sequences, in order: (n, width), float32, into `out` if given.

        Raises:
            KeyError: a sequence is not stored.
            DataError: the store holds states of every token.
        """
        out = torch.empty(len(sequences), self.width or 0) if out is None else out
        for shard, positions, numbers in self._find(sequences):
            if len(shard.values) > len(shard.keys):
                raise DataError(f"{self.folder} holds states of every token: read them with gather_states.")
            rows = torch.from_numpy(shard.starts[numbers])
            out[torch.from_numpy(positions)] = shard.values[rows].to(out.dtype)
        return out

    def gather_states(self, sequences: Sequence[str] | np.ndarray) -> list[torch.Tensor]:
        """States of all tokens of stored sequences, in order: (tokens, width) each, float32, which holds every value.

        Raises:
            KeyError: a sequence is not stored.
        """
        found = [torch.empty(0)] * len(sequences)
        for shard, positions, numbers in self._find(sequences):
            for position, number in zip(positions, numbers):
                rows = slice(*shard.starts[number : number + 2])
                found[position] = shard.values[rows].to(torch.float32, copy=True)
        return found

    def merge(self) -> None:
        """Where more than 16 shards are small, makes as few of them as fit `MAX_SHARD_BYTES`, whoever wrote them.

        For one process, while others of its run neither read nor write; other runs keep what they have opened. Cost:
        reads and writes all small shards. A kill may leave both old and new ones, which takes space and no more.
        """
        small = [shard for shard in self._shards if 2 * shard.status.st_size < MAX_SHARD_BYTES]
        if len(small) <= MAX_SMALL:
            return
        for group in pack([shard for shard in small if self._is_whole(shard)]):
            keys = np.concatenate([shard.keys for shard in group])
            lengths = np.concatenate([np.diff(shard.starts) for shard in group])
            self._shards.append(write_shard(self.folder, keys, lengths, torch.cat([shard.values for shard in group])))
            for shard in group:
                self._drop(shard)

    def _is_whole(self, shard: Shard) -> bool:
        if not shard.verify():
            logger.warning(_DAMAGED, shard.path)
            self._drop(shard)
        return shard.is_whole

    def _drop(self, shard: Shard) -> None:
        shard.remove()
        self._shards = [kept for kept in self._shards if kept is not shard]


def check_stores(cache_dir: str | os.PathLike[str]) -> str:
    """What the stores in a folder are worth to a run, in a sentence or two; "" where there are none. Changes nothing.

    Cost: reads and hashes all of it, about 1 s per GB.
    """
    files = sorted(filter(Path.is_file, Path(cache_dir).glob(f"*/{SHARD_GLOB}")))
    damaged = [str(path.relative_to(cache_dir)) for path in files if is_damaged(path)]
    text = f"What {cache_dir} already holds is not encoded again: then less time." if files else ""
    if damaged:
        text += f" {len(damaged)} of its files are damaged, and what they held is encoded again: {', '.join(damaged)}."
    return text


def find_not_finite(embeddings: torch.Tensor | Sequence[torch.Tensor]) -> list[int]:
    """Which of n sequences' embeddings hold a NaN or an infinity. Cost: one reduction; of states, one each."""
    if isinstance(embeddings, torch.Tensor):
        return (~torch.isfinite(embeddings).all(1)).nonzero().flatten().tolist()
    return [i for i, states in enumerate(embeddings) if not torch.isfinite(states).all()]


def name_sequences(sequences: Sequence[Any]) -> str:
    """The first few of them, shortened, with their lengths."""
    shown = [f"{s if len(s) <= 40 else s[:40] + '...'} ({len(s)} residues)" for s in sequences[:SHOWN]]
    more = len(sequences) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def refuse_not_finite(sequences: Any, embeddings: torch.Tensor | Sequence[torch.Tensor], what: str) -> None:
    """Raises NotFiniteError with the sequences whose `embeddings` are not finite."""
    rows = find_not_finite(embeddings)
    if rows:
        raise NotFiniteError(
            f"Embeddings {what} are NaN or infinite for {len(rows)} of {len(sequences)} sequences: "
            f"{name_sequences([sequences[row] for row in rows])}. None of them was stored. Either the encoder's "
            "weights are damaged (are other sequences all right?), or these sequences are: leave them out."
        )

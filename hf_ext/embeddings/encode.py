"""Encode every distinct sequence once: longest first, in atomic shards, halving batches that do not fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tqdm.auto import tqdm

from ..memory.out_of_memory import DidNotFit, attempt
from .finite import AnyEncode, Embeddings, encode_finite, join_blocks, name_sequences
from .store import EmbeddingStore

logger = logging.getLogger(__name__)

NUM_SHARDS = 16  # at least so many, as long as that leaves SMALLEST_SHARD in each: small sets are shared out too
SMALLEST_SHARD = 32


@dataclass
class EncodingReport:
    """What filling a store took, for this process."""

    num_encoded: int = 0
    num_residues: int = 0
    seconds: float = 0.0
    tokens_per_batch: int = 0
    overflowed: list[str] = field(default_factory=list)  # sequences that took float32


def fill_store(
    store: EmbeddingStore,
    sequences: Sequence[str],
    encode: AnyEncode,
    *,
    encode_exactly: AnyEncode | None = None,
    tokens_per_batch: int,
    process_index: int = 0,
    num_processes: int = 1,
    description: str = "Embedding",
    show_progress: bool = True,
    shard_sequences: int | None = None,
) -> EncodingReport:
    """Encodes what `store` lacks of `sequences` and writes it, shard by shard.

    Shards are cut from the list of missing sequences, longest first, so that a restart cuts the same ones again and a
    batch that is too big fails in the first minute. Shard i is encoded by process i modulo `num_processes`; callers
    with several processes wait for each other and `store.refresh()` afterwards.

    Args:
        store: where embeddings go.
        sequences: encoder inputs, repeats allowed; parts of a pair joined by `|`.
        encode: maps n inputs of similar length to (n, width); of a `TokenStateStore`, to n tensors (tokens, width).
        encode_exactly: the same in float32, for inputs that overflow; None where `encode` already is.
        tokens_per_batch: bound on sequences times longest; halved whenever memory runs out.
        shard_sequences: sequences per shard file; None: as many as the store says, fewer where there are few distinct
            ones. It does not depend on the number of processes, nor on what is stored, and so neither do the files.

    Raises:
        MemoryError: a single sequence does not fit.
        NotFiniteError: the embedding of a sequence is NaN or infinite in float32 too; its shard is not written.
    """
    missing = store.missing(sequences)
    if shard_sequences is None:
        shard_sequences = min(store.shard_sequences, max(SMALLEST_SHARD, -(-len(set(sequences)) // NUM_SHARDS)))
    shards = [missing[i : i + shard_sequences] for i in range(0, len(missing), shard_sequences)]
    mine = shards[process_index::num_processes]
    report = EncodingReport(tokens_per_batch=tokens_per_batch)
    start = time.perf_counter()
    total = sum(len(sequence) for shard in mine for sequence in shard)
    with tqdm(
        total=total, unit="res", unit_scale=True, desc=description, disable=not show_progress or not mine
    ) as progress:
        for shard in mine:
            blocks = []
            for batch in _batches(shard, report):
                blocks.append(_encode_fitting(encode, encode_exactly, batch, report))
                progress.update(sum(map(len, batch)))
            store.add(shard, join_blocks(blocks))
            report.num_encoded += len(shard)
    report.num_residues, report.seconds = total, time.perf_counter() - start
    if report.overflowed:
        logger.warning(
            "%s: %d of %d sequences overflow in half precision and were encoded in float32: %s.",
            *(description, len(report.overflowed), report.num_encoded, name_sequences(report.overflowed)),
        )
    return report


def _batches(shard: Sequence[str], report: EncodingReport) -> Iterator[Sequence[str]]:
    """Cuts a shard, sorted longest first, into runs of at most `report.tokens_per_batch` padded tokens."""
    start = 0
    while start < len(shard):
        size = max(1, report.tokens_per_batch // max(1, len(shard[start])))
        yield shard[start : start + size]
        start += size


def _encode_fitting(
    encode: AnyEncode, encode_exactly: AnyEncode | None, batch: Sequence[str], report: EncodingReport
) -> Embeddings:
    """Encodes a batch, in halves where memory does not suffice; remembers the size that fitted and what overflowed."""
    try:
        embeddings, overflowed = attempt(partial(encode_finite, encode, encode_exactly, batch))
    except DidNotFit as failure:
        if len(batch) == 1:
            raise MemoryError(
                f"One sequence of {len(batch[0])} residues does not fit into memory. Use --max_residues with "
                "--too_long window or truncate, or half precision."
            ) from failure
    else:
        report.overflowed += overflowed
        return embeddings
    half = len(batch) // 2
    report.tokens_per_batch = max(half * len(batch[0]), len(batch[0]))
    logger.warning("Out of memory with %d sequences per batch; going on with %d.", len(batch), half)
    halves = (batch[:half], batch[half:])
    return join_blocks([_encode_fitting(encode, encode_exactly, part, report) for part in halves])

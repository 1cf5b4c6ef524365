"""Encode every distinct sequence once: longest first, in atomic shards, halving batches that do not fit.

What is NaN or infinite in half precision is computed again in float32, or refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from ..memory import DidNotFit, attempt
from ..startup import phase
from ..text import is_watched
from .store import EmbeddingStore, find_not_finite, name_sequences, refuse_not_finite

logger = logging.getLogger(__name__)

AnyEncode = Callable[[Sequence[str]], Any]  # of n sequences (n, width), or of each its tokens' states, (tokens, width)

SHARD_SEQUENCES = 1024  # what a kill can cost at most, per process
SHARD_STATES = 64  # of 500 residues and 1,280 wide in float32: 160 MB
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


@phase("encode")
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
    shard_sequences: int = SHARD_SEQUENCES,
) -> EncodingReport:
    """Encodes what `store` lacks of `sequences` and writes it, shard by shard.

    Shards are cut from the list of missing sequences, longest first, so that a restart cuts the same ones again and a
    batch that is too big fails in the first minute. Shard i is encoded by process i modulo `num_processes`; callers
    with several processes wait for each other, merge in one of them, and `store.refresh()` in all.

    Args:
        store: where embeddings go.
        sequences: encoder inputs, repeats allowed; parts of a pair joined by `|`.
        encode: maps n inputs of similar length to (n, width), or to n tensors, (tokens, width) each.
        encode_exactly: the same in float32, for inputs that overflow; None where `encode` already is.
        tokens_per_batch: bound on sequences times longest; halved whenever memory runs out.
        shard_sequences: the most of a shard; where there are few distinct ones it has fewer. It does not depend on the
            number of processes, nor on what is stored, and so neither do the files.

    Raises:
        MemoryError: a single sequence does not fit.
        NotFiniteError: the embedding of a sequence is NaN or infinite in float32 too; its shard is not written.
    """
    missing = store.missing(sequences)
    shard_sequences = min(shard_sequences, max(SMALLEST_SHARD, -(-len(set(sequences)) // NUM_SHARDS)))
    shards = [missing[i : i + shard_sequences] for i in range(0, len(missing), shard_sequences)]
    mine = shards[process_index::num_processes]
    num_residues = sum(len(sequence) for shard in mine for sequence in shard)
    report = EncodingReport(sum(map(len, mine)), num_residues, 0.0, tokens_per_batch)
    start = time.perf_counter()
    is_quiet = not (show_progress and mine and is_watched())
    with tqdm(total=num_residues, unit="res", unit_scale=True, desc=description, disable=is_quiet) as progress:
        for shard in mine:
            store.add(shard, _encode_shard(encode, encode_exactly, shard, report, progress))
    if num_processes == 1 and missing:
        store.merge()
    report.seconds = time.perf_counter() - start
    if report.overflowed:
        logger.warning(
            "%s: %d of %d sequences overflow in half precision and were encoded in float32: %s.",
            *(description, len(report.overflowed), report.num_encoded, name_sequences(report.overflowed)),
        )
    return report


def _encode_shard(
    encode: AnyEncode, encode_exactly: AnyEncode | None, shard: Sequence[str], report: EncodingReport, progress: Any
) -> Any:
    """Encodes a shard, sorted longest first, in runs of at most `report.tokens_per_batch` padded tokens.

    That number is lowered where memory does not suffice, for good; what overflowed is added to the report.
    """
    blocks = []
    while shard:
        longest = max(1, len(shard[0]))
        batch = shard[: max(1, report.tokens_per_batch // longest)]
        try:
            embeddings, overflowed = attempt(partial(encode_finite, encode, encode_exactly, batch))
        except DidNotFit as failure:
            if len(batch) == 1:
                raise MemoryError(
                    f"One sequence of {len(batch[0])} residues does not fit into memory. Use --too_long "
                    "truncate, --max_residues, or half precision."
                ) from failure
            report.tokens_per_batch = len(batch) // 2 * longest
            logger.warning("Out of memory with %d sequences per batch; going on with half of them.", len(batch))
            continue
        blocks.append(embeddings)
        report.overflowed += overflowed
        progress.update(sum(map(len, batch)))
        shard = shard[len(batch) :]
    if isinstance(blocks[0], list):
        return [states for block in blocks for states in block]
    return torch.cat(blocks)  # of different precisions, in the highest


def encode_finite(
    encode: AnyEncode, encode_exactly: AnyEncode | None, sequences: Sequence[str]
) -> tuple[Any, list[str]]:
    """Encodes a batch; sequences that overflow are encoded once more, in float32.

    Args:
        encode: maps n inputs to (n, width), or to n tensors, (tokens, width) each.
        encode_exactly: the same in float32; None where `encode` already is.

    Returns:
        Embeddings, as `encode` returns them, on the CPU, all finite; and the sequences that took float32.

    Raises:
        NotFiniteError: some are not finite in float32 either.
    """
    embeddings = _on_cpu(encode(sequences))
    rows = find_not_finite(embeddings)
    if not rows:
        return embeddings, []
    overflowed = [sequences[row] for row in rows]
    again = _on_cpu(encode_exactly(overflowed)) if encode_exactly else [embeddings[row] for row in rows]
    refuse_not_finite(overflowed, again, "in float32")
    embeddings = embeddings if isinstance(embeddings, list) else embeddings.float()
    for row, found in zip(rows, again):
        embeddings[row] = found.float()
    return embeddings, overflowed


def _on_cpu(embeddings: Any) -> Any:
    return [states.cpu() for states in embeddings] if isinstance(embeddings, list) else embeddings.cpu()

"""Embeddings that are computed once: the store, the loop that fills it, the dataset that reads it."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .dataset import (
        EmbeddedDataset,
        EmbeddedResidues,
        StateTable,
        factorize,
        find_inputs,
        join_parts,
        make_table,
        take_rows,
    )
    from .encode import SHARD_STATES, EncodingReport, encode_finite, fill_store
    from .store import EmbeddingStore
    from .vectors import WRITERS, VectorFile, file_name, hash_sequence
else:
    __getattr__, __dir__, __all__ = offer(__name__)

"""Scores of substitutions by a masked language model alone, without any label.

The score of a substitution is how much likelier the model holds the new residue than the wild type's own, as the
difference of their log-probabilities: masked and wild-type marginals of J. Meier et al., Language models enable
zero-shot prediction of the effects of mutations on protein function (NeurIPS 2021). Probabilities are over the whole
vocabulary, as there. Over the 20 residues alone the differences would be the same, and they are those of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data import STANDARD, ResidueTokenizer, Variants, find_substitutions
from ..errors import ArgumentError
from ..evaluation import FloatArray
from ..models import (
    VECTORS,
    LoraSettings,
    NoMaskedHeadError,
    limit_of_positions,
    load_encoder,
    load_tokenizer,
    read_encoder,
)
from ..text import is_watched
from .embedded import TOKENS_PER_BATCH

By = Literal["masked", "wild_type"]
SubstitutionTable = NDArray[np.float32]  # (residues of the wild type, 20), by the letters of `STANDARD`


def zero_shot_table(
    name_or_path: str,
    wild_type: str,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    by: By = "masked",
) -> SubstitutionTable | None:
    """Scores all substitutions by an encoder, as `score_substitutions` does; None where it has no masked head.

    Args:
        name_or_path, revision: of the encoder, as `load_masked_lm` takes them; `VECTORS` have no head either.
        wild_type, by: as `score_substitutions` takes them.
        device: where it computes.

    Raises:
        ArgumentError: as `load_masked_lm` and `score_substitutions`.

    Cost: one more copy of the encoder in memory, and what `score_substitutions` takes.
    """
    if name_or_path == VECTORS:
        return None
    try:
        model = load_masked_lm(name_or_path, revision, device)
    except NoMaskedHeadError:
        return None
    return score_substitutions(model, load_tokenizer(name_or_path, revision), wild_type, by)


def add_zero_shot(
    variants: Variants,
    config: Any,
    train: Dataset,
    device: str | torch.device,
) -> Variants:
    """Adds the scores of the encoder that reads variants, by wild-type marginals, where it has a masked head.

    Args:
        train: rows by which numbers of variants are scaled.
        config, device: the model's `AffinityConfig`, and where it computes.

    Cost: of `zero_shot_table`, with a single pass.
    """
    for tower in config.tower_specs:
        if [variants.column] in tower.inputs and {*variants.wild_type} <= {*STANDARD}:
            spec = config.encoder_specs[tower.encoder]
            table = zero_shot_table(spec.name_or_path, variants.wild_type, spec.revision, device, "wild_type")
            if table is not None:
                return replace(variants, table=table.tolist()).scaled(train)
    return variants


def load_masked_lm(
    name_or_path: str,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Loads a masked language model with its head, for evaluation.

    Args:
        name_or_path: Hub id or folder, also one that `hf-ext mlm` wrote.
        revision: commit, tag or branch on the Hub.
        device, dtype: where its weights are, and what they are in.

    Raises:
        NoMaskedHeadError: its kind has no masked head, or its weights lack it, so that it would be random.
        ArgumentError: not found, damaged, or of a family that is not served.

    Cost: reads the files twice, to know them and to load them.
    """
    spec = read_encoder(name_or_path, revision, "frozen", LoraSettings(), masked_head=True)
    return load_encoder(spec, dtype).eval().to(device)


def check_wild_type(wild_type: str) -> None:
    """Raises ArgumentError where a protein has other letters than those of the 20 standard residues, or none."""
    if not wild_type or {*wild_type} - {*STANDARD}:
        told = f"has other letters than {STANDARD}, or none. Write a residue that is near in place of others."
        raise ArgumentError(f"The wild type, {wild_type[:40]!r}, {told}")


@torch.no_grad()
def score_substitutions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    wild_type: str,
    by: By = "masked",
    max_residues: int | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> SubstitutionTable:
    """Scores all substitutions of a protein: (L, 20) float32, nats; above 0 the model prefers the new residue.

    Entry [i, a] is log p(a) - log p(the wild type's residue) at position i, with letters in the order of
    ACDEFGHIKLMNPQRSTVWY; 0 for the wild type's own. A protein that is longer than the model takes is read in windows as
    wide as that, one for each residue, with it in the middle, but near the ends of the protein.

    Args:
        model: a masked language model of transformers, in evaluation mode, on its device; logits are taken in float32.
        tokenizer: of transformers, with one token per residue.
        wild_type: L of the 20 standard residues.
        by: "masked": the position is masked, a pass for each; "wild_type": nothing is, one pass for all.
        max_residues: lowers what the model takes at once.
        tokens_per_batch: of a pass; scores do not depend on it.

    Raises:
        ArgumentError: other letters; no mask token; scores that are not finite.
        DataError: the tokenizer is not one of proteins.

    Cost: L passes of min(L, limit) residues; by wild type one, of longer proteins L - limit + 1.
    """
    check_wild_type(wild_type)
    if tokenizer.mask_token_id is None:
        raise ArgumentError(f"{type(tokenizer).__name__} has no mask token. Take the tokenizer of a masked model.")
    residues = ResidueTokenizer(tokenizer, max_length=limit_of_positions(model.config.to_dict()))
    residues.limit(max_residues, "--max_residues takes")
    length = len(wild_type)
    width = min(length, residues.max_residues or length)
    # Of each position, where its window begins, and its token there. Windows are equally wide, so nothing is padded.
    starts = np.clip(np.arange(length) - width // 2, 0, length - width)
    columns = np.arange(length) - starts + len(residues.template.prefix)
    ids = residues([wild_type[start : start + width] for start in range(length - width + 1)])["input_ids"]
    passes = np.arange(length) if by == "masked" else starts  # by which each position is scored
    windows = starts if by == "masked" else np.arange(len(ids))  # of each pass
    scores = np.empty((length, len(STANDARD)), np.float32)
    size = max(1, tokens_per_batch // ids.shape[1])
    for begin in tqdm(range(0, len(windows), size), "Scoring", disable=not is_watched()):
        positions = np.flatnonzero((passes >= begin) & (passes < begin + size))
        places = (passes[positions] - begin, columns[positions])
        batch = ids[windows[begin : begin + size]]
        if by == "masked":
            batch[places] = tokenizer.mask_token_id
        batch = batch.to(model.device)
        logits = model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits
        scores[positions] = logits[places][:, residues.table[[*STANDARD.encode()]]].float().cpu()
    if not np.isfinite(scores).all():
        raise ArgumentError("Scores are NaN or infinite: compute in float32 (no --fp16), or take another model.")
    own = [*map(STANDARD.index, wild_type)]
    return scores - scores[range(length), own, None]


def score_rows(
    table: SubstitutionTable,
    wild_type: str,
    sequences: Sequence[str],
) -> FloatArray:
    """Scores rows: (n,) float64, each the sum over its substitutions, 0 of the wild type.

    NaN of a row that is not as long as the wild type, and where another letter than the 20 takes a residue's place.

    Args:
        table: of `score_substitutions`, for this wild type.
    """
    known = np.pad(table.astype(np.float64), ((0, 0), (0, 1)), constant_values=np.nan)  # behind the 20
    found = find_substitutions(sequences, wild_type)
    scores = np.where(found.counts < 0, np.nan, 0.0)
    np.add.at(scores, found.row, known[found.position, found.letter])
    return scores

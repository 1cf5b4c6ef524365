"""Scores of substitutions by a masked language model alone, without any label.

The score of a substitution is how much likelier the model holds the new residue than the wild type's own, as the
difference of their log-probabilities: masked and wild-type marginals of J. Meier et al., Language models enable
zero-shot prediction of the effects of mutations on protein function (NeurIPS 2021). Probabilities are over the whole
vocabulary, as there. Over the 20 residues alone differences would be the same, so that they are taken of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..checkpoints import check_finite, check_model
from ..data import STANDARD, ResidueTokenizer
from ..errors import ArgumentError
from ..evaluation import FloatArray
from ..memory import DidNotFit, attempt
from ..models import (
    VECTORS,
    LoraSettings,
    limit_of_positions,
    load_tokenizer,
    read_encoder,
    without_load_report,
)
from ..pretrained import reading
from ..processes import whole_weights
from ..speedups import CPU_TOKENS_PER_BATCH, GPU_TOKENS_PER_BATCH

By = Literal["masked", "wild_type"]
SubstitutionTable = NDArray[np.float32]  # (residues of the wild type, 20), by the letters of `STANDARD`


class NoMaskedHeadError(ArgumentError):
    """An encoder does not say how likely a residue is: its kind has no masked head, or its weights lack it."""


def zero_shot_table(
    name_or_path: str, wild_type: str, revision: str | None = None, device: str | torch.device = "cpu"
) -> SubstitutionTable | None:
    """Scores all substitutions by an encoder, as `score_substitutions` does; None where it has no masked head.

    Args:
        name_or_path, revision: of the encoder, as `load_masked_lm` takes them; `VECTORS` have no head either.
        wild_type: of the 20 standard residues.
        device: where it computes.

    Raises:
        ArgumentError: as `load_masked_lm` and `score_substitutions`.

    Cost: loads the encoder once more; a pass for each residue.
    """
    if name_or_path == VECTORS:
        return None
    try:
        model = load_masked_lm(name_or_path, revision)
    except NoMaskedHeadError:
        return None
    return score_substitutions(model.to(device), load_tokenizer(name_or_path, revision), wild_type)  # type: ignore[arg-type]


def load_masked_lm(name_or_path: str, revision: str | None = None) -> PreTrainedModel:
    """Loads a masked language model with its head, in float32 and for evaluation.

    Args:
        name_or_path: Hub id or folder, also one that `hf-ext mlm` wrote.
        revision: commit, tag or branch on the Hub.

    Raises:
        NoMaskedHeadError: its kind has no masked head, or its weights lack it, so that it would be random.
        ArgumentError: not found, damaged, of a family that is not served, or its weights are missing or not finite.

    Cost: reads the files twice, to verify and to load them.
    """
    spec = read_encoder(name_or_path, revision, "frozen", LoraSettings())
    kind = spec.config["model_type"]
    remedy = "Take one that was saved with its head, such as facebook/esm2_t12_35M_UR50D or what hf-ext mlm wrote."
    if kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise NoMaskedHeadError(f"Encoder {name_or_path!r} is of type {kind!r}, which has no masked head. {remedy}")
    name = spec.name_or_path
    if Path(name).is_dir():
        check_model(name)
    with reading(f"Encoder {name!r} cannot be loaded", name, remedy), without_load_report(), whole_weights():
        model, info = AutoModelForMaskedLM.from_pretrained(
            name, revision=spec.revision, dtype="float32", trust_remote_code=False, output_loading_info=True
        )
    if missing := sorted(key for key in info["missing_keys"] if "contact_head." not in key):
        raise NoMaskedHeadError(
            f"Encoder {name_or_path!r} has no masked head: its weights lack {', '.join(missing[:3])} ({len(missing)} in "
            f"all), and scores by new ones would be random. {remedy}"
        )
    check_finite(name, model.state_dict())
    return model.eval()


def check_wild_type(wild_type: str) -> None:
    """Raises ArgumentError where a protein has other letters than those of the 20 standard residues, or none."""
    wrong = sorted({*wild_type} - {*STANDARD})
    if wrong or not wild_type:
        told = f"{wrong[0]} is none of {STANDARD}" if wrong else "it has no residue"
        raise ArgumentError(f"The wild type cannot be scored: {told}. Write the residue that is nearest.")


@torch.no_grad()
def score_substitutions(
    model: Any,
    tokenizer: Any,
    wild_type: str,
    by: By = "masked",
    *,
    max_residues: int | None = None,
    tokens_per_batch: int | None = None,
    dtype: torch.dtype | None = None,
    show_progress: bool = False,
) -> SubstitutionTable:
    """Scores all substitutions of a protein: (L, 20) float32, nats; above 0 the model prefers the new residue.

    Entry [i, a] is log p(a) - log p(the wild type's residue) at position i, with letters in the order of
    ACDEFGHIKLMNPQRSTVWY; 0 for the wild type's own.

    A protein that is longer than the model takes is read in windows as wide as that, one for each residue, which stands
    in its middle, but near the ends of the protein.

    Args:
        model: a masked language model of transformers, in evaluation mode, on its device.
        tokenizer: of transformers, with one token per residue.
        wild_type: L of the 20 standard residues.
        by: "masked": the position is masked, a pass for each; "wild_type": nothing is, one pass for all.
        max_residues: lowers what the model takes at once.
        tokens_per_batch: 2,048 on a CPU and 65,536 on a GPU if left out; halved where memory runs out.
        dtype: of autocast; the differences are taken in float32.

    Raises:
        ArgumentError: other letters; no mask token; scores that are not finite.
        DataError: the tokenizer is not one of proteins.
        MemoryError: a single pass does not fit.

    Cost: L passes of min(L, limit) residues: 2.5 s for 265 residues by ESM-2 8M on one core; by wild type one pass, of
    longer proteins L - limit + 1.
    """
    check_wild_type(wild_type)
    if tokenizer.mask_token_id is None:
        raise ArgumentError(f"{type(tokenizer).__name__} has no mask token. Take the tokenizer of a masked model.")
    residues = ResidueTokenizer(tokenizer, max_length=limit_of_positions(model.config.to_dict()))
    residues.limit(max_residues, "--max_residues takes")
    length = len(wild_type)
    width = min(length, residues.max_residues or length)
    # Of each position, where its window begins; and the token in it. Windows are equally wide, so nothing is padded.
    starts = np.clip(np.arange(length) - width // 2, 0, length - width)
    columns = len(residues.template.prefix) + np.arange(length) - starts
    ids = residues([wild_type[start : start + width] for start in range(length - width + 1)])["input_ids"]
    is_masked = by == "masked"
    passes = np.arange(length) if is_masked else starts  # by which each position is scored
    windows = starts if is_masked else np.arange(len(ids))  # of each pass
    letters = residues.table[[*STANDARD.encode()]]
    own = residues.table[[*wild_type.encode()]]
    scores = np.empty((length, len(STANDARD)), np.float32)
    usual = CPU_TOKENS_PER_BATCH if model.device.type == "cpu" else GPU_TOKENS_PER_BATCH
    size = max(1, (tokens_per_batch or usual) // ids.shape[1])
    done = 0
    with tqdm(total=len(windows), unit=" passes", desc="Scoring", disable=not show_progress) as progress:
        while done < len(windows):
            positions = np.flatnonzero((passes >= done) & (passes < done + size))
            places = (passes[positions] - done, columns[positions])
            batch = ids[windows[done : done + size]]
            if is_masked:
                batch[places] = tokenizer.mask_token_id
            try:
                logits = attempt(partial(_read_logits, model, batch, places, dtype))
            except DidNotFit as failure:
                if len(batch) == 1:
                    raise MemoryError(f"One pass of {width} residues does not fit. Lower --max_residues.") from failure
                size = len(batch) // 2
                continue
            scores[positions] = logits[:, letters] - np.take_along_axis(logits, own[positions, None], 1)
            done += len(batch)
            progress.update(len(batch))
    if not np.isfinite(scores).all():
        raise ArgumentError("Scores are NaN or infinite: compute in float32 (no --fp16), or take another model.")
    return scores


def _read_logits(model: Any, ids: torch.Tensor, places: Any, dtype: torch.dtype | None) -> NDArray[np.float32]:
    """Returns the logits of some tokens, (tokens, vocabulary), float32; `places` are their rows and columns."""
    ids = ids.to(model.device)
    with torch.autocast(ids.device.type, dtype, enabled=dtype is not None):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits[places].float().cpu().numpy()


def score_rows(table: SubstitutionTable, wild_type: str, sequences: Sequence[str]) -> FloatArray:
    """Scores rows: (n,) float64, each the sum over its substitutions, 0 of the wild type.

    NaN of a row that is not as long as the wild type, and where another letter than the 20 takes a residue's place.

    Args:
        table: of `score_substitutions`, for this wild type.
    """
    length = len(wild_type)
    scores = np.full(len(sequences), np.nan)
    aligned = np.flatnonzero([len(one) == length for one in sequences])
    text = "".join(sequences[row] for row in aligned)
    found = np.frombuffer(text.encode("ascii"), np.uint8).reshape(-1, length)
    column = np.full(256, len(STANDARD))
    column[[*STANDARD.encode()]] = range(len(STANDARD))
    by_letter = np.pad(table.astype(np.float64), ((0, 0), (0, 1)), constant_values=np.nan)
    scores[aligned] = by_letter[np.arange(length), column[found]].sum(1)
    return scores

"""What a model of labels of residues has to beat: a constant, the residues around each, a linear model on states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import draw_rows, read_columns
from .by_kind import (
    MAX_RESIDUES,
    WINDOW,
    predict_constant,
    predict_residues,
    window_features,
)
from .fitted import Baselines, fit_baselines, sample_rows

if TYPE_CHECKING:
    from ..trainer import FastTrainer


def fit_residue_baselines(trainer: FastTrainer, splits: Any, name: str, group_column: str | None = None) -> Baselines:
    """Fits on `splits["train"]` what needs no neural network, and predicts split `name` with it.

    The frequencies of classes, or the mean; a linear model of the 15 residues around each; a linear model of the
    encoder's states, where the encoder is frozen. Penalties are chosen on `splits["validation"]`.

    Args:
        trainer: a `FastTrainer` whose model is trained, on labels of residues.
        splits: map-style train, validation and test.
        name: of the split to predict.

    Cost: at most 50,000 residues are fitted: a minute on one core.
    """
    kind = trainer.model.config.kind
    collator = trainer.data_collator
    seed = trainer.args.seed
    ((model_input, columns),) = collator.columns.items()
    train = sample_rows(splits["train"], seed)
    known = [_read(rows, columns, collator.longest) for rows in (train, splits["validation"])]
    asked, _ = _read(splits[name], columns, collator.longest)
    baselines = Baselines()
    _, labels = known[0]
    lengths = [len(sequence) for sequence in asked]
    constant = predict_constant(kind, labels, lengths)
    baselines.add(kind.constant_name, constant, kind="constant", num_rows=len(train))
    found, facts = predict_residues(kind, known, window_features, asked, standardize=False)
    name = f"{kind.linear_name} on {WINDOW} residues"
    baselines.add(name, found, **facts, window=WINDOW)
    if trainer.model.frozen_inputs:

        def encode(sequences: Sequence[str], residues: Any) -> np.ndarray:
            states = trainer.encode_distinct(model_input, sequences).numpy()
            if residues is None:
                return states
            return states[residues]

        drawn = [_draw_proteins(*split, seed) for split in known]
        found, facts = predict_residues(kind, drawn, encode, asked, standardize=True)
        baselines.add(f"{kind.linear_name} on embeddings", found, **facts)
    return baselines


def _read(rows: Any, columns: list[str], longest: int | None) -> tuple[list[str], list[np.ndarray]]:
    """Reads sequences and their labels, as the encoder takes them; NaN or -100 is not known."""
    sequences = [sequence[:longest] for (sequence,) in read_columns(rows, columns)]
    labels = [np.array(row[:longest], np.float64) for row in rows["label"][:]]
    return sequences, labels


def _draw_proteins(sequences: list[str], labels: list[np.ndarray], seed: int) -> tuple[list[str], list[np.ndarray]]:
    """Draws proteins with at most 50,000 residues in all, to bound the time of the encoder."""
    num_residues = sum(map(len, sequences))
    share = min(1.0, MAX_RESIDUES / num_residues)
    most = max(1, int(share * len(sequences)))
    chosen = draw_rows(len(sequences), seed, most)
    return [sequences[i] for i in chosen], [labels[i] for i in chosen]


FITTERS = {
    "rows": fit_baselines,
    "residues": fit_residue_baselines,
}  # by `LabelKind.counted`

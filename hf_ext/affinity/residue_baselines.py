"""What a model of labels of residues has to beat: a constant, the residues around each, a linear model on states."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..data.columns import read_columns
from ..data.splits import draw_rows
from ..evaluation.kind_baselines import MAX_RESIDUES, WINDOW, WindowBaseline, make_linear, predict_constant
from ..labels import UNKNOWN
from .baselines import Baselines, constant_name, linear_name, sample_rows

PROTEINS_AT_ONCE = 256  # whose states are predicted together


def fit_residue_baselines(trainer: Any, splits: Any, name: str) -> Baselines:
    """Fits on `splits["train"]` what needs no neural network, and predicts split `name` with it.

    The frequencies of classes, or the mean; a linear model of the 15 residues around each; a linear model of the
    encoder's states, where the encoder is frozen. Penalties are chosen on `splits["validation"]`.

    Args:
        trainer: a `FastTrainer` whose model is trained, on labels of residues.
        splits: map-style train, validation and test.
        name: of the split to predict.

    Cost: at most 50,000 residues are fitted: a minute on one core.
    """
    kind, collator, seed = trainer.model.config.kind, trainer.data_collator, trainer.args.seed
    ((model_input, columns),) = collator.columns.items()
    baselines, asked = Baselines(), splits[name]
    fitted = sample_rows(splits["train"], seed), splits["validation"]
    known = [_read(rows, columns, collator.longest) for rows in fitted]
    proteins = [sequence[: collator.longest] for (sequence,) in read_columns(asked, columns)]
    (sequences, labels), (held_out, held_out_labels) = known
    constant = predict_constant(kind, labels, [*map(len, proteins)])
    baselines.add(constant_name(kind), constant, kind="constant", num_rows=len(sequences))
    windows = WindowBaseline(kind).fit(sequences, labels, held_out, held_out_labels)
    baselines.add(f"{linear_name(kind)} on {WINDOW} residues", windows.predict(proteins), **windows.summary())
    if trainer.model.frozen_inputs:
        given = [part for split in known for part in _draw_states(trainer, model_input, *split)]
        linear = make_linear(kind).fit(*given)
        found: list[Any] = []
        for start in range(0, len(proteins), PROTEINS_AT_ONCE):
            part = proteins[start : start + PROTEINS_AT_ONCE]
            predicted = linear.predict(trainer.encode_distinct(model_input, part).numpy())
            found += np.split(predicted, np.cumsum([*map(len, part)])[:-1])
        baselines.add(f"{linear_name(kind)} on embeddings", found, **linear.summary())
    return baselines


def _read(rows: Any, columns: list[str], longest: int | None) -> tuple[list[str], list[np.ndarray]]:
    """Sequences and their labels, as the encoder takes them; NaN or -100 is not known."""
    sequences = [sequence[:longest] for (sequence,) in read_columns(rows, columns)]
    return sequences, [np.array(row[:longest], np.float64) for row in rows["label"][:]]


def _draw_states(
    trainer: Any, model_input: str, sequences: list[str], labels: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """States and labels of the known residues of so many proteins as hold at most 50,000."""
    lengths = np.cumsum([*map(len, sequences)])
    share = min(1.0, MAX_RESIDUES / lengths[-1])
    chosen = draw_rows(len(sequences), trainer.args.seed, max(1, int(share * len(sequences))))
    states = trainer.encode_distinct(model_input, [sequences[i] for i in chosen]).numpy()
    truth = np.concatenate([labels[i] for i in chosen])
    is_known = np.isfinite(truth) & (truth != UNKNOWN)
    return states[is_known], truth[is_known]

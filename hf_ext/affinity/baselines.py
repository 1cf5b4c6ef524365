"""What a model has to beat on a split: constants and linear models, fitted on the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.columns import column_names, read_columns
from ..embeddings.dataset import join_parts
from ..evaluation.baselines import ConstantBaseline, GroupMeanBaseline, RidgeBaseline
from ..evaluation.sequence_features import SequenceFeatures
from ..evaluation.verdict import CONSTANT

FloatArray = NDArray[np.float64]

RIDGE_ROWS = 50_000  # training rows that a ridge sees at most
MAX_PARTNERS = 50  # a ridge for each value of the other columns: only where these are few,
MIN_PARTNER_ROWS = 100  # and each has this many training rows on average


@dataclass
class Baselines:
    """Predictions by name of baseline, (n,) float64 in label units; and what each was fitted on, JSON-able."""

    predictions: dict[str, FloatArray] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, predictions: FloatArray, **facts: Any) -> None:
        self.predictions[name], self.facts[name] = predictions, facts


@dataclass(frozen=True)
class _Rows:
    """Sequences and labels of one split, in memory."""

    sequences: list[list[str]]  # by column, then by row
    labels: FloatArray

    @classmethod
    def of(cls, split: Any, columns: Sequence[str]) -> _Rows:
        return cls([list(column) for column in zip(*read_columns(split, columns))], label_array(split))

    def keys(self, columns: Sequence[int]) -> list[tuple[str, ...]]:
        return list(zip(*(self.sequences[i] for i in columns)))


def fit_baselines(trainer: Any, splits: Any, name: str, group_column: str | None) -> Baselines:
    """Fits on `splits["train"]` what needs no neural network, and predicts split `name` with it.

    The training mean; the mean by `group_column`; ridge on residues by position or on 3-mers of all sequence columns,
    and one for each partner where one column varies and the others have few values (four antibodies against thousands
    of variants); of frozen encoders, ridge on their embeddings. Penalties are chosen on `splits["validation"]`.

    Args:
        trainer: a `FastTrainer` whose model is trained.
        splits: map-style train, validation and test.
        name: of the split to predict.
        group_column: or None.

    Cost: ridges see 50,000 training rows and 2,048 features of the sequences at most: 10 s on two cores; embeddings
    are encoded where they are not cached.
    """
    train, asked = splits["train"], splits[name]
    labels = label_array(train)
    constant = ConstantBaseline().fit(labels)
    baselines = Baselines()
    baselines.add(CONSTANT, constant.predict(len(asked)), num_rows=len(train), **constant.summary())
    if group_column and all(group_column in column_names(split) for split in (train, asked)):
        means = GroupMeanBaseline().fit(labels, train[group_column][:])
        baselines.add(
            f"mean by {group_column}", means.predict(asked[group_column][:]), num_rows=len(train), **means.summary()
        )
    sample = _sample_rows(train, trainer.args.seed)
    rows = {"num_rows": len(sample), "of_rows": len(train)}
    columns = sequence_columns(trainer)
    parts = [_Rows.of(split, columns) for split in (sample, splits["validation"], asked)]
    _add_sequence_ridges(baselines, parts, columns, rows)
    if len(trainer.model.frozen_inputs) == len(trainer.model.embedding_sizes):
        # Embeddings of an encoder that trained are the model's own work.
        features = [pooled_features(trainer, split) for split in (sample, splits["validation"], asked)]
        ridge = RidgeBaseline().fit(features[0], parts[0].labels, features[1], parts[1].labels)
        baselines.add("ridge on embeddings", ridge.predict(features[2]), **rows, **ridge.summary())
    return baselines


def sequence_columns(trainer: Any) -> list[str]:
    """The columns that the model reads, each once."""
    return list(dict.fromkeys(column for parts in trainer.data_collator.columns.values() for column in parts))


def label_array(split: Any) -> FloatArray:
    """Labels of a map-style split, (n,) float64."""
    return np.asarray(split["label"][:], np.float64)


def pooled_features(trainer: Any, dataset: Any) -> np.ndarray:
    """The embeddings that the head sees, one row per row of `dataset`: (n, sum of widths), float32.

    Cost: with the embedding cache a look-up; otherwise each distinct sequence is encoded once.
    """
    blocks = []
    for name in trainer.model.embedding_sizes:
        rows = [join_parts(parts) for parts in read_columns(dataset, trainer.data_collator.columns[name])]
        distinct = sorted(set(rows), key=lambda sequence: (len(sequence), sequence))
        values = trainer.encode_distinct(name, distinct)
        position = {sequence: i for i, sequence in enumerate(distinct)}
        blocks.append(values[[position[row] for row in rows]].numpy())
    return np.concatenate(blocks, axis=1)


def _sample_rows(train: Any, seed: int) -> Any:
    if len(train) <= RIDGE_ROWS:
        return train
    return train.select(np.sort(np.random.default_rng(seed).permutation(len(train))[:RIDGE_ROWS]))


def _add_sequence_ridges(baselines: Baselines, parts: list[_Rows], columns: list[str], rows: dict[str, int]) -> None:
    train, validation, asked = parts
    num_values = [len(set(column)) for column in train.sequences]
    varying = [i for i, num in enumerate(num_values) if num > 1]
    if not varying:
        return
    features = SequenceFeatures(train.sequences, [validation.sequences, asked.sequences])
    if not features.num_features:  # columns that vary, but whose 3-mers do not
        return
    ridge, predicted = _fit_ridge(features, train, validation, asked)
    facts = {**rows, **ridge.summary(), "of_features": features.num_counts}
    baselines.add(f"{features.name} ridge", predicted, **facts)
    main = max(varying, key=lambda i: num_values[i])
    others = [i for i in varying if i != main]
    num_partners = len(set(train.keys(others)))
    if not others or num_partners > MAX_PARTNERS or len(train.labels) < MIN_PARTNER_ROWS * num_partners:
        return
    alone = [_Rows([part.sequences[main]], part.labels) for part in parts]
    of_main = SequenceFeatures(alone[0].sequences, [part.sequences for part in alone[1:]])
    keys = [part.keys(others) for part in parts]
    predicted = _fit_by_partner(of_main, alone, keys, predicted)
    partner = ", ".join(columns[i] for i in others)
    baselines.add(f"{of_main.name} ridge per {partner}", predicted, **rows, num_partners=num_partners)


def _fit_ridge(
    features: SequenceFeatures, train: _Rows, validation: _Rows, asked: _Rows
) -> tuple[RidgeBaseline, FloatArray]:
    matrices = [features.transform(part.sequences) for part in (train, validation)]
    ridge = RidgeBaseline(standardize=False).fit(matrices[0], train.labels, matrices[1], validation.labels)
    return ridge, ridge.predict(features.transform(asked.sequences))


def _fit_by_partner(
    features: SequenceFeatures, parts: list[_Rows], keys: list[list[tuple[str, ...]]], pooled: FloatArray
) -> FloatArray:
    """A ridge for each partner; `pooled`, of all partners, where training or validation lack one."""
    predicted = pooled.copy()
    places = [_places(rows) for rows in keys]
    for key in places[2].keys() & places[0].keys() & places[1].keys():
        chosen = [_select(part, place[key]) for part, place in zip(parts, places)]
        predicted[places[2][key]] = _fit_ridge(features, *chosen)[1]
    return predicted


def _places(keys: list[tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    places: dict[tuple[str, ...], list[int]] = {}
    for row, key in enumerate(keys):
        places.setdefault(key, []).append(row)
    return places


def _select(rows: _Rows, chosen: list[int]) -> _Rows:
    return _Rows([[column[i] for i in chosen] for column in rows.sequences], rows.labels[chosen])

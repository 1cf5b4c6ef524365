"""What a model has to beat on a split: constants, neighbours and linear models, fitted on the training rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.columns import column_names, read_columns
from ..data.splits import draw_rows
from ..embeddings.dataset import factorize, join_parts, take_rows
from ..errors import ArgumentError, NotFiniteError
from ..evaluation.baselines import RidgeBaseline, SequenceFeatures, predict_group_means, predict_nearest
from ..evaluation.verdict import CONSTANT
from .embedding_ridge import EmbeddingRidge, fit_embedding_ridge
from .partners import Partner, find_partner, fit_partner_ridges
from .pretrained_towers import PretrainedTowers

FloatArray = NDArray[np.float64]
Encode = Callable[[str, Sequence[str]], torch.Tensor]

EMBEDDING_RIDGE = "ridge on embeddings"
PER_PARTNER = f"{EMBEDDING_RIDGE} per "  # and the columns of the partner
RIDGE_ROWS = 50_000  # training rows that a ridge sees at most, here and where it is mixed with the model
MAX_PAIRS = 200_000_000  # of a training row and one to be predicted, that are compared for nearest neighbours
TUNING_ROWS = 5_000  # validation rows that choose how many neighbours, at most
# Where encoders train, embeddings of the pretrained ones are computed for the baselines alone.
PRETRAINED_ROWS = 5_000  # training rows at most
PRETRAINED_TUNING_ROWS = 2_000  # validation rows at most


@dataclass
class Baselines:
    """Predictions by name of baseline, (n,) float64 in label units; what each was fitted on, JSON-able; and sentences
    about those that could not be fitted."""

    predictions: dict[str, FloatArray] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, predictions: FloatArray, **facts: Any) -> None:
        self.predictions[name], self.facts[name] = predictions, facts


@dataclass(frozen=True)
class _Rows:
    """Sequences and labels of one split, in memory."""

    split: Any
    sequences: list[list[str]]  # by column, then by row
    labels: FloatArray

    @classmethod
    def of(cls, split: Any, columns: Sequence[str]) -> _Rows:
        return cls(split, [list(column) for column in zip(*read_columns(split, columns))], label_array(split))


def fit_baselines(
    trainer: Any, splits: Any, name: str, group_column: str | None, ridge: EmbeddingRidge | None = None
) -> Baselines:
    """Fits on `splits["train"]` what needs no neural network, and predicts split `name` with it.

    The training mean; the mean by `group_column`; ridge on residues by position or on 3-mers of all sequence columns;
    the labels of the nearest training sequences; ridge on the embeddings of the encoders, where these train as they
    were before. Both ridges also for each partner where one or more columns have few values (four antibodies against
    thousands of variants, `partners.find_partner`). Penalties and the number of neighbours are chosen on
    `splits["validation"]`.

    Args:
        trainer: a `FastTrainer` whose model is trained.
        splits: map-style train, validation and test.
        name: of the split to predict.
        group_column: or None.
        ridge: on the embeddings, from `stacking.fit_ridge`, which is not fitted again then.

    Cost: ridges see 50,000 training rows and 2,048 features of the sequences at most: 10 s on two cores; neighbours
    are looked for among 2e8 pairs of rows at most: 6 s. Embeddings of frozen encoders are encoded where they are not
    cached. Of encoders that trained, the pretrained ones encode 5,000 training rows, 2,000 validation rows and the
    split: less than a pass over these rows in training.
    """
    train, asked = splits["train"], splits[name]
    labels = label_array(train)
    mean, baselines = float(labels.mean()), Baselines()
    baselines.add(CONSTANT, np.full(len(asked), mean), num_rows=len(train), kind="constant", mean=mean)
    if group_column and all(group_column in column_names(split) for split in (train, asked)):
        predicted, num_groups = predict_group_means(labels, train[group_column][:], asked[group_column][:])
        facts = {"num_rows": len(train), "kind": "group means", "mean": mean, "num_groups": num_groups}
        baselines.add(f"mean by {group_column}", predicted, **facts)
    columns, seed = sequence_columns(trainer), trainer.args.seed
    sampled = (sample_rows(train, seed), splits["validation"], asked)
    parts = [_Rows.of(split, columns) for split in sampled]
    rows = {"num_rows": len(parts[0].labels), "of_rows": len(train)}
    partner, why = find_partner(parts[0].sequences)
    if why:
        baselines.notes.append(f"No baseline by partner was fitted: {why}.")
    _add_sequence_baselines(baselines, parts, columns, rows, partner, seed)
    _add_embedding_ridges(baselines, trainer, parts, columns, rows, ridge)
    return baselines


def sample_rows(rows: Any, seed: int, num_rows: int | None = None) -> Any:
    """At most `num_rows` of a map-style split, drawn by `seed`, in their order; None: as many as a ridge sees."""
    chosen = draw_rows(len(rows), seed, RIDGE_ROWS if num_rows is None else num_rows)
    return rows if len(chosen) == len(rows) else rows.select(chosen)


def sequence_columns(trainer: Any) -> list[str]:
    """The columns that the model reads, each once."""
    return list(dict.fromkeys(column for parts in trainer.data_collator.columns.values() for column in parts))


def label_array(split: Any) -> FloatArray:
    """Labels of a map-style split, (n,) float64."""
    return np.asarray(split["label"][:], np.float64)


def read_bounds(rows: Any) -> NDArray[np.int64] | None:
    """Of each row -1 (the truth is at or below its label), 1 (at or above) or 0 (exact), (n,); None without bounds."""
    if not hasattr(rows, "__len__") or "bound" not in column_names(rows):
        return None
    return np.asarray(rows["bound"][:], np.int64)


def pooled_features(trainer: Any, dataset: Any, encode: Encode | None = None) -> np.ndarray:
    """The embeddings that the head sees, one row per row of `dataset`: (n, sum of widths), float32.

    Where a row lacks an input, what the head puts there: once it is known, the mean of the training rows that have it.

    `encode` makes them, of the name of an input and distinct sequences; None: the model's own encoders.

    Cost: with the embedding cache a look-up; otherwise each distinct sequence is encoded once.
    """
    blocks, collator, widths = [], trainer.data_collator, trainer.model.embedding_sizes
    for name in widths:
        is_optional = name in collator.optional_inputs
        numbers, inputs = factorize(read_columns(dataset, collator.columns[name]), is_optional)
        found = [join_parts(parts) for parts in inputs]
        distinct = sorted(found, key=lambda sequence: (len(sequence), sequence))
        values = (encode or trainer.encode_distinct)(name, distinct)
        position = {sequence: i for i, sequence in enumerate(distinct)}
        moved = torch.tensor([*(position[sequence] for sequence in found), -1])[torch.from_numpy(numbers)]
        block = take_rows(values, moved)
        if is_optional:
            block[moved < 0] = trainer.model.fill_of(name).to(block)
        blocks.append(block.numpy())
    return np.concatenate(blocks, axis=1)


def lacks_inputs(trainer: Any, dataset: Any) -> dict[str, np.ndarray]:
    """Of each input that rows may lack, which rows of a map-style `dataset` do: (n,) bool."""
    collator = trainer.data_collator
    return {
        name: factorize(read_columns(dataset, collator.columns[name]), True)[0] < 0
        for name in trainer.model.embedding_sizes
        if name in collator.optional_inputs
    }


def _add_sequence_baselines(
    baselines: Baselines,
    parts: list[_Rows],
    columns: list[str],
    rows: dict[str, int],
    partner: Partner | None,
    seed: int,
) -> None:
    if not any(len(set(column)) > 1 for column in parts[0].sequences):
        return
    features = SequenceFeatures(parts[0].sequences, [part.sequences for part in parts[1:]])
    if not features.num_features:  # columns that vary, but whose 3-mers do not
        return
    matrices = [features.transform(part.sequences) for part in parts]
    ridge = RidgeBaseline(standardize=False)
    ridge.fit(matrices[0], parts[0].labels, matrices[1], parts[1].labels)
    pooled = ridge.predict(matrices[2])
    baselines.add(f"{features.name} ridge", pooled, **rows, **ridge.summary(), of_features=features.num_counts)
    if partner is not None:
        chosen = [[part.sequences[i] for i in partner.main] for part in parts]
        of_main = SequenceFeatures(chosen[0], chosen[1:])
        if of_main.num_features:
            matrices = [of_main.transform(sequences) for sequences in chosen]
            name = f"{of_main.name} ridge per {_partner_name(partner, columns)}"
            known = parts[:2]
            labels, sequences = [part.labels for part in known], [part.sequences for part in known]
            ridges = fit_partner_ridges(partner, matrices[:2], labels, sequences, standardize=False)
            predicted = ridges.predict(matrices[2], parts[2].sequences, pooled)
            baselines.add(name, predicted, **rows, num_partners=partner.num_partners)
    _add_neighbours(baselines, features, parts, rows, seed)


def _add_neighbours(
    baselines: Baselines, features: SequenceFeatures, parts: list[_Rows], rows: dict[str, int], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    num_queries = min(len(parts[1].labels), TUNING_ROWS) + len(parts[2].labels)
    most = (max(1, MAX_PAIRS // num_queries), TUNING_ROWS, len(parts[2].labels))
    chosen = [np.sort(generator.permutation(len(part.labels))[:size]) for part, size in zip(parts, most)]
    labels = [part.labels[rows] for part, rows in zip(parts, chosen)]
    directions = [
        features.directions([[column[i] for i in rows] for column in part.sequences])
        for part, rows in zip(parts, chosen)
    ]
    predicted, facts = predict_nearest(directions[0], labels[0], directions[1], labels[1], directions[2])
    baselines.add("nearest neighbours", predicted, **{**rows, "num_rows": len(labels[0]), **facts})


def _add_embedding_ridges(
    baselines: Baselines,
    trainer: Any,
    parts: list[_Rows],
    columns: list[str],
    rows: dict[str, int],
    ridge: EmbeddingRidge | None,
) -> None:
    """Ridge on the embeddings of frozen encoders, and of those that trained as they were before."""
    encode: Encode = trainer.encode_distinct
    model, name = trainer.model, EMBEDDING_RIDGE
    if len(model.frozen_inputs) < len(model.embedding_sizes):
        sizes, seed = (PRETRAINED_ROWS, PRETRAINED_TUNING_ROWS), trainer.args.seed
        drawn = [sample_rows(part.split, seed, size) for part, size in zip(parts, sizes)]
        parts = [*(_Rows.of(split, columns) for split in drawn), parts[2]]
        rows = {**rows, "num_rows": len(parts[0].labels)}
        try:
            pretrained = PretrainedTowers(model, trainer.data_collator, torch.device(trainer.args.device))
            encode = _encode_as_before(trainer.encode_distinct, pretrained)
            features = [pooled_features(trainer, part.split, encode) for part in parts]
        except (ArgumentError, NotFiniteError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            baselines.notes.append(f"No {name} was fitted: the encoders before training cannot be used ({error}).")
            return
        baselines.notes.append("Ridge on embeddings reads the encoders as they were before training.")
    else:
        features = [pooled_features(trainer, part.split) for part in parts]
    if ridge is None:
        known = parts[:2]
        ridge = fit_embedding_ridge(features[:2], [part.labels for part in known], [part.sequences for part in known])
    pooled = ridge.pooled.predict(features[2])
    baselines.add(name, pooled, **rows, **ridge.pooled.summary())
    if ridge.by_partner is not None:
        partner, asked = ridge.by_partner.partner, parts[2].sequences
        predicted = ridge.by_partner.predict(features[2], asked, pooled)
        baselines.add(
            f"{PER_PARTNER}{_partner_name(partner, columns)}", predicted, **rows, num_partners=partner.num_partners
        )


def _encode_as_before(encode: Encode, pretrained: PretrainedTowers) -> Encode:
    """Frozen towers through the cache, the others as they were published."""
    return lambda name, sequences: (pretrained.encode_distinct if name in pretrained.names else encode)(name, sequences)


def _partner_name(partner: Partner, columns: Sequence[str]) -> str:
    return ", ".join(columns[i] for i in partner.columns)

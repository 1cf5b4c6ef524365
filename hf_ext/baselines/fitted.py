"""What a model has to beat on a split: constants, linear models and near rows, fitted on the training rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data import (
    FloatArray,
    NumberColumns,
    SequenceCollator,
    SequenceFeatures,
    Variants,
    draw_rows,
    label_array,
    read_columns,
)
from ..errors import ArgumentError, NotFiniteError
from ..labels import UNKNOWN, LabelKind
from ..startup import phase
from ..text import capitalize
from .by_kind import KernelBaseline, NearestBaseline, make_linear, predict_constant
from .embedded import Encode, encode_as_before, pooled_features
from .partners import find_partner, predict_by_partner
from .ridge import RidgeBaseline, predict_group_means

if TYPE_CHECKING:
    from ..trainer import FastTrainer

RIDGE_ROWS = 50_000  # of a split that a ridge sees at most
MAX_LABELS = 40_000_000  # of rows times labels of each
MAX_PRODUCTS = 5e11  # multiply-adds for near rows
# Where encoders train, embeddings of the pretrained ones are computed for the baselines alone.
PRETRAINED_ROWS = (5_000, 2_000)  # training and validation rows at most


@dataclass(frozen=True)
class _Rows:
    """Training rows or a sample of `of_rows`, validation rows, and those to be predicted, in this order.

    `sequences` by split, column and row; `labels` by split; `partner` of one number per row, if any.
    """

    splits: list[Any]
    columns: list[str]
    sequences: list[list[tuple[str, ...]]]
    labels: list[FloatArray]
    of_rows: int
    partner: Any

    @classmethod
    def read(cls, splits: list[Any], columns: list[str], of_rows: int, kind: LabelKind) -> _Rows:
        sequences = [[*zip(*read_columns(split, columns))] for split in splits]
        labels = [known_labels(split, kind) for split in splits]
        partner = find_partner(sequences[0]) if "partners" in kind.baselines else None
        return cls(splits, columns, sequences, labels, of_rows, partner)

    @property
    def facts(self) -> dict[str, int]:
        return {"num_rows": len(self.labels[0]), "of_rows": self.of_rows}


@dataclass
class Baselines:
    """Predictions by name of baseline, (n,) float64 in label units, or as scores of another kind of label take them;
    what each was fitted on, JSON-able; and sentences about those that could not be fitted."""

    predictions: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, predictions: Any, **facts: Any) -> None:
        """Adds a baseline; `facts`: what it was fitted on."""
        self.predictions[name] = predictions
        self.facts[name] = facts

    def add_fitted(
        self, name: str, model: Any, features: Sequence[Any], rows: _Rows, predict: Callable[[Any], Any], **facts: Any
    ) -> Any:
        """Adds a model, which it fits on features of training and validation; returns what `predict` makes of it."""
        model.fit(features[0], rows.labels[0], features[1], rows.labels[1])
        predicted = predict(model)
        self.add(name, predicted, **{**rows.facts, **model.summary(), **facts})
        return predicted

    def add_partners(
        self,
        name: str,
        features: Sequence[Any],
        rows: _Rows,
        pooled: Any,
        make: Callable[[], Any],
    ) -> None:
        """Adds a model for each partner: `features` of all rows, and `pooled` where a partner has none."""
        predicted = predict_by_partner(
            rows.partner,
            features,
            rows.labels[:2],
            rows.sequences,
            pooled,
            make,
        )
        columns = ", ".join(rows.columns[i] for i in rows.partner.columns)
        self.add(
            f"{name} per {columns}",
            predicted,
            **rows.facts,
            num_partners=rows.partner.num_partners,
        )

    def add_nearest(
        self, what: str, kind: LabelKind, features: Sequence[Any], rows: _Rows, predict: Callable[[Any], Any]
    ) -> None:
        """Adds the labels of near rows by features of training and validation, up to `MAX_PRODUCTS`, or says so."""
        products = NearestBaseline.count_products([*map(len, rows.labels)], features[0].shape[1])
        if products > MAX_PRODUCTS:
            self.notes.append(f"No nearest {what}: {products:.1g} multiply-adds, more than {MAX_PRODUCTS:g}.")
        else:
            self.add_fitted(f"nearest {what}", NearestBaseline(kind), features, rows, predict)


@phase("baselines")
def fit_baselines(trainer: FastTrainer, splits: Any, name: str, group_column: str | None) -> Baselines:
    """Fits on `splits["train"]` what needs no neural network, and predicts split `name` with it.

    The training mean; the mean by `group_column`; ridge on residues by position or on 3-mers of all sequence columns;
    ridge on the embeddings of the encoders, where these train as they were before. Both ridges also for each partner
    where one or more columns have few values (four antibodies against thousands of variants, `partners.find_partner`).
    Penalties are chosen on `splits["validation"]`. Of classes frequencies take the place of the mean, and logistic
    regression that of ridge; of all labels but one number there are the rows with the nearest residues, too, and labels
    of residues have baselines of their own (`residue_baselines`). Columns beside sequences have a ridge of their own;
    that on embeddings reads them, too. Of variants of one protein there is one on what they substitute, and of numbers
    the zero-shot scores of an encoder with a masked head, scaled to the labels.

    Args:
        trainer: a `FastTrainer` whose model is trained.
        splits: map-style train, validation and test.
        name: of the split to predict.
        group_column: or None.

    Cost: ridges see 50,000 training and validation rows and 2,048 features of the sequences at most: 10 s on two cores.
    Embeddings of frozen encoders are encoded where they are not cached. Of encoders that trained, the pretrained ones
    encode 5,000 training rows, 2,000 validation rows and the split: less than a pass over these rows in training.
    """
    asked = splits[name]
    seed = trainer.args.seed
    kind = trainer.model.config.kind
    most = MAX_LABELS // math.prod(kind.label_shape)
    train = sample_rows(splits["train"], seed, most)
    labels = known_labels(train, kind)
    baselines = Baselines()
    facts = {"num_rows": len(train), **kind.constant_facts(labels)}
    baselines.add(
        kind.constant_name,
        predict_constant(kind, labels, len(asked)),
        kind="constant",
        **facts,
    )
    if group_column and "groups" in kind.baselines:
        predicted, num_groups = predict_group_means(labels, train[group_column][:], asked[group_column][:])
        baselines.add(
            f"mean by {group_column}",
            predicted,
            kind="group means",
            num_groups=num_groups,
            **facts,
        )
    known = [sample_rows(splits[each], seed, min(RIDGE_ROWS, most)) for each in ("train", "validation")]
    rows = _Rows.read([*known, asked], columns_of(trainer.data_collator), len(splits["train"]), kind)
    _add_sequence_ridges(baselines, kind, rows)
    if trainer.data_collator.variants.column:
        _add_substitutions(baselines, kind, rows, trainer.data_collator.variants)
    if numbers := trainer.data_collator.numbers:
        _add_number_ridge(baselines, kind, rows, numbers)
    _add_embedding_ridges(baselines, trainer, rows)
    return baselines


def known_labels(rows: Any, kind: LabelKind) -> FloatArray:
    """Returns labels of a map-style split, (n,) or (n, k) float64; NaN where one of several is not known."""
    labels = label_array(rows, kind)
    return labels if labels.ndim == 1 else np.where(labels == UNKNOWN, np.nan, labels)


def sample_rows(rows: Any, seed: int, num_rows: int = RIDGE_ROWS) -> Any:
    """Draws at most `num_rows` of a map-style split by `seed`, in their order."""
    chosen = draw_rows(len(rows), seed, num_rows)
    return rows if len(chosen) == len(rows) else rows.select(chosen)


def columns_of(collator: SequenceCollator) -> list[str]:
    """Names of the columns that a model reads, in its order."""
    return [column for parts in collator.columns.values() for column in parts]


def _add_sequence_ridges(baselines: Baselines, kind: LabelKind, rows: _Rows) -> None:
    if not any(len(set(column)) > 1 for column in rows.sequences[0]):
        return
    features = SequenceFeatures(rows.sequences[0], rows.sequences[1:])
    if not features.num_features:  # columns that vary, but whose 3-mers do not
        return
    fitted = [features.transform(sequences) for sequences in rows.sequences[:2]]
    predict = partial(features.predict, columns=rows.sequences[2])
    make = partial(make_linear, kind, standardize=False)
    read = {"num_features": features.num_features, "of_features": features.num_counts}
    pooled = baselines.add_fitted(f"{features.name} {kind.linear_name}", make(), fitted, rows, predict, **read)
    if "nearest" in kind.baselines:
        baselines.add_nearest(features.name, kind, fitted, rows, predict)
    if "kernel" in kind.baselines:
        baselines.add_fitted(f"{features.name} kernel ridge", KernelBaseline(), fitted, rows, predict)
    if rows.partner is not None:
        chosen = [[sequences[i] for i in rows.partner.main] for sequences in rows.sequences]
        of_main = SequenceFeatures(chosen[0], chosen[1:])
        if of_main.num_features:
            main = [of_main.transform(sequences) for sequences in chosen]
            baselines.add_partners(f"{of_main.name} ridge", main, rows, pooled, make)


def _add_substitutions(
    baselines: Baselines,
    kind: LabelKind,
    rows: _Rows,
    variants: Variants,
) -> None:
    """Adds a linear model on what variants substitute, and of numbers their zero-shot scores, if there are some."""
    features = [variants.matrix(split) for split in rows.splits]
    linear = make_linear(kind, standardize=False)
    baselines.add_fitted(
        f"{kind.linear_name} on substitutions", linear, features, rows, methodcaller("predict", features[2])
    )
    if variants.table is not None:
        baselines.notes.append(f"{capitalize(kind.linear_name)} on substitutions reads zero-shot scores, too.")
    if variants.table is not None and isinstance(linear, RidgeBaseline):
        # In the order that the encoder gives rows, whatever the labels say: these set mean and scale alone.
        known, wanted = (variants.scores(rows.splits[i])[:, 0].astype(np.float64) for i in (0, 2))
        scale = rows.labels[0].std() / max(known.std(), 1e-12)
        predicted = rows.labels[0].mean() + scale * (wanted - known.mean())
        baselines.add("zero-shot scores", predicted, **rows.facts, kind="zero-shot")


def _add_number_ridge(baselines: Baselines, kind: LabelKind, rows: _Rows, numbers: NumberColumns) -> None:
    features = [numbers.matrix(split) for split in rows.splits]
    name = f"{kind.linear_name} on columns alone"
    baselines.add_fitted(name, make_linear(kind), features, rows, methodcaller("predict", features[2]))
    baselines.notes.append(f"{capitalize(kind.linear_name)} on embeddings reads {', '.join(numbers.columns)}, too.")


def _add_embedding_ridges(baselines: Baselines, trainer: FastTrainer, rows: _Rows) -> None:
    """Adds ridges on the embeddings of frozen encoders, and of those that trained as they were before."""
    model = trainer.model
    encode: Encode = trainer.encode_distinct
    kind = model.config.kind
    name = f"{kind.linear_name} on embeddings"
    is_trained = len(model.frozen_inputs) < len(model.embedding_sizes)
    if is_trained:
        drawn = [sample_rows(split, trainer.args.seed, most) for split, most in zip(rows.splits, PRETRAINED_ROWS)]
        rows = _Rows.read([*drawn, rows.splits[2]], rows.columns, rows.of_rows, kind)
    try:
        if is_trained:
            encode = encode_as_before(trainer, rows.splits[0])
        features = [pooled_features(trainer, split, encode) for split in rows.splits]
    except (
        ArgumentError,
        NotFiniteError,
        OSError,
        MemoryError,
        torch.OutOfMemoryError,
    ) as error:
        if not is_trained:
            raise
        baselines.notes.append(f"No {name} was fitted: the encoders before training cannot be used ({error}).")
        return
    if is_trained:
        baselines.notes.append(f"{capitalize(name)} reads the encoders as they were before training.")
    predict = methodcaller("predict", features[2])
    pooled = baselines.add_fitted(name, make_linear(kind), features, rows, predict)
    if "nearest" in kind.baselines:
        baselines.add_nearest("embeddings", kind, features, rows, predict)
    if "kernel" in kind.baselines:
        baselines.add_fitted("kernel ridge on embeddings", KernelBaseline(), features, rows, predict)
    if rows.partner is not None:
        baselines.add_partners(name, features, rows, pooled, partial(make_linear, kind))
        if (nearest := baselines.predictions.get("nearest embeddings")) is not None:
            make_nearest = partial(NearestBaseline, kind)
            baselines.add_partners("nearest embeddings", features, rows, nearest, make_nearest)

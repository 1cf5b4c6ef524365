"""Scores that can be believed: a verdict first, intervals, baselines beside them, and what is new to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..baselines import FITTERS, Baselines, columns_of
from ..data import DataArguments, read_bounds, read_column
from ..evaluation import (
    CONSTANT,
    MODEL,
    Requirement,
    ResamplingGroups,
    RowMetrics,
    Verdict,
    check_groups,
    collapse_report,
    group_facts,
    judge,
    judge_pair,
    metrics_of,
    parse_requirements,
    resample_metrics,
    rows_for,
    score_predictions,
    unpack_labelled,
    unpack_std,
)
from ..files import Facts, Json
from ..labels import Array, LabelKind, Number
from ..reporting import Leaks, Score, describe_repeated, fit_notes, from_json, resampled
from ..text import format_table, units
from .arguments import AffinityArguments
from .measure import scored_names, verdict_metric
from .rows import describe_groups, find_slices

if TYPE_CHECKING:
    from ..trainer import FastTrainer
    from ..training_args import FastTrainingArguments

Scores = dict[str, Json]  # by predictor, class or baseline

MAX_SHOWN = 6  # metrics on a screen
compute_metrics = RowMetrics()  # for `Trainer`, without a threshold and groups
LIMITS_NOTE = "The verdict's RMSE counts no error beyond a limit; in the tables a limit is taken for a value."
GROUP_NOTE = "--group_column: Spearman within groups is left out, which is for one number per row."
RANKING_NOTE = "The loss ranks rows: predictions have no unit, so RMSE, MAE, R2 and any threshold say nothing here."


def read_requirements(args: AffinityArguments, data_args: DataArguments, kind: LabelKind) -> list[Requirement]:
    """Reads `--require`, of the scores that a run of these arguments ends with.

    Raises:
        ArgumentError: see `parse_requirements`.
    """
    group_column = None if data_args.streaming else data_args.group_column
    return parse_requirements(args.require, scored_names(kind, args.binder_threshold, group_column is not None))


@dataclass
class SplitScores:
    """A split's predictions, and the scores of the model and of its baselines on it.

    Attributes:
        outputs, labels: (n, ...), as the model puts them out and batches hold them; numbers in label units.
        verdict: whether the model is worth more than the baselines.
        scores: predictor -> metric -> `Score`.
        classes: class or label -> its rows and scores, see `score_classes`.
        baselines: baseline -> what it was fitted on.
        collapse: of the model's predictions, see `collapse_report`.
        slices: scores on rows with something new to training: {"name", "num_rows", "scores"}.
        notes: sentences about what is new to the model in these rows, and what the scores do not say.
        groups: what the intervals resample; None: rows.
        kind: of the labels.
        predicted_by: baseline -> its predictions, (n,).
        tuned: of a model whose encoders trained, whether it is better than a ridge on what they gave before.
        stds: (n,) of the model's predictions, where it says so.
    """

    outputs: Array
    labels: Array
    verdict: Verdict
    scores: Scores = field(default_factory=dict)
    classes: Scores = field(default_factory=dict)
    baselines: Scores = field(default_factory=dict)
    collapse: Json = field(default_factory=dict)
    slices: list[Json] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    groups: ResamplingGroups | None = None
    kind: LabelKind = field(default_factory=Number)
    predicted_by: Mapping[str, Array] = field(default_factory=dict)
    tuned: Verdict | None = None
    stds: Array | None = None

    def to_dict(self) -> Json:
        """Returns what `all_results.json` holds of it."""
        return {
            "num_rows": len(self.labels),
            **group_facts(self.groups, len(self.labels)),
            "verdict": self.verdict.as_dict(),
            **{name: getattr(self, name) for name in ("scores", "classes", "baselines", "collapse", "slices", "notes")},
        }

    def table(self) -> str:
        """Formats the verdict and alarms, a row per predictor with value and interval per metric, slices, notes."""
        alarms = [f"ALARM: {alarm}" for alarm in self.collapse["alarms"]]
        parts = [self.verdict.text, *alarms, "", self._table_of(self.scores)]
        for one in self.slices:
            basis = resampled(from_json(Score, next(iter(one["scores"][MODEL].values()))), "")
            rows = f"{one['num_rows']:,}" + (f"; intervals resample {basis}" if basis else "")
            parts += ["", f"{units.capitalize(one['name'])} ({rows}):", self._table_of(one["scores"])]
        further = [units.metric_name(name) for name in self.scores[MODEL] if name not in self._shown]
        more = [f"In report.html as well: {', '.join(further)}."] if further else []
        return "\n".join([*parts, "", *fit_notes(self.baselines), *self.notes, *more])

    @property
    def _shown(self) -> Sequence[str]:
        """Metrics that a screen has room for."""
        return metrics_of(self.kind).shown(self.scores[MODEL])

    def _table_of(self, scores: Scores) -> str:
        rows = [[name, *(units.score(both.get(metric)) for metric in self._shown)] for name, both in scores.items()]
        return format_table(rows, ["", *map(units.metric_name, self._shown)])


def score_split(
    trainer: FastTrainer,
    splits: Any,
    name: str,
    threshold: float | None,
    group_column: str | None,
    *,
    leaks: Facts | None = None,
    groups: ResamplingGroups | None = None,
) -> SplitScores:
    """Predicts split `name` and scores the model and its baselines: on all rows, and on those new to training.

    Args:
        trainer: a `FastTrainer` whose model is trained.
        splits: train, validation and test; the baselines are fitted on train, ridges' penalties on validation.
        threshold: label units; None leaves the metrics of binders out.
        group_column: column for per-group Spearman and means by group, or None; streams go without.
        leaks: `leak_report` of the splits: the verdict names rows that stand in train.
        groups: rows that were held out together, from `find_groups`: intervals resample them; None: rows.

    Returns:
        `SplitScores`; streams have no slices, and no baseline but the mean of the labels that scaled the model.

    Cost: predictions; `fit_baselines`; 1,000 bootstrap resamples per predictor, for the verdict and for each slice:
    1.6 s each for 26,000 rows.
    """
    config = trainer.model.config
    rows = splits[name]
    kind = config.kind
    predicted = trainer.predict(rows, ignore_keys=[])
    outputs, labels = unpack_labelled(predicted, kind)
    if all(hasattr(splits[part], "__len__") for part in ("train", name)):
        baselines = FITTERS[kind.counted](trainer, splits, name, group_column)
        slices, notes = find_slices(splits["train"], rows, columns_of(trainer.data_collator))
    else:
        group_column = None
        slices = {}
        baselines = Baselines()
        if "stream" in kind.baselines:
            baselines.add(CONSTANT, np.full(len(labels), config.label_mean), kind="constant", mean=config.label_mean)
        notes = ["Training rows are a stream: no other baseline was fitted, and nothing says which test rows are new."]
    predictors = {MODEL: kind.to_predictions(outputs), **baselines.predictions}
    compared = Compared(predictors, labels, kind, threshold, trainer.args.seed, check_groups(groups, len(labels)))
    test = score_rows(
        compared,
        rows,
        trainer.args,
        group_column,
        leaks,
        slices,
        is_scale_free=config.loss == "ranking",
        has_trained=any(spec.training != "frozen" for spec in config.encoder_specs),
    )
    test.outputs = outputs
    test.baselines = baselines.facts
    test.notes += [*notes, *baselines.notes]
    test.stds = unpack_std(predicted)
    return test


def score_rows(
    compared: Compared,
    rows: Any,
    args: FastTrainingArguments,
    group_column: str | None,
    leaks: Facts | None,
    slices: Facts | None = None,
    is_scale_free: bool = False,
    has_trained: bool = False,
) -> SplitScores:
    """Scores what a model and baselines predict for rows, as `score_split` does.

    Args:
        compared: the predictions, of the model as `outputs`, too.
        rows: with bounds where labels have some.
        args: which metric decides.
        slices: from `find_slices`, scored apart.
        is_scale_free: the loss ranks rows. has_trained: some encoder did, which is compared with what it was.
    """
    kind = compared.kind
    metrics = metrics_of(kind, compared.threshold)
    predictors = compared.predictors
    predictions = predictors[MODEL]
    labels = compared.labels
    group_names = read_column(rows, group_column) if group_column and metrics.of_groups else None
    bounds = read_bounds(rows)
    asked = verdict_metric(args, RowMetrics(compared.threshold, kind=kind))
    metric = asked or ("spearman" if is_scale_free else "rmse")
    how = {"bounds": bounds, "metric": metric, **compared.options}
    scores = compared.score(group_names)  # before the verdict: all metrics of all predictors on one set of draws
    verdict = judge(labels, compared.rows, is_scale_free=is_scale_free, **how)
    linear = f"{kind.linear_name} on embeddings"
    tuned = None
    if has_trained and linear in predictors:
        tuned = judge_pair(labels, predictors[linear], predictions, names=(linear, "this model"), **how)
    if repeated := describe_repeated(from_json(Leaks, leaks)):
        verdict = replace(verdict, text=f"{verdict.text} But {repeated}")
    sliced = [compared.score_slice(*one) for one in (slices or {}).items()]
    order = metrics.orders or str(metric)
    said = {
        RANKING_NOTE: is_scale_free,
        GROUP_NOTE: group_column and group_names is None,
        LIMITS_NOTE: bounds is not None and np.any(bounds),
    }
    return SplitScores(
        predictions,
        labels,
        verdict,
        scores,
        metrics.score_classes(predictions, labels),
        collapse=collapse_report(predictions, labels, kind, is_scale_free),
        slices=sliced,
        notes=[
            *(note for note, is_true in said.items() if is_true),
            *(_compare_slice(one, scores, order) for one in sliced),
            *describe_groups(compared.groups),
        ],
        groups=compared.groups,
        kind=kind,
        predicted_by={name: one for name, one in predictors.items() if name != MODEL},
        tuned=tuned,
    )


@dataclass(frozen=True)
class Compared:
    """Predictions by name of predictor and the labels of the same rows, (n,) each, and how they are scored."""

    predictors: Mapping[str, Array]
    labels: Array
    kind: LabelKind
    threshold: float | None
    seed: int
    groups: ResamplingGroups | None = None

    @property
    def options(self) -> dict[str, Any]:
        """How they are scored, as functions of `hf_ext.evaluation` take it."""
        return {"kind": self.kind, "threshold": self.threshold, "seed": self.seed, "groups": self.groups}

    @cached_property
    def rows(self) -> dict[str, Any]:
        """What is scored and judged of each predictor: what was measured on resamples stays with it."""
        return {name: rows_for(self.kind, one, self.labels, self.threshold) for name, one in self.predictors.items()}

    def score(self, group_names: Any = None) -> Scores:
        """Scores of each predictor; without metrics of binders where there is no threshold."""
        drawn = metrics_of(self.kind, self.threshold).drawn
        resample_metrics([*self.rows.values()], drawn, seed=self.seed, groups=self.groups)
        return {
            name: score_predictions(rows, self.labels, group_names=group_names, **self.options)
            for name, rows in self.rows.items()
        }

    def score_slice(self, name: str, rows: Array) -> Json:
        """Scores of some of the rows, (n,) bool."""
        parts = {one: predicted[rows] for one, predicted in self.predictors.items()}
        part = replace(
            self, predictors=parts, labels=self.labels[rows], groups=self.groups and self.groups.select(rows)
        )
        return {"name": name, "num_rows": int(rows.sum()), "scores": part.score()}


def _compare_slice(chosen: Facts, scores: Facts, metric: str) -> str:
    """Writes the sentence with which a random split and new antibodies are told apart."""
    everywhere = scores[MODEL][metric]
    there = chosen["scores"][MODEL][metric]
    whole, part = (units.score({"value": one["value"]}) for one in (everywhere, there))
    name = units.metric_name(metric)
    return f"{name} {whole} on all {everywhere['n']:,} rows, {part} on the {there['n']:,} {chosen['name']}."

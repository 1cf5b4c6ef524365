"""The report of any other model: its held-out score beside a trivial baseline."""

from __future__ import annotations

from ... import units
from ...units import metric_name
from ..blocks import Block, KeyNumber, Paragraph, Table
from ..values import as_dict
from .base import TaskReport


class AnyModelReport(TaskReport):
    row_word = "rows"

    def title(self) -> str:
        """Its class."""
        return str(as_dict(self.run.results.get("model")).get("class") or "A model")

    def score_numbers(self) -> list[KeyNumber]:
        scores = self._scores()
        baselines = [name for name in scores if name != "model"]
        numbers = []
        for metric, score in as_dict(scores.get("model")).items():
            beside = [f"{name}: {_value(as_dict(scores[name]).get(metric))}" for name in baselines]
            numbers.append(KeyNumber(f"{metric_name(metric)} on test", _value(score), ", ".join(beside)))
        return numbers or [KeyNumber("test score", units.NOT_MEASURED, "no split was scored")]

    def result_blocks(self) -> list[Block]:
        scores = self._scores()
        metrics = list(as_dict(scores.get("model")))
        if not metrics:
            return [Paragraph("Not measured: the run has no scores of a test split.")]
        rows: list[list[object]] = [
            [name, *(_value(as_dict(entry).get(metric)) for metric in metrics)] for name, entry in scores.items()
        ]
        return [Table(["predictor", *map(metric_name, metrics)], rows)]

    def _scores(self) -> dict:
        return as_dict(as_dict(self.run.results.get("test")).get("scores"))


def _value(score: object) -> str:
    return units.number(as_dict(score).get("value"))

"""The report of a masked language model: perplexity and accuracy beside residue frequencies."""

from __future__ import annotations

from ... import units
from ...near_copies import describe_near_copies
from ...units import metric_name
from ..blocks import Block, Bullets, KeyNumber, Paragraph, Table
from ..columns import join_words, list_columns
from ..values import as_dict
from .base import TaskReport, describe_start

MEANING = (
    "Loss in nats per masked residue, perplexity is its exponential. The unigram predicts from how often residues "
    "occur in training, whatever stands around them; a model that is no better has learned nothing about order."
)


class MaskedLMReport(TaskReport):
    def title(self) -> str:
        """Of which sequences."""
        columns = list_columns(self.run)
        return "Masked language model" + (f" of {join_words(columns)}" if columns else "")

    def start(self) -> str:
        return describe_start(self.run)

    def score_numbers(self) -> list[KeyNumber]:
        results = self.run.results
        split = next((name for name in ("test", "validation") if as_dict(results.get(name)).get("model")), None)
        if split is None:
            return [KeyNumber("perplexity", units.NOT_MEASURED, "no split was scored")]
        model, unigram = (as_dict(results[split].get(name)) for name in ("model", "unigram"))
        return [
            KeyNumber(
                f"{metric} on {split}",
                show(model.get(metric)),
                f"residue frequencies: {show(unigram.get(metric))}",
            )
            for metric, show in (("perplexity", units.number), ("accuracy", units.share))
        ]

    def result_blocks(self) -> list[Block]:
        metrics = ("token_loss", "perplexity", "accuracy", "num_tokens")
        rows = [
            [f"{split}, {name}", *(units.number(as_dict(entry).get(metric)) for metric in metrics)]
            for split in ("validation", "test")
            for name, entry in as_dict(self.run.results.get(split)).items()
            if isinstance(entry, dict) and "token_loss" in entry
        ]
        if not rows:
            return [Paragraph("Not measured: the run has no scores of a validation or test split.")]
        near = describe_near_copies(as_dict(as_dict(self.run.results.get("data")).get("leaks")))
        table = Table(["split, predictor", *map(metric_name, metrics[:3]), "masked residues"], rows)
        return [table, *([Bullets(near)] if near else []), Paragraph(MEANING)]

"""The report of an operator: nRMSE of each equation beside the best trivial prediction, and what was generated."""

from __future__ import annotations

from typing import Any

from ... import units
from ...units import metric_name
from ..blocks import Block, Bullets, Code, Fold, KeyNumber, Paragraph, Table
from ..columns import join_words
from ..run_files import RunFiles
from ..scores import best_baseline, score_notes, score_table
from ..values import as_dict
from .base import TaskReport, describe_start

MEANING = (
    "nRMSE of a row is the L2 of its error over the L2 of its solution. Scores are means over rows, and nRMSE without "
    "an equation is the mean over equations too; less is better."
)
SILENT = "A dash: the prediction says nothing of that equation."


class OperatorReport(TaskReport):
    pads = False
    row_word = "rows"

    def title(self) -> str:
        """Of which equations."""
        names = list_equations(self.run)
        return f"Operator for {join_words(names)}" if names else "Operator for partial differential equations"

    def start(self) -> str:
        return describe_start(self.run) + describe_terms(self.run)

    def score_numbers(self) -> list[KeyNumber]:
        test = as_dict(self.run.results.get("test"))
        model, factors = as_dict(as_dict(test.get("scores")).get("model")), as_dict(test.get("factors"))
        numbers = []
        for name in list_equations(self.run):
            metric = f"{name}_nrmse"
            if metric not in model:
                continue
            best = best_baseline(test, metric)
            note = f"best trivial prediction: {units.number(best[1]['value'])}, {best[0]}" if best else ""
            if best and units.is_finite(factors.get(name)):
                note += f", {units.factor(factors[name])} the model's"
            label, value = f"{metric_name(metric)} on test", units.score(model[metric])
            numbers.append(KeyNumber(label, value, note or "no trivial prediction to compare with"))
        return numbers or [KeyNumber("nRMSE on test", units.NOT_MEASURED, "no test split was scored")]

    def result_blocks(self) -> list[Block]:
        blocks = _scores_of(self.run, "test")
        if not blocks:
            return [Paragraph("Not measured: the run has no scores of a test split.")]
        validation = _scores_of(self.run, "validation")
        return [*blocks, *([Fold("Scores on the validation split", validation)] if validation else [])]

    def data_blocks(self) -> list[Block]:
        data = as_dict(self.run.results.get("data"))
        if not data:
            return []
        facts = [["source", str(data.get("source"))], *([n, units.number(data.get(n))] for n in ("resolution", "seed"))]
        blocks: list[Block] = [Table(["", ""], facts)]
        equations = [[Code(name), str(text)] for name, text in as_dict(data.get("tasks")).items()]
        if equations:
            blocks.append(Table(["equation", "what was generated"], equations))
        sizes = [[name, units.number(size)] for name, size in as_dict(data.get("sizes")).items()]
        if sizes:
            caption = "Samples of each equation. All splits are drawn from one distribution."
            blocks.append(Table(["split", "samples"], sizes, caption))
        return blocks


def list_equations(run: RunFiles) -> list[str]:
    """Names of the tasks that one operator was trained on."""
    return list(as_dict(as_dict(run.results.get("data")).get("tasks"))) or list(run.settings.get("tasks") or [])


def describe_terms(run: RunFiles) -> str:
    """What the loss has beside the data: a sentence; nothing where it has no more, or that was not recorded."""
    terms = [
        _describe_term(run, "inverse losses", "inverse_loss_every", "inverse_loss_weight"),
        _describe_term(run, "physics priors", "physics_every", "physics_weight"),
    ]
    found = [term for term in terms if term]
    return f" Beside the data, its loss had {join_words(found)}." if found else ""


def _describe_term(run: RunFiles, name: str, every: str, weight: str) -> str:
    steps, share = run.settings.get(every), run.settings.get(weight)
    if not (units.is_finite(steps) and units.is_finite(share) and steps and share):
        return ""
    return f"{name} (weight {share:g}) in {'every step' if steps == 1 else f'one of {steps} steps'}"


def _scores_of(run: RunFiles, split: str) -> list[Block]:
    """Table and notes of a split; nothing where it was not scored."""
    found = as_dict(run.results.get(split))
    scores = as_dict(found.get("scores"))
    if not scores:
        return []
    table = score_table(scores, f"Rows of {split}: {units.number(found.get('num_rows'))}.", absent=units.MISSING)
    notes = [MEANING, *([SILENT] if has_silent(scores) else []), *score_notes(scores)]
    factors = describe_factors(found)
    return [table, *([Paragraph(factors)] if factors else []), Bullets(notes, is_note=True)]


def has_silent(scores: dict[str, Any]) -> bool:
    """Whether a predictor lacks a metric that another has."""
    return len({frozenset(as_dict(both)) for both in scores.values()}) > 1


def describe_factors(split: dict[str, Any]) -> str:
    """How far the model is below the best trivial prediction of each equation; nothing where nobody compared."""
    factors = as_dict(split.get("factors"))
    listed = [f"{name} {units.factor(value)}" for name, value in factors.items() if units.is_finite(value)]
    return f"Error of the best trivial prediction over the model's: {join_words(listed)}." if listed else ""

"""The card of an operator: which equations, on which grid, and how little that says of any other."""

from __future__ import annotations

from typing import Any

from ... import units
from ...markdown import code, plain, plain_line
from ...report.columns import join_words
from ...report.tasks.pde_operator import (
    MEANING,
    SILENT,
    describe_factors,
    describe_terms,
    has_silent,
    list_equations,
)
from ...report.values import as_dict
from ..facts import GENERATED, named_base
from ..score_lines import note_lines, undefined_lines
from .base import TaskCard


class OperatorCard(TaskCard):
    tags = ("pde", "neural-operator")
    index_task = ("regression", "Solutions of partial differential equations")
    not_about = "no other equation, and no claim about a real flow"
    absent = units.MISSING

    @property
    def _data(self) -> dict[str, Any]:
        return as_dict(self.run.results.get("data"))

    def description(self) -> list[str]:
        kind = plain(as_dict(self.run.results.get("model")).get("class", "class not recorded"))
        names = list_equations(self.run)
        equations = join_words([code(name) for name in names]) or "equations that were not recorded"
        texts = as_dict(self._data.get("tasks"))
        listed = [f"- {code(name)}: {plain(text)}" for name, text in texts.items()]
        return [
            f"An operator Transformer ({kind}): one model that predicts solutions of {equations} on a grid.",
            *(["", *listed, ""] if listed else []),
            *([plain(describe_terms(self.run))] if describe_terms(self.run) else []),
        ]

    def subject(self) -> str:
        names = [code(name) for name in list_equations(self.run)]
        return f"{join_words(names) or 'its equations'} as they were generated for training"

    def bases(self) -> list[dict[str, Any]]:
        return [{**base, "inputs": [[name] for name in list_equations(self.run)]} for base in named_base(self.run)]

    def loading_code(self, repo: str) -> list[str]:
        size = self._resolution()
        inputs = [f'"{name}_inputs": {_example(name, size)}' for name in list_equations(self.run)]
        return [
            "import torch",
            "from hf_ext.pde.model import OperatorTransformer",
            "",
            f'model = OperatorTransformer.from_pretrained("{repo}")',
            f"inputs = {{{', '.join(inputs)}}}",
            "print(model(**inputs).logits)",
        ]

    def loading_notes(self, repo: str) -> list[str]:
        names, size = list_equations(self.run), self._resolution()
        order = join_words([code(name) for name in names]) + (", in this order" if len(names) > 1 else "")
        return [
            f"`logits` (B, {len(names)}, {size * size:,}) are the solutions of {order}, in the unit of the data, at "
            f"all points of a grid; `hf_ext.pde.tasks.TASKS[name].query_grid({size})` has their coordinates.",
            "",
        ]

    def score_notes(self) -> list[str]:
        split, scores = self.scored_split()
        found = as_dict(self.run.results.get(split))
        lines = [MEANING, *([SILENT] if has_silent(scores) else []), describe_factors(found)]
        return [*(f"- {plain_line(line)}" for line in lines if line), "", *undefined_lines(scores), *note_lines(found)]

    def dataset(self) -> tuple[str, str]:
        return GENERATED, f"Generated {join_words(list_equations(self.run)) or 'data'}"

    def data_section(self) -> list[str]:
        if not self._data:
            return []
        sizes = ", ".join(f"{name} {units.number(size)}" for name, size in as_dict(self._data.get("sizes")).items())
        resolution, seed = (units.number(self._data.get(name)) for name in ("resolution", "seed"))
        made = f"Generated for this run at resolution {resolution}, seed {seed}: nothing was measured."
        return ["## Data", "", made, *([f"Samples of each equation: {sizes}."] if sizes else []), ""]

    def limits(self) -> list[str]:
        """What generated data of one distribution and one grid cannot say."""
        size = self._data.get("resolution")
        grid = f"resolution {units.number(size)}" if size else "one resolution"
        return [
            "Trained and scored on generated samples of one distribution: with other coefficients, initial or boundary "
            "conditions, with noise, or further in time it is untested.",
            f"It was trained at {grid} and reads no other: another grid takes a new training.",
            "Its scores are means over samples, and one solution may be much worse; a solver can bound its error, this "
            "model cannot.",
        ]

    def _resolution(self) -> int:
        found = self._data.get("resolution", self.run.settings.get("resolution"))
        return found if isinstance(found, int) and found > 0 else 32


def _example(name: str, resolution: int) -> str:
    """Made-up inputs of one sample: an initial state on r * r / 4 points; a field, as of Darcy flow, on r x r cells."""
    if name == "advection1d":
        return f"torch.rand(1, {resolution**2 // 4})"
    return f"torch.full((1, {resolution}, {resolution}), 3.0)"

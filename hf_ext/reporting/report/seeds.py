"""What runs of several seeds say, and runs that learned from a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import units
from ..units import metric_name
from .blocks import Block, Bullets, Paragraph, Table
from .run_files import RunFiles
from .values import as_dict, hide_folders


def seed_blocks(run: RunFiles) -> list[Block]:
    """Mean and spread over seeds, the score of their mean prediction, and whether their spread warns."""
    seeds = as_dict(run.results.get("seeds"))
    if not seeds:
        return []
    ensemble = as_dict(seeds.get("ensemble"))
    rows = [
        [
            metric_name(metric),
            _mean_text(entry),
            units.score(as_dict(ensemble.get(metric))),
            ", ".join(units.score({"value": value}) for value in entry.get("values") or []),
        ]
        for metric, entry in ((name, as_dict(entry)) for name, entry in as_dict(seeds.get("scores")).items())
    ]
    listed = ", ".join(str(seed) for seed in seeds.get("seeds") or [])
    number = units.number(seeds.get("num_seeds"))
    caption = f"{number} heads that differ in their seed ({listed}), on the same test rows."
    table = Table(["metric", "one head: mean +- deviation", "their mean, this model", "each head"], rows, caption)
    rank = units.score(as_dict(as_dict(seeds.get("uncertainty")).get("spearman_of_error")))
    notes = [f"Spearman of the spread between seeds and the error of a row: {rank}.", str(seeds.get("meaning") or "")]
    return [table, Bullets([note for note in notes if note])]


def first_seed_blocks(run: RunFiles) -> list[Block]:
    """Of which of several runs the curves are."""
    seeds = as_dict(run.results.get("seeds")).get("seeds") or []
    if not seeds:
        return []
    text = f"{len(seeds)} heads: steps, scores on validation and curves here are those of the first, seed {seeds[0]}."
    return [Paragraph(text)]


def _mean_text(entry: Mapping[str, Any]) -> str:
    if entry.get("mean") is None:
        return "undefined"
    return f"{units.score({'value': entry['mean']})} +- {units.score({'value': entry.get('std')})}"


def teacher_blocks(run: RunFiles) -> list[Block]:
    """What a distilled model learned from, and how it compares with its teacher."""
    facts = as_dict(run.results.get("distillation"))
    if not facts:
        return []
    spearman = as_dict(facts.get("spearman"))
    rows = [
        ["teacher", hide_folders(str(facts.get("teacher")))],
        ["share of the teacher in a label", units.number(facts.get("alpha"))],
        ["further rows, labelled by the teacher alone", units.number(facts.get("num_further_rows"))],
        ["Spearman of the student on test", units.score({"value": spearman.get("student")})],
        ["Spearman of the teacher on test", units.score({"value": spearman.get("teacher")})],
        ["parameters, teacher to student", units.number(facts.get("size_ratio"))],
    ]
    held_out = facts.get("held_out")
    return [Table(["", ""], rows, "Learned from a teacher."), *([Bullets([str(held_out)])] if held_out else [])]

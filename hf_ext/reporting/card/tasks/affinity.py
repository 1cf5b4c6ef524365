"""The card of a model that predicts a label of protein sequences."""

from __future__ import annotations

import json
from typing import Any

from ... import units
from ...markdown import code, plain
from ...report.columns import label_name
from ...report.run_files import RunFiles
from ...report.values import as_dict
from ...units import is_finite, share
from ..facts import sequence_columns
from ..score_lines import note_lines, render_scores, undefined_lines
from .base import TaskCard

# Made up, of a usual composition; a user's own sequences never stand in a card.
EXAMPLES = ("EVQLVESGGGLVQPGGSLRLSCAAS", "DIQMTQSPSSLSASVGDRVTITCRAS", "MKTAYIAKQRQISFVKSHFSRQLEE")
_OF_SLICES = ("spearman", "rmse")


class AffinityCard(TaskCard):
    """Also of runs whose record names no task."""

    tags = ("biology", "protein", "protein-language-model", "regression")
    index_task = ("regression", "Regression on protein sequences")

    def description(self) -> list[str]:
        run = self.run
        label, columns = code(label_name(run)), ", ".join(map(code, sequence_columns(run)))
        loss = plain(as_dict(run.results.get("model")).get("loss", "not recorded"))
        what = f"the order of rows by {label}, not its values," if _ranks(run) else f"{label}, in that column's unit,"
        lines = [f"Predicts {what} from amino-acid sequences in {columns}. Loss: {loss}."]
        lacking = [*as_dict(as_dict(run.results.get("data")).get("missing_chains"))]
        if lacking:
            lines.append(f"It has learned to do without {' and '.join(map(code, lacking))}: such a cell may be empty.")
        return lines

    def subject(self) -> str:
        return f"predicting {code(label_name(self.run))} as it was measured in the training data"

    def loading_code(self, repo: str) -> list[str]:
        columns = sequence_columns(self.run)
        cells = [f'{json.dumps(name)}: "{EXAMPLES[i % len(EXAMPLES)]}"' for i, name in enumerate(columns)]
        return [
            "from hf_ext import AffinityPredictor",
            "",
            f'predictor = AffinityPredictor.from_pretrained("{repo}")',
            f"rows = [{{{', '.join(cells)}}}]",
            "print(predictor.predict(rows))",
        ]

    def loading_notes(self, repo: str) -> list[str]:
        label, columns = code(label_name(self.run)), sequence_columns(self.run)
        unit = f"higher for a higher {label}" if _ranks(self.run) else f"in the unit of {label}"
        named = f"the column{'s' if len(columns) > 1 else ''} " + ", ".join(map(code, columns))
        return [
            f"`predict` takes a list of dicts, a dict of lists, a `datasets.Dataset` or a pandas DataFrame with "
            f"{named}, and returns one number per row (float32, {unit}). It refuses sequences that "
            "hold anything but residues and names their rows.",
            "",
        ]

    def score_notes(self) -> list[str]:
        """What is undefined and why, scores within groups and of slices, and what seeds say."""
        split, scores = self.scored_split()
        found = as_dict(self.run.results.get(split))
        lines = [*undefined_lines(scores), *_groups(scores), *note_lines(found)]
        lines += _seeds(as_dict(self.run.results.get("seeds")))
        for part in found.get("slices") or []:
            shown = {name: _only(metrics) for name, metrics in as_dict(part.get("scores")).items()}
            lines += [
                f"### {plain(units.capitalize(str(part.get('name'))))} ({units.number(part.get('num_rows'))} rows)",
                "",
            ]
            lines += [render_scores(shown), "", *undefined_lines(shown)]
        return lines

    def limits(self) -> list[str]:
        """What labels can carry."""
        lines = []
        loss = as_dict(self.run.results.get("model")).get("loss")
        for split, audit in as_dict(self.run.results.get("labels")).items():
            censored = audit.get("censored_share")
            if censored:
                read = "which its loss reads as bounds" if loss in ("tobit", "ranking") else "taken as exact"
                lines.append(f"{share(censored)} of the {split} labels are bounds, {read}.")
            lines += [f"Labels of {split}: {plain(alarm)}" for alarm in audit.get("alarms") or []]
        train = as_dict(as_dict(self.run.results.get("labels")).get("train"))
        if is_finite(train.get("min")) and is_finite(train.get("max")):
            lines.append(
                f"Training labels go from {train['min']:g} to {train['max']:g}; a prediction outside that "
                "range is an extrapolation."
            )
        return lines

    def interval_limits(self) -> list[str]:
        split, _ = self.scored_split()
        if as_dict(self.run.results.get(split)).get("interval_by"):  # they resample what was held out together
            return []
        return [
            "The intervals treat rows as independent: where rows share an antibody or an antigen they are too narrow "
            "for a claim about new ones."
        ]


def _ranks(run: RunFiles) -> bool:
    """Whether the model learned an order only, so that its predictions have no unit."""
    return as_dict(run.results.get("model")).get("loss") == "ranking"


def _groups(scores: dict[str, Any]) -> list[str]:
    """The range over groups, without their names, which are the user's data."""
    groups = as_dict(as_dict(as_dict(scores.get("model")).get("per_group_spearman")).get("groups"))
    found = [group["value"] for group in groups.values() if group.get("value") is not None]
    if not found:
        return []
    return [
        f"Spearman's rho within single groups: {units.number(min(found))} to {units.number(max(found))} in "
        f"{len(found)} of {len(groups)} groups; in the others it is undefined.",
        "",
    ]


def _seeds(seeds: dict[str, Any]) -> list[str]:
    """What heads of several seeds say apart, and whether their spread says where they are wrong."""
    if not seeds.get("seeds"):
        return []
    lines = [
        f"The model predicts the mean of {len(seeds['seeds'])} heads (seeds {', '.join(map(str, seeds['seeds']))})."
    ]
    single = as_dict(as_dict(seeds.get("scores")).get("spearman"))
    if single.get("mean") is not None:
        lines.append(f"One head alone: Spearman's rho {single['mean']:.3f} +- {single['std']:.3f} over seeds.")
    if fit := as_dict(seeds.get("uncertainty")):
        lines.append(
            "Rank correlation of their spread, `predictor.predict_members(rows).std(1, ddof=1)`, and the error of a "
            f"test row: {units.score(fit.get('spearman_of_error'))}."
        )
    return [" ".join([*lines, plain(seeds.get("meaning") or "")]).strip(), ""]


def _only(metrics: Any) -> dict[str, Any]:
    found = as_dict(metrics)
    return {name: found[name] for name in _OF_SLICES if name in found} or found

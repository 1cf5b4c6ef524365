"""What report and card say of a model that predicts a label: scores, groups, heads, limits, how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..reporting import units
from ..reporting.page import PLACEHOLDER, Block, Code, Page, Table, Text
from ..reporting.run_files import as_dict, list_columns
from ..reporting.scores import index_scores, score_blocks, score_numbers, verdict_limits
from ..reporting.units import is_finite, join_words, share
from .ensemble import MEMBER_HEADERS, member_rows

# Made up, of a usual composition; a user's own sequences never stand in a card.
EXAMPLES = ("EVQLVESGGGLVQPGGSLRLSCAAS", "DIQMTQSPSSLSASVGDRVTITCRAS", "MKTAYIAKQRQISFVKSHFSRQLEE")
MAX_GROUPS = 300  # rows of a table


def describe(results: Mapping[str, Any]) -> Page:
    """The page of a run, from what its `all_results.json` holds."""
    settings, test = as_dict(results.get("settings")), as_dict(results.get("test"))
    label, columns = str(settings.get("label_column") or "label"), list_columns(results)
    model = as_dict(as_dict(test.get("scores")).get("model"))
    chosen_by = str(settings.get("metric_for_best_model")).removeprefix("eval_")
    return Page(
        title=f"Predicting {label} from {join_words(columns)}" if columns else f"Predicting {label}",
        summary=_summary(results, label, columns),
        numbers=score_numbers(test, dict.fromkeys(("spearman", "rmse", chosen_by))),
        results=[*score_blocks(test, as_dict(results.get("data")).get("leaks")), *_group_blocks(model)],
        training=_head_blocks(results),
        limits=[*verdict_limits(results), *_limits(results)],
        subject=f"predicting {label} as it was measured in the training data, and about nothing else: no safety, no "
        "function in a cell, no patient",
        loading=_loading(results, label, columns or ["sequence"]),
        bases=as_dict(results.get("model")).get("towers") or [],
        needs_bases=not settings.get("save_full"),
        scores=index_scores(model),
        tags=["biology", "protein", "protein-language-model", "regression"],
        library_name="hf_ext",
        task_type="regression",
        task_name="Regression on protein sequences",
    )


def _ranks(results: Mapping[str, Any]) -> bool:
    """Whether the model learned an order only, so that its predictions have no unit."""
    return as_dict(results.get("model")).get("loss") == "ranking"


def _summary(results: Mapping[str, Any], label: str, columns: list[str]) -> str:
    what = f"the order of rows by {label}, not its values," if _ranks(results) else f"{label}, in that column's unit,"
    text = f"Predicts {what} from amino-acid sequences in {join_words(columns or ['sequence'])}."
    if lacking := [*as_dict(as_dict(results.get("data")).get("missing_chains"))]:
        text += f" It has learned to do without {join_words(lacking)}: such a cell may be empty."
    return text


def _loading(results: Mapping[str, Any], label: str, columns: list[str]) -> list[Block]:
    cells = [f'{json.dumps(name)}: "{EXAMPLES[i % len(EXAMPLES)]}"' for i, name in enumerate(columns)]
    lines = [
        "from hf_ext import AffinityPredictor",
        "",
        f'predictor = AffinityPredictor.from_pretrained("{PLACEHOLDER}")',
        f"rows = [{{{', '.join(cells)}}}]",
        "print(predictor.predict(rows))",
    ]
    unit = f"higher for a higher {label}" if _ranks(results) else f"in the unit of {label}"
    return [
        Code("\n".join(lines), "python"),
        Text(
            "predict takes a list of dicts, a dict of lists, a datasets.Dataset or a pandas DataFrame with "
            f"{'these columns' if len(columns) > 1 else 'this column'}, and returns one number per row (float32, "
            f"{unit}). It refuses sequences that hold anything but residues and names their rows."
        ),
    ]


def _group_blocks(model: Mapping[str, Any]) -> list[Block]:
    """The range over groups, and each group under a lid: their names are the user's data, which a card has not."""
    groups = as_dict(as_dict(model.get("per_group_spearman")).get("groups"))
    found = [group["value"] for group in groups.values() if is_finite(group.get("value"))]
    if not groups:
        return []
    spread = f"{units.number(min(found))} to {units.number(max(found))}" if found else "undefined"
    text = f"Spearman's rho within single groups: {spread}, in {len(found)} of {len(groups)} groups."
    ordered = sorted(groups.items(), key=lambda item: (-(item[1].get("n") or 0), item[0]))[:MAX_GROUPS]
    rows = [
        [name, units.number(group.get("n")), units.score(group), group.get("undefined") or ""]
        for name, group in ordered
    ]
    cut = f"The {MAX_GROUPS} largest." if len(groups) > MAX_GROUPS else ""
    headers = ["group", "rows", "Spearman", "why undefined"]
    return [Text(text), Table(headers, rows, cut, fold=f"All {len(groups):,} groups")]


def _head_blocks(results: Mapping[str, Any]) -> list[Block]:
    """The heads that an ensemble weighed."""
    found = as_dict(results.get("ensemble"))
    if not found:
        return []
    used = sum(one["weight"] > 0 for one in found["members"])
    text = (
        f"Predictions are the weighted mean of {used} of {len(found['members'])} heads on the embeddings, chosen in "
        f"{units.seconds(found['seconds'])}. Steps, losses, best step and curves here "
        "are of the run's own network, from which --init_head_from starts; it does not predict."
    )
    caption = f"Error: RMSE on {found['num_held_out']:,} rows that a head was not fitted on, in that fold."
    return [Text(text), Table(MEMBER_HEADERS, member_rows(found), caption, fold="All heads")]


def _limits(results: Mapping[str, Any]) -> list[str]:
    """What labels and intervals can carry."""
    audits, lines = as_dict(results.get("labels")), []
    read = (
        "which its loss reads as bounds"
        if as_dict(results.get("model")).get("loss") in ("tobit", "ranking")
        else ("taken as exact")
    )
    for split, audit in audits.items():
        if audit.get("censored_share"):
            lines.append(f"{share(audit['censored_share'])} of the {split} labels are bounds, {read}.")
    low, high = (as_dict(audits.get("train")).get(end) for end in ("min", "max"))
    if is_finite(low) and is_finite(high):
        lines.append(
            f"Training labels go from {low:g} to {high:g}; a prediction outside that range is an extrapolation."
        )
    if not as_dict(results.get("test")).get("interval_by"):  # else they resample what was held out together
        lines.append(
            "The intervals treat rows as independent: where rows share an antibody or an antigen they are too narrow "
            "for a claim about new ones."
        )
    return lines

"""What report and card say of a model that predicts a label: scores, groups, heads, limits, how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..heads.ensemble import MEMBER_HEADERS, member_rows
from ..heads.layers import describe_layers
from ..labels import LabelKind, kind_from_state
from ..reporting.page import PLACEHOLDER, Block, Code, Page, Table, Text
from ..reporting.run_files import as_dict, label_name, list_columns
from ..reporting.scores import index_scores, score_blocks, score_numbers, verdict_limits
from ..text import units
from ..text.units import is_finite, join_words, share

# Made up, of a usual composition; a user's own sequences never stand in a card.
EXAMPLES = ("EVQLVESGGGLVQPGGSLRLSCAAS", "DIQMTQSPSSLSASVGDRVTITCRAS", "MKTAYIAKQRQISFVKSHFSRQLEE")
MAX_GROUPS, MAX_CLASSES = 300, 50  # rows of a table


def describe(results: Mapping[str, Any]) -> Page:
    """The page of a run, from what its `all_results.json` holds."""
    settings, test = as_dict(results.get("settings")), as_dict(results.get("test"))
    label, columns, kind = label_name(settings), list_columns(results), find_kind(results)
    model = as_dict(as_dict(test.get("scores")).get("model"))
    chosen_by = str(settings.get("metric_for_best_model")).removeprefix("eval_")
    decided_by = as_dict(as_dict(results.get("verdict")).get("comparison")).get("metric")
    first = kind.first_metrics(str(decided_by), [*model])
    return Page(
        title=f"Predicting {label} from {join_words(columns)}" if columns else f"Predicting {label}",
        summary=_summary(results, kind, label, columns),
        numbers=score_numbers(test, dict.fromkeys((*first, chosen_by))),
        results=[
            *score_blocks(test, as_dict(results.get("data")).get("leaks")),
            *_group_blocks(model),
            *_class_blocks(as_dict(test.get("classes"))),
        ],
        training=[*map(Text, describe_layers(as_dict(results.get("layer")))), *_head_blocks(results)],
        limits=[*verdict_limits(results), *_limits(results, kind)],
        subject=f"predicting {label} as it was measured in the training data, and about nothing else: no safety, no "
        "function in a cell, no patient",
        loading=_loading(results, kind, label, columns or ["sequence"]),
        bases=as_dict(results.get("model")).get("towers") or [],
        needs_bases=not settings.get("save_full"),
        scores=index_scores(model),
        tags=["biology", "protein", "protein-language-model", kind.hub_task],
        library_name="hf_ext",
        task_type=kind.hub_task,
        task_name=kind.hub_name,
    )


def find_kind(results: Mapping[str, Any]) -> LabelKind:
    """What a run's model predicts."""
    return kind_from_state(results.get("label_kind"))


def _ranks(results: Mapping[str, Any]) -> bool:
    """Whether the model learned an order only, so that its predictions have no unit."""
    return as_dict(results.get("model")).get("loss") == "ranking"


def _summary(results: Mapping[str, Any], kind: LabelKind, label: str, columns: list[str]) -> str:
    what = kind.describe_target(label, _ranks(results))
    text = f"Predicts {what} from amino-acid sequences in {join_words(columns or ['sequence'])}."
    if lacking := [*as_dict(as_dict(results.get("data")).get("missing_chains"))]:
        text += f" It has learned to do without {join_words(lacking)}: such a cell may be empty."
    return text


def _loading(results: Mapping[str, Any], kind: LabelKind, label: str, columns: list[str]) -> list[Block]:
    cells = [f'{json.dumps(name)}: "{EXAMPLES[i % len(EXAMPLES)]}"' for i, name in enumerate(columns)]
    lines = [
        "from hf_ext import AffinityPredictor",
        "",
        f'predictor = AffinityPredictor.from_pretrained("{PLACEHOLDER}")',
        f"rows = [{{{', '.join(cells)}}}]",
        "print(predictor.predict(rows))",
    ]
    unit = f"higher for a higher {label}" if _ranks(results) else f"in the unit of {label}"
    returned = kind.describe_returned(unit)
    return [
        Code("\n".join(lines), "python"),
        Text(
            "predict takes a list of dicts, a dict of lists, a datasets.Dataset or a pandas DataFrame with "
            f"{'these columns' if len(columns) > 1 else 'this column'}, and returns {returned}. It refuses sequences "
            "that hold anything but residues and names their rows."
        ),
    ]


def _class_blocks(classes: Mapping[str, Any]) -> list[Block]:
    """Each class's rows, precision, recall and F1, the largest first."""
    if not classes:
        return []
    ordered = sorted(classes.items(), key=lambda item: -item[1]["support"])[:MAX_CLASSES]
    names = ("support", "precision", "recall", "f1")
    rows = [[name, *(units.number(found[one]) for one in names)] for name, found in ordered]
    cut = f"The {MAX_CLASSES} largest." if len(classes) > MAX_CLASSES else ""
    return [Table(["class", *map(units.metric_name, names)], rows, cut, fold=f"All {len(classes):,} classes")]


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
    caption = (
        f"Error: {found['measure']} on {found['num_held_out']:,} rows that a head was not fitted on, in that fold."
    )
    return [Text(text), Table(MEMBER_HEADERS, member_rows(found), caption, fold="All heads")]


def _limits(results: Mapping[str, Any], kind: LabelKind) -> list[str]:
    """What labels and intervals can carry."""
    audits, lines = as_dict(results.get("labels")), kind.describe_limits()
    is_read = as_dict(results.get("model")).get("loss") in ("tobit", "ranking")
    read = "which its loss reads as bounds" if is_read else "taken as exact"
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

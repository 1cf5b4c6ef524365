"""What report and card say of a model that predicts a label: scores, groups, heads, limits, how to load it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..heads import MEMBER_HEADERS, describe_layers, member_rows
from ..labels import LabelKind
from ..models import LIKELIHOOD
from ..reporting import (
    PLACEHOLDER,
    Audit,
    Block,
    Code,
    Facts,
    Page,
    RunRecord,
    Score,
    SplitRecord,
    Table,
    Text,
    index_scores,
    score_blocks,
    score_numbers,
    verdict_limits,
)
from ..text import is_finite, join_words, share, units

# Made up, of a usual composition; a user's own sequences never stand in a card.
EXAMPLES = ("EVQLVESGGGLVQPGGSLRLSCAAS", "DIQMTQSPSSLSASVGDRVTITCRAS", "MKTAYIAKQRQISFVKSHFSRQLEE")
MAX_GROUPS = 300  # rows of a table
MAX_CLASSES = 50


def describe(run: RunRecord) -> Page:
    """Returns the page of a run, from what its `all_results.json` holds."""
    label = run.label_name
    columns = run.sequence_columns
    kind = run.kind
    decided_by = str(run.verdict.comparison.get("metric"))
    first = kind.first_metrics(decided_by, [*run.test.of_model])
    return Page(
        title=f"Predicting {label} from {join_words(columns)}" if columns else f"Predicting {label}",
        summary=_summary(run, kind, label, columns),
        numbers=[
            *score_numbers(run.test, dict.fromkeys((*first, run.chosen_by))),
            *_spread_numbers(run.own.get("repeats") or {}, first),
        ],
        results=[
            *_repeat_blocks(run.own.get("repeats")),
            *score_blocks(run.test, run.data.leaks),
            *_group_blocks(run.test),
            *_class_blocks(run.test.own.get("classes", {})),
        ],
        training=[*map(Text, describe_layers(run.own.get("layer", {}))), *_head_blocks(run.own.get("ensemble"))],
        limits=[*verdict_limits(run.verdict), *_limits(run, kind)],
        subject=f"predicting {label} as it was measured in the training data, and about nothing else: no safety, no "
        "function in a cell, no patient",
        loading=_loading(run, kind, label, columns or ["sequence"]),
        bases=run.model.own.get("towers") or (),
        needs_bases=not run.settings.get("save_full"),
        scores=index_scores(run.test),
        tags=["biology", "protein", "protein-language-model", kind.hub_task],
        library_name="hf_ext",
        task_type=kind.hub_task,
        task_name=kind.hub_name,
    )


def _ranks(run: RunRecord) -> bool:
    """Returns whether the model learned an order only, so that its predictions have no unit."""
    return run.model.own.get("loss") == "ranking"


def _summary(run: RunRecord, kind: LabelKind, label: str, columns: list[str]) -> str:
    what = kind.describe_target(label, _ranks(run))
    text = f"Predicts {what} from amino-acid sequences in {join_words(columns or ['sequence'])}"
    if beside := _find_beside(run):
        text += f", and from {join_words(beside)}"
    text += "."
    if run.model.own.get("head_form") == LIKELIHOOD:
        text += " A masked language model ranks variants of one protein by the likelihood of their substitutions."
    if vectors := run.model.own.get("vectors"):
        text += (
            f" It has no encoder: it reads vectors of {vectors[0]:,} numbers that another program made of them, which "
            "hf-ext predict takes by --embeddings."
        )
    if lacking := [*run.data.missing_chains]:
        text += f" It has learned to do without {join_words(lacking)}: such a cell may be empty."
    return text


def _find_beside(run: RunRecord) -> list[str]:
    return [name for kind in ("numeric", "category") for name in run.settings.get(f"{kind}_columns") or ()]


def _loading(run: RunRecord, kind: LabelKind, label: str, columns: list[str]) -> list[Block]:
    if run.model.own.get("vectors"):
        return [Code(f"hf-ext predict --model {PLACEHOLDER} --dataset_name new.csv --embeddings new.h5", "bash")]
    cells = [f'{json.dumps(name)}: "{EXAMPLES[i % len(EXAMPLES)]}"' for i, name in enumerate(columns)]
    cells += [f'{json.dumps(name)}: "7"' for name in _find_beside(run)]
    lines = [
        "from hf_ext import AffinityPredictor",
        "",
        f'predictor = AffinityPredictor.from_pretrained("{PLACEHOLDER}")',
        f"rows = [{{{', '.join(cells)}}}]",
        "print(predictor.predict(rows))",
    ]
    if run.own.get("prediction_spread"):
        lines.append("print(predictor.predict_std(rows))  # how far from it a measured value may be")
    unit = f"higher for a higher {label}" if _ranks(run) else f"in the unit of {label}"
    returned = kind.describe_returned(unit)
    return [
        Code("\n".join(lines), "python"),
        Text(
            "predict takes a list of dicts, a dict of lists, a datasets.Dataset or a pandas DataFrame with "
            f"{'these columns' if len(columns) > 1 else 'this column'}, and returns {returned}. It refuses sequences "
            "that hold anything but residues and names their rows."
        ),
    ]


def _spread_numbers(found: Facts, metrics: Sequence[str]) -> list[list[str]]:
    """Returns mean and standard deviation of single models, of several folds or seeds."""
    numbers: list[list[str]] = []
    for metric in dict.fromkeys(metrics if found else ()):
        spread = found["spread"].get(metric) or {}
        kinds = {"std_folds": "folds", "std_seeds": "seeds within folds" if found["folds"] else "seeds"}
        parts = [f"{kind} {units.number(spread[name])}" for name, kind in kinds.items() if spread.get(name) is not None]
        if parts:
            text = f"{units.number(spread['mean'])} +- {units.number(spread['std'])}"
            numbers.append(
                [f"{units.metric_name(metric)} of one model", text, f"standard deviation: {', '.join(parts)}"]
            )
    return numbers


def _repeat_blocks(found: Facts | None) -> list[Block]:
    """Returns what several runs are, and the scores of each fold and seed; values of folds are the user's data."""
    if not found:
        return []
    folds = found["folds"]
    seeds = found["seeds"]
    each = f"{len(folds)} folds" if folds else "the test rows"
    models = f"the mean of {len(seeds)} models" if len(seeds) > 1 else "a model"
    text = f"Scores are of {each}, predicted by {models} that had not seen them."
    if found["final_model"] == "all":
        text += " New rows are predicted by models of all rows, which nothing scored: these scores stand for them."
    blocks: list[Block] = [Text(text)]
    for what, rows in (("fold", folds), ("seed", seeds)):
        if len(rows) > 1:
            cells = [[one[what], *map(units.number, one["scores"].values())] for one in rows]
            headers = [what, *map(units.metric_name, rows[0]["scores"])]
            blocks.append(Table(headers, cells, fold=f"Each {what}"))
    return blocks


def _class_blocks(classes: Facts) -> list[Block]:
    """Returns each class's rows, precision, recall and F1, the largest first."""
    if not classes:
        return []
    ordered = sorted(classes.items(), key=lambda item: -item[1]["support"])[:MAX_CLASSES]
    names = ("support", "precision", "recall", "f1")
    rows = [[name, *(units.number(found[one]) for one in names)] for name, found in ordered]
    cut = f"The {MAX_CLASSES} largest." if len(classes) > MAX_CLASSES else ""
    return [Table(["class", *map(units.metric_name, names)], rows, cut, fold=f"All {len(classes):,} classes")]


def _group_blocks(test: SplitRecord) -> list[Block]:
    """Returns the range over groups, and each group, folded: their names are the user's data, and not for a card."""
    groups = test.of_model.get("per_group_spearman", Score()).groups
    if not groups:
        return []
    found = [group.value for group in groups.values() if is_finite(group.value)]
    extremes = f"{units.number(min(found))} to {units.number(max(found))}" if found else "undefined"
    text = f"Spearman's rho within single groups: {extremes}, in {len(found)} of {len(groups)} groups."
    ordered = sorted(groups.items(), key=lambda item: (-(item[1].n or 0), item[0]))[:MAX_GROUPS]
    rows = [[name, units.number(group.n), group.shown, group.undefined or ""] for name, group in ordered]
    cut = f"The {MAX_GROUPS} largest." if len(groups) > MAX_GROUPS else ""
    headers = ["group", "rows", "Spearman", "why undefined"]
    return [Text(text), Table(headers, rows, cut, fold=f"All {len(groups):,} groups")]


def _head_blocks(found: Facts | None) -> list[Block]:
    """Returns the heads that an ensemble weighed."""
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


def _limits(run: RunRecord, kind: LabelKind) -> list[str]:
    """Returns what labels and intervals can carry."""
    lines = kind.describe_limits()
    is_read = run.model.own.get("loss") in ("tobit", "ranking")
    read = "which its loss reads as bounds" if is_read else "taken as exact"
    for split, audit in run.labels.items():
        if limits := audit.own.get("censored_share"):
            lines.append(f"{share(limits)} of the {split} labels are bounds, {read}.")
    low, high = (run.labels.get("train", Audit()).own.get(end) for end in ("min", "max"))
    if is_finite(low) and is_finite(high):
        lines.append(
            f"Training labels go from {low:g} to {high:g}; a prediction outside that range is an extrapolation."
        )
    if not run.test.interval_by:  # else they resample what was held out together
        lines.append(
            "The intervals treat rows as independent: where rows share an antibody or an antigen they are too narrow "
            "for a claim about new ones."
        )
    return lines

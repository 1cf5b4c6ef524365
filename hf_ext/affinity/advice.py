"""What to mind about a run, and what to try next: after a good verdict more, after a bad one what it points at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..evaluation.paired import compare_paired
from ..evaluation.verdict import CONSTANT, MODEL
from ..reporting import units
from .scoring import SplitScores

ON_EMBEDDINGS = "embeddings"  # in the names of baselines that see what the head sees


def make_advice(
    report: Mapping[str, Any], settings: Mapping[str, Any], head_folder: Path, test: SplitScores
) -> list[str]:
    """Sentences a user can act on.

    Fine-tuning and a harder split are for a model that was shown to be worth something. After any other verdict stands
    what the verdict suggests instead: more rows where these do not decide, the baseline where it is as good, and data
    or training where the model learned nothing.

    Args:
        report: what loading the data reported.
        settings: model and data arguments by name.
        head_folder: of the head that fine-tuning would start from.
        test: scores of the test split.
    """
    lines = []
    repeated = (report.get("leaks") or {}).get("row", {}).get("num_test_rows_in_train", 0)
    if repeated:
        lines.append(f"{repeated:,} test rows repeat training rows' sequences: this score is partly memory.")
    is_frozen = set(settings["tower_training"]) == {"frozen"}
    if test.verdict.outcome != "better":
        return [*lines, *_after_a_bad_verdict(test, settings, is_frozen)]
    if is_frozen:
        lines.append(f"Next: --use_peft --init_head_from {head_folder} fine-tunes the encoders, from this head.")
    if not settings["split_column"] and settings["split"] in (None, "random") and not report.get("streaming"):
        lines.append("Next: --split cluster tests on sequences unlike those of training.")
    return lines


def _after_a_bad_verdict(test: SplitScores, settings: Mapping[str, Any], is_frozen: bool) -> list[str]:
    outcome, baseline = test.verdict.outcome, test.verdict.baseline
    if outcome == "undefined":
        lines = [
            "Next: a test split that can be scored, with more rows and labels that differ; without a verdict nothing "
            "says what would help."
        ]
    elif outcome == "undecided":
        lines = [_ask_for_rows(test, settings)]
    elif baseline in (None, CONSTANT):
        lines = [_find_what_is_wrong(test)]
    else:
        lines = [_take_the_baseline(str(baseline), settings.get("head") == "auto")]
    if not is_frozen:
        lines.append(
            "Next: the same command with --tower_training frozen is quick, and says whether training the encoders is "
            "what went wrong."
        )
    return lines


def _ask_for_rows(test: SplitScores, settings: Mapping[str, Any]) -> str:
    how = "" if settings["split_column"] else " (--split_sizes 0.6 0.1 0.3, say)"
    return (
        f"Next: more test rows than these {test.verdict.num_rows:,} decide{how}; --num_seeds 5 shows how much is luck "
        "of the start. Until then nothing says that a larger step would pay."
    )


def _find_what_is_wrong(test: SplitScores) -> str:
    """After a model that does not beat a constant: is there something to learn at all?"""
    others = {name: each for name, each in test.predictors.items() if name not in (MODEL, CONSTANT)}
    mean = test.predictors[CONSTANT] if others else None
    found = {name: compare_paired(test.labels, mean, each, "rmse", units=test.units) for name, each in others.items()}
    best = max(found, key=lambda name: found[name].low or 0.0, default="")
    if best and found[best].is_better:  # beyond the noise: of several, one always is by luck
        both = (units.score({"value": value}) for value in (found[best].after, found[best].before))
        return (
            "Next: look at the training before anything larger. {} has RMSE {} where the training mean has {}, so "
            "these rows can be learned from: see the loss curves in report.html, try another --learning_rate, fewer "
            "--num_train_epochs, a smaller head (--head_sizes 64)."
        ).format(best, *both)
    return (
        "Next: look at the data before the model, since no baseline is shown to beat the training mean either: the "
        "alarms about labels, their unit and sign, whether --sequence_columns hold what they depend on, and whether "
        "the test rows are like those of training."
    )


def _take_the_baseline(baseline: str, was_searched: bool) -> str:
    if ON_EMBEDDINGS in baseline and was_searched:
        return (
            f"Next: {baseline} sees what the head sees and does as well, and no head of the search does better: take "
            "it as it is, add rows, or look for what these embeddings lack with another of --encoders or --pooling."
        )
    if ON_EMBEDDINGS in baseline:
        return (
            f"Next: {baseline} sees what the head sees and does as well, so the head is too large or trains too long: "
            "try --head_sizes 64, more --head_dropout, fewer --num_train_epochs."
        )
    return (
        f"Next: {baseline} does as well without an encoder: use that, or look for what these embeddings lack with "
        "another of --encoders or --pooling."
    )

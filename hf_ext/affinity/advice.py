"""What to mind about a run, and what to try next: after a good verdict more, after a bad one what it points at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..evaluation.scores import compare_paired
from ..evaluation.verdict import CONSTANT, MODEL
from ..reporting import units
from .scoring import SplitScores

# What was found -> what to do, in words that a user can act on; names in braces are facts of the run.
HINTS = {
    "repeated": "{repeated:,} test rows repeat training rows' sequences: this score is partly memory.",
    "better, frozen": "Next: --use_peft --init_head_from {folder} fine-tunes the encoders, from this head.",
    "better, random split": "Next: --split cluster tests on sequences unlike those of training.",
    "undefined": "Next: a test split that can be scored, with more rows and labels that differ; without a verdict "
    "nothing says what would help.",
    "undecided": "Next: more test rows than these {num_rows:,} decide{how}; --num_seeds 5 shows how much is luck of "
    "the start. Until then nothing says that a larger step would pay.",
    "others learn": "Next: look at the training before anything larger. {best} has RMSE {rmse} where the training mean "
    "has {rmse_of_mean}, so these rows can be learned from: see the loss curves in report.html, try another "
    "--learning_rate, fewer --num_train_epochs, a smaller head (--head_sizes 64).",
    "nobody learns": "Next: look at the data before the model, since no baseline is shown to beat the training mean "
    "either: the alarms about labels, their unit and sign, whether --sequence_columns hold what they depend on, and "
    "whether the test rows are like those of training.",
    "embeddings, searched": "Next: {baseline} sees what the head sees and does as well, and no head of the search does "
    "better: take it as it is, add rows, or look for what these embeddings lack with another of --encoders or "
    "--pooling.",
    "embeddings": "Next: {baseline} sees what the head sees and does as well, so the head is too large or trains too "
    "long: try --head_sizes 64, more --head_dropout, fewer --num_train_epochs.",
    "no encoder": "Next: {baseline} does as well without an encoder: use that, or look for what these embeddings lack "
    "with another of --encoders or --pooling.",
    "encoders trained": "Next: the same command with --tower_training frozen is quick, and says whether training the "
    "encoders is what went wrong.",
}


def make_advice(
    report: Mapping[str, Any], settings: Mapping[str, Any], head_folder: Path, test: SplitScores
) -> list[str]:
    """Sentences a user can act on, of `HINTS`.

    Fine-tuning and a harder split are for a model that was shown to be worth something. After any other verdict stands
    what the verdict suggests instead: more rows where these do not decide, the baseline where it is as good, and data
    or training where the model learned nothing.

    Args:
        report: what loading the data reported.
        settings: model and data arguments by name.
        head_folder: of the head that fine-tuning would start from.
        test: scores of the test split.
    """
    repeated = (report.get("leaks") or {}).get("row", {}).get("num_test_rows_in_train", 0)
    is_frozen = set(settings["tower_training"]) == {"frozen"}
    is_random = not settings["split_column"] and settings["split"] in (None, "random") and not report.get("streaming")
    facts = {"repeated": repeated, "folder": head_folder}
    found = {"repeated": repeated > 0}
    if test.verdict.outcome == "better":
        found |= {"better, frozen": is_frozen, "better, random split": is_random}
    else:
        cause, more = _find_cause(test, settings)
        facts |= more
        found |= {cause: True, "encoders trained": not is_frozen}
    return [HINTS[name].format_map(facts) for name, is_so in found.items() if is_so]


def _find_cause(test: SplitScores, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Which of `HINTS` is for a model that is not shown to be better, with its facts."""
    outcome, baseline = test.verdict.outcome, test.verdict.baseline
    if outcome in ("undefined", "undecided"):
        how = "" if settings["split_column"] else " (--split_sizes 0.6 0.1 0.3, say)"
        return outcome, {"num_rows": test.verdict.num_rows, "how": how}
    if baseline in (None, CONSTANT):
        return _find_learner(test)
    if "embeddings" not in baseline:
        return "no encoder", {"baseline": baseline}
    return "embeddings, searched" if settings.get("head") == "auto" else "embeddings", {"baseline": baseline}


def _find_learner(test: SplitScores) -> tuple[str, dict[str, Any]]:
    """After a model that does not beat a constant: is there something to learn at all?"""
    others = {name: each for name, each in test.predictors.items() if name not in (MODEL, CONSTANT)}
    mean = test.predictors[CONSTANT] if others else None
    found = {name: compare_paired(test.labels, mean, each, "rmse", units=test.units) for name, each in others.items()}
    best = max(found, key=lambda name: found[name].low or 0.0, default=None)
    if best is None or not found[best].is_better:  # beyond the noise: of several, one always is by luck
        return "nobody learns", {}
    rmse, rmse_of_mean = (units.score({"value": value}) for value in (found[best].after, found[best].before))
    return "others learn", {"best": best, "rmse": rmse, "rmse_of_mean": rmse_of_mean}

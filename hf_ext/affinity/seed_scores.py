"""What several seeds say: how far scores of one head vary, what their mean scores, and whether their spread warns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.columns import read_columns
from ..evaluation import score_predictions
from ..evaluation.resampling import ResamplingUnits
from .ensemble import TrainedSeeds, predict_members
from .scoring import SplitScores

WITHIN_ONE = 0.6827  # share of a normal distribution within one standard deviation
MEANING = (
    "The spread between seeds comes from initialisation, dropout and the order of rows alone: what all heads get "
    "wrong together, and noise of the measurement, it does not show."
)


@dataclass(frozen=True)
class SeedScores:
    """`facts` for `all_results.json["seeds"]`; `std`: (n,) standard deviation over heads per test row, label units."""

    facts: dict[str, Any]
    std: np.ndarray

    def text(self) -> str:
        """The facts in a few lines."""
        facts, fit = self.facts, self.facts["uncertainty"]
        lines = [f"{facts['num_seeds']} seeds ({', '.join(map(str, facts['seeds']))}), one head each, same test rows:"]
        for metric, single in facts["scores"].items():
            if single["mean"] is not None:
                whole = facts["ensemble"][metric]["value"]
                together = "undefined" if whole is None else f"{whole:.3f}"
                lines.append(f"  {metric}: {single['mean']:.3f} +- {single['std']:.3f}; of their mean {together}")
        if fit["undefined"]:
            lines.append(f"  spread as uncertainty: {fit['undefined']}")
        else:
            rho = fit["spearman_of_error"]
            shown = "undefined" if rho["value"] is None else f"{rho['value']:.2f} [{rho['low']:.2f}, {rho['high']:.2f}]"
            lines.append(
                f"  spread and error of a row, Spearman: {shown}. Spread x {fit['scale']:.2f} (fitted on validation) "
                f"covers {fit['coverage_1']:.0%} of test rows, expected 68%; twice that {fit['coverage_2']:.0%}, "
                "expected 95%."
            )
        return "\n".join([*lines, f"  {MEANING}"])


def score_seeds(
    trainer: Any,
    trained: TrainedSeeds,
    splits: Any,
    test: SplitScores,
    threshold: float | None,
    group_column: str | None,
    units: ResamplingUnits | None = None,
) -> SeedScores:
    """Scores every head on the test split, and tests on it whether their spread says where predictions are wrong.

    Args:
        trainer, trained: after `train_seeds`.
        splits: validation, on which the spread is scaled, and test.
        test: scores of the mean prediction on test, from `score_split`.
        threshold, group_column, units: as given to `score_split`.

    Cost: a pass over validation and test; 1,000 bootstrap resamples of one correlation.
    """
    rows = splits["test"]
    members = predict_members(trainer, rows).astype(np.float64)
    groups = [row[0] for row in read_columns(rows, [group_column])] if group_column else None
    singles = [
        score_predictions(one, test.labels, groups=groups, threshold=threshold, num_resamples=0) for one in members.T
    ]
    held_out = predict_members(trainer, splits["validation"]).astype(np.float64)
    labels = np.asarray(splits["validation"]["label"][:], np.float64)
    facts = {
        "num_seeds": len(trained.seeds),
        "seeds": trained.seeds,
        "runs": trained.runs,
        "scores": {metric: _spread([single[metric]["value"] for single in singles]) for metric in test.scores["model"]},
        "ensemble": test.scores["model"],
        "uncertainty": judge_spread(held_out, labels, members, test.labels, seed=trainer.args.seed, units=units),
        "meaning": MEANING,
    }
    return SeedScores(facts, members.std(axis=1, ddof=1))


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds; None where a seed's value is undefined."""
    if any(value is None for value in values):
        return {"mean": None, "std": None, "values": list(values)}
    known = np.asarray(values, np.float64)
    return {"mean": float(known.mean()), "std": float(known.std(ddof=1)), "values": known.tolist()}


def judge_spread(
    validation: np.ndarray,
    validation_labels: np.ndarray,
    test: np.ndarray,
    test_labels: np.ndarray,
    *,
    seed: int = 0,
    units: ResamplingUnits | None = None,
) -> Mapping[str, Any]:
    """Says whether the spread between heads tells where their mean is wrong.

    The spread of a row is the sample standard deviation over heads. One factor turns it into an error bar, so that 68 %
    of validation rows lie within one bar; the test rows show whether that holds elsewhere.

    Args:
        validation, test: (n, heads) predictions, label units; at least 2 heads.
        validation_labels, test_labels: (n,), label units.
        seed: of the bootstrap.
        units: test rows that it draws together; None: each by itself.

    Returns:
        `mean_std`: label units, before scaling. `spearman_of_error`: a score with interval, rank correlation of spread
        and absolute error over test rows. `scale`: the factor. `coverage_1`, `coverage_2`: shares of test rows within
        one and two bars, 68 % and 95 % if errors are normal; `validation_coverage_2` likewise. `undefined`: why there
        are no error bars, or None.
    """
    held_out, errors = validation.std(axis=1, ddof=1), np.abs(validation.mean(1) - validation_labels)
    spread, test_errors = test.std(axis=1, ddof=1), np.abs(test.mean(1) - test_labels)
    facts: dict[str, Any] = {
        "mean_std": float(spread.mean()),
        "spearman_of_error": score_predictions(spread, test_errors, threshold=None, seed=seed, units=units)["spearman"],
        "scale": None,
        "coverage_1": None,
        "coverage_2": None,
        "validation_coverage_2": None,
        "undefined": None,
    }
    ratios = np.divide(errors, held_out, out=np.full(len(errors), np.inf), where=held_out > 0)
    # "higher" is the value of a row, so that a share of rows without spread cannot turn into NaN.
    scale = float(np.quantile(ratios, WITHIN_ONE, method="higher"))
    if not np.isfinite(scale):
        agreeing = int((held_out == 0).sum())
        facts["undefined"] = f"heads agree exactly on {agreeing:,} of {len(errors):,} validation rows"
        return facts
    facts["scale"] = scale
    facts["coverage_1"], facts["coverage_2"] = (float((test_errors <= k * scale * spread).mean()) for k in (1, 2))
    facts["validation_coverage_2"] = float((errors <= 2 * scale * held_out).mean())
    return facts

"""How often early stopping on a 5 % subset ends a run by chance: patience on the score against the paired rule.

Simulated: 10,000 rows with a floor on their labels, predictions whose true correlation with the labels rises slowly
with jitter and then ends in one of three ways. A stop is false where training would still have gained more than
--min_delta. Exits with 1 unless fewer than 5 % of the rule's runs stop falsely.

OMP_NUM_THREADS=1 python benchmarks/false_stops.py --output benchmarks/results/false_stops.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.evaluation.metrics import value_of
from hf_ext.evaluation.row_metrics import choose_subset
from hf_ext.evaluation.stopping_rule import StoppingRule

NUM_ROWS = 10_000
SUBSET_SHARE = 0.05
NUM_AFTER_END = 20  # evaluations
MOST_FALSE_STOPS = 0.05
# settles: the predictions stop moving. overfits: the true correlation falls by 0.01 per evaluation.
# restless: the correlation stays, the predictions keep moving as before.
ENDS = ("settles", "overfits", "restless")


@dataclass(frozen=True)
class Curve:
    """The true correlation at every evaluation, and the share of the residual noise that is new at each."""

    correlation: np.ndarray  # (evaluations,), without jitter
    jitter: np.ndarray  # (evaluations,)
    turnover: np.ndarray  # (evaluations,)
    end: int  # the evaluation from which on nothing is gained
    kind: str


@dataclass
class Tally:
    """What one way of stopping did over all curves."""

    false_stops: int = 0
    missed_gains: list[float] = field(default_factory=list)
    evaluations_late: dict[str, list[int]] = field(default_factory=lambda: {kind: [] for kind in ENDS})
    never: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))

    def add(self, curve: Curve, stop: int | None, min_delta: float) -> None:
        """Counts one curve; `stop` is the evaluation after which the run ended, None where it never did."""
        if stop is None:
            self.never[curve.kind] += 1
            return
        missed = float(curve.correlation[curve.end] - curve.correlation[stop]) if stop < curve.end else 0.0
        if missed > min_delta:
            self.false_stops += 1
            self.missed_gains.append(missed)
        else:
            self.evaluations_late[curve.kind].append(max(0, stop - curve.end))

    def summary(self, num_curves: int) -> dict[str, Any]:
        """Counts, shares and medians, JSON-able."""
        ended = {}
        for kind in ENDS:
            late = self.evaluations_late[kind]
            ended[kind] = {
                "num_stopped": len(late),
                "num_not_stopped": self.never[kind],
                "median_evaluations_late": statistics.median(late) if late else None,
                "most_evaluations_late": max(late, default=None),
            }
        return {
            "num_curves": num_curves,
            "num_false_stops": self.false_stops,
            "share_false_stops": self.false_stops / num_curves,
            "median_gain_missed_by_false_stops": statistics.median(self.missed_gains) if self.missed_gains else None,
            "after_training_ended": ended,
        }


def draw_curve(generator: np.random.Generator, kind: str) -> Curve:
    """A rise of 0.05 to 0.25 over 20 to 40 evaluations: 0.001 to 0.0125 each, below the noise of 500 rows."""
    end = int(generator.integers(20, 41))
    rise = generator.uniform(0.05, 0.25)
    after = np.arange(1, NUM_AFTER_END + 1)
    top = 0.4 + rise
    tail = top - 0.01 * after if kind == "overfits" else np.full(NUM_AFTER_END, top)
    correlation = np.concatenate([np.linspace(0.4, top, end + 1), tail])
    turnover = np.full(len(correlation), generator.uniform(0.02, 0.2))
    jitter = generator.normal(0.0, 0.005, len(correlation))
    if kind == "settles":
        turnover[end + 1 :] = 1e-4
        jitter[end + 1 :] = jitter[end]
    return Curve(correlation, jitter, turnover, end, kind)


def simulate(curve: Curve, truth: np.ndarray, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Predictions of the subset's rows, one array per evaluation, from the standard normal `truth` of those rows."""
    residual = generator.normal(size=len(truth))
    for correlation, jitter, turnover in zip(curve.correlation, curve.jitter, curve.turnover):
        residual = np.sqrt(1 - turnover) * residual + np.sqrt(turnover) * generator.normal(size=len(truth))
        current = correlation + jitter
        yield current * truth + np.sqrt(1 - current**2) * residual


def stop_of_patience(scores: list[float], patience: int) -> int | None:
    """What stock early stopping does: ends after `patience` scores in a row that are not above the best."""
    best, count = -np.inf, 0
    for i, score in enumerate(scores):
        best, count = (score, 0) if score > best else (best, count + 1)
        if count >= patience:
            return i
    return None


def stop_of_rule(rule: StoppingRule, predictions: list[np.ndarray]) -> int | None:
    """The evaluation after which the rule ends the run."""
    return next((i for i, rows in enumerate(predictions) if rule.update(rows, step=i + 1).should_stop), None)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both ways of stopping on the same curves, rows and predictions."""
    tallies = {"patience": Tally(), "paired_rule": Tally()}
    for number in range(args.num_curves):
        generator = np.random.default_rng([args.seed, number])
        truth = generator.normal(size=NUM_ROWS)
        labels = np.maximum(8.0 + 1.5 * truth, 6.5)  # 16 % of the rows at the floor
        rows = choose_subset(labels, size=SUBSET_SHARE, seed=args.seed)
        curve = draw_curve(generator, ENDS[number % len(ENDS)])
        predictions = list(simulate(curve, truth[rows], generator))
        scores = [value_of("spearman", predicted, labels[rows]).value for predicted in predictions]
        rule = StoppingRule(
            labels[rows],
            patience=args.patience,
            min_delta=args.min_delta,
            confidence=args.confidence,
            num_resamples=args.num_resamples,
        )
        tallies["patience"].add(curve, stop_of_patience(scores, args.patience), args.min_delta)
        tallies["paired_rule"].add(curve, stop_of_rule(rule, predictions), args.min_delta)
    return {name: tally.summary(args.num_curves) for name, tally in tallies.items()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Where the JSON goes.")
    parser.add_argument("--num_curves", type=int, default=200)
    parser.add_argument("--patience", type=int, default=3, help="Of both, in evaluations.")
    parser.add_argument("--min_delta", type=float, default=0.01, help="Smallest gain worth training for.")
    parser.add_argument("--confidence", type=float, default=0.99, help="Of the rule's intervals.")
    parser.add_argument("--num_resamples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Writes the JSON, prints it, and fails where the rule stops falsely too often."""
    args = parse_args()
    start = time.perf_counter()
    results = run(args)
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    report = {
        "settings": {**settings, "num_rows": NUM_ROWS, "subset_share": SUBSET_SHARE, "metric": "spearman"},
        "seconds": round(time.perf_counter() - start, 1),
        **results,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    share = results["paired_rule"]["share_false_stops"]
    if not share < MOST_FALSE_STOPS:
        sys.exit(f"The paired rule stopped {share:.1%} of the runs falsely; below {MOST_FALSE_STOPS:.0%} is needed.")


if __name__ == "__main__":
    main()

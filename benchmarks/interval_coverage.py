"""How often 95 % intervals hold the true score where rows come in clusters: groups resampled against rows resampled.

Simulated: clusters (antibodies, say) whose rows share most of their label and much of what two models get wrong about
it, with four distributions of their sizes. Labels and predictions are Gaussian, so that the true Spearman, RMSE and
their differences are known. Each draw of clusters is scored by `score_predictions` and `compare_paired`, with `groups`
and, as the broken twin, without. Exits with 1 where intervals by cluster hold less than 93 % or more than 97 %, over
all draws, or in one of the rows beyond what chance does.

OMP_NUM_THREADS=1 python benchmarks/interval_coverage.py --output benchmarks/results/interval_coverage.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hf_ext.evaluation import MIN_GROUPS, ResamplingGroups, compare_paired, score_predictions

HELD = (0.93, 0.97)
LABEL = {"cluster": math.sqrt(0.6), "row": math.sqrt(0.4)}  # of unit variance, 60 % of it between clusters
SLOPE = 0.7  # of both models' predictions on the label
# What is added to the predictions of each: of the cluster (shared by both, own), of the row (shared, own).
BEFORE = (0.40, 0.00, 0.3, 0.30)
AFTER = (0.25, 0.25, 0.3, 0.25)
SCORES = ("spearman", "rmse", "spearman_difference", "rmse_difference")


def draw_sizes(kind: str, num_clusters: int, generator: np.random.Generator) -> np.ndarray:
    """Rows of each cluster, about 20 on average."""
    if kind == "equal":
        return np.full(num_clusters, 20)
    if kind == "geometric":
        return generator.geometric(1 / 20, num_clusters)
    if kind == "lognormal":
        return np.ceil(np.exp(generator.normal(2.3, 1.0, num_clusters))).astype(int)
    if kind == "few_large":  # a tenth of the clusters holds half of the rows
        return np.where(generator.random(num_clusters) < 0.1, 90, 10)
    raise ValueError(f"kind={kind!r}: use equal, geometric, lognormal or few_large.")


def draw_rows(sizes: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Cluster of each row, labels, and both models' predictions, all (rows,)."""
    cluster = np.repeat(np.arange(len(sizes)), sizes)
    of_cluster = generator.normal(size=(4, len(sizes)))[:, cluster]
    of_row = generator.normal(size=(4, len(cluster)))
    labels = LABEL["cluster"] * of_cluster[0] + LABEL["row"] * of_row[0]
    models = []
    for number, (shared, own, row_shared, row_own) in enumerate((BEFORE, AFTER)):
        error = shared * of_cluster[1] + own * of_cluster[2] + row_shared * of_row[1] + row_own * of_row[2 + number]
        models.append(SLOPE * labels + error)
    return cluster, labels, *models


def true_scores() -> dict[str, float]:
    """Of infinitely many clusters, by formula: Spearman of two Gaussians is 6 / pi * asin(correlation / 2)."""
    spearman, rmse = [], []
    for weights in (BEFORE, AFTER):
        noise = sum(weight**2 for weight in weights)
        spearman.append(6 / math.pi * math.asin(SLOPE / math.sqrt(SLOPE**2 + noise) / 2))
        rmse.append(math.sqrt((1 - SLOPE) ** 2 + noise))
    return {
        "spearman": spearman[1],
        "rmse": rmse[1],
        "spearman_difference": spearman[1] - spearman[0],
        "rmse_difference": rmse[0] - rmse[1],
    }


def find_intervals(
    rows: tuple[np.ndarray, ...], by_cluster: bool, num_resamples: int
) -> dict[str, tuple[float, float]]:
    """The intervals that a run would print of these rows."""
    cluster, labels, before, after = rows
    options: dict[str, Any] = {"num_resamples": num_resamples}
    if by_cluster:
        options["groups"] = ResamplingGroups.of("cluster", cluster)
    scores: dict[str, Any] = dict(score_predictions(after, labels, **options))
    for metric in ("spearman", "rmse"):
        scores[f"{metric}_difference"] = compare_paired(labels, before, after, metric, **options).as_dict()
    return {name: (scores[name]["low"], scores[name]["high"]) for name in SCORES}


def cover(kind: str, num_clusters: int, by_cluster: bool, num_draws: int, num_resamples: int, seed: int) -> dict:
    """Over draws of clusters: how often intervals hold the true score, and how wide they are on average."""
    truth = true_scores()
    held, widths = dict.fromkeys(SCORES, 0), dict.fromkeys(SCORES, 0.0)
    for number in range(num_draws):
        generator = np.random.default_rng([seed, num_clusters, number])
        rows = draw_rows(draw_sizes(kind, num_clusters, generator), generator)
        for name, (low, high) in find_intervals(rows, by_cluster, num_resamples).items():
            held[name] += low <= truth[name] <= high
            widths[name] += high - low
    return {name: {"held": held[name] / num_draws, "mean_width": widths[name] / num_draws} for name in SCORES}


def mean_held(rows: list[dict[str, Any]], way: str) -> dict[str, float]:
    """Share of intervals that hold the true score, over all distributions and numbers of clusters."""
    return {name: float(np.mean([row[way][name]["held"] for row in rows])) for name in SCORES}


def find_failures(rows: list[dict[str, Any]], num_draws: int) -> list[str]:
    """Where intervals by cluster hold less than 93 or more than 97 %: over all draws, or beyond chance in one row."""
    margin = 3 * math.sqrt(0.05 * 0.95 / num_draws)
    shares = [("all", name, share, 0.0) for name, share in mean_held(rows, "by_cluster").items()]
    for row in rows:
        where = f"{row['sizes']}, {row['num_clusters']} clusters"
        shares += [(where, name, row["by_cluster"][name]["held"], margin) for name in SCORES]
    return [
        f"{where}, {name}: {share:.1%}"
        for where, name, share, allowed in shares
        if not HELD[0] - allowed <= share <= HELD[1] + allowed
    ]


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every distribution of sizes with every number of clusters, by cluster and by row on the same draws."""
    for kind in args.sizes:
        for num_clusters in args.num_clusters:
            settings = (args.num_resamples, args.seed)
            row = {
                "sizes": kind,
                "num_clusters": num_clusters,
                "by_cluster": cover(kind, num_clusters, True, args.num_draws, *settings),
                "by_row": cover(kind, num_clusters, False, args.num_twin_draws, *settings),
            }
            held = {way: {name: row[way][name]["held"] for name in SCORES} for way in ("by_cluster", "by_row")}
            print(kind, num_clusters, json.dumps(held), flush=True)
            yield row


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="Where the JSON goes.")
    parser.add_argument("--sizes", nargs="+", default=["equal", "geometric", "lognormal", "few_large"])
    parser.add_argument("--num_clusters", nargs="+", type=int, default=[20, 40, 60])
    parser.add_argument("--num_draws", type=int, default=1000)
    parser.add_argument("--num_twin_draws", type=int, default=200, help="Of the twin that resamples rows.")
    parser.add_argument("--num_resamples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Writes the JSON, and fails where intervals by cluster do not hold what they say."""
    args = parse_args()
    start = time.perf_counter()
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    rows: list[dict[str, Any]] = []
    for row in run(args):  # written after each: it takes minutes
        rows.append(row)
        report = {
            "settings": {**settings, "confidence": 0.95, "label": LABEL, "slope": SLOPE, "models": [BEFORE, AFTER]},
            "fewest_units_trusted": MIN_GROUPS,
            "true": true_scores(),
            "seconds": round(time.perf_counter() - start, 1),
            "mean_held": {way: mean_held(rows, way) for way in ("by_cluster", "by_row")},
            "coverage": rows,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    if failures := find_failures(rows, args.num_draws):
        sys.exit(f"Intervals by cluster hold less than {HELD[0]:.0%} or more than {HELD[1]:.0%}: {failures}.")


if __name__ == "__main__":
    main()

"""Writes random chains as long as those of a real set of antigens, so that anyone can repeat a comparison of speeds.

What a step costs depends on lengths, not on residues: these have the 5 % quantiles of the lengths of 1,020 antigens of
known antibodies.

python benchmarks/chains.py --output outputs/chains.csv
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

from hf_ext.data.proteins import STANDARD

# Shortest, 5 %, 10 %, ... longest.
QUANTILES = (60, 104, 122, 137, 156, 179, 195, 199, 210, 218, 224, 232, 270, 309, 331, 366, 427, 476, 507, 612, 960)


def draw_lengths(num: int, rng: random.Random) -> list[int]:
    """Residues of each of `num` chains: evenly between neighbouring quantiles."""
    lengths = []
    for i in range(num):
        below, share = divmod(i / (num - 1) * (len(QUANTILES) - 1), 1)
        low, high = QUANTILES[int(below)], QUANTILES[min(int(below) + 1, len(QUANTILES) - 1)]
        lengths.append(round(low + share * (high - low)))
    rng.shuffle(lengths)
    return lengths


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a CSV with a column 'sequence'")
    parser.add_argument("--num", type=int, default=1020, help="chains, at least 2")
    args = parser.parse_args(argv)
    if args.num < 2:
        parser.error(f"--num {args.num}: at least 2.")
    rng = random.Random(0)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence"])
        writer.writerows(["".join(rng.choices(STANDARD, k=length))] for length in draw_lengths(args.num, rng))


if __name__ == "__main__":
    main()

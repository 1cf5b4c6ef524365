"""Write the report and the model card of a finished run anew: report.html and README.md in its folder.

    hf-ext report --run outputs/affinity
    hf-ext report --run outputs/affinity outputs/mlm    # several runs

Reads what the run left there (all_results.json, plan.json, trainer_state.json, predictions.csv) and nothing else: no
model, no data, no network. A README.md that hf_ext did not write stays, and the card is README.hf_ext.md then. Exit
status: 0, or 1 where a folder holds no finished run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import show_text
from .card import write_card
from .report import write_report


def main(argv: list[str] | None = None) -> list[Path]:
    """Runs the recipe; returns the files that it wrote."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--run", nargs="+", required=True, metavar="FOLDER", help="Output folders of finished runs.")
    args = parser.parse_args(argv)
    written: list[Path] = []
    for folder in args.run:
        written += [write_report(folder), write_card(folder)]
    for path in written:
        print(show_text(f"Wrote {path}"))
    return written

"""Compare two or more ways to run training: speed, memory, loss, metric, with intervals and pass/fail criteria.

    hf-ext compare --baseline baseline --optimized max_speed -- --num_train_epochs 3
    hf-ext compare --recipe mlm --baseline stock mlm_stock_best.yaml --optimized max_speed \\
        --rounds 5 --min_speedup 3 --max_loss_delta 0.001 --max_memory_gib 50 --ablate -- --max_steps 200
    hf-ext compare --baseline baseline --baseline_launch "ddp.yaml --num_processes 2 --mixed_precision fp16" \\
        --optimized max_speed --optimized_launch "ddp.yaml --num_processes 2" -- --effective_batch_size 64

Every run is a fresh process, or as many as its side's Accelerate config file starts, with a folder of its own; sides
take turns (A B A B) on the same data and seeds. What stands after `--` goes to all sides. Writes comparison.json,
comparison.md and comparison.png. Killed and started again, the same command keeps the runs that it had finished.
While a speed's interval holds both what passes and what fails, rounds are added, up to --max_rounds.
Exit status: 0 if all criteria hold, 3 if one does not, 4 if none fails and one is too noisy to tell, 1 if a run failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..arguments.parser import FastArgumentParser
from ..processes import refuse_several
from ..reporting.run_log import start_run_log
from .comparison import compare
from .sides import CompareArguments

CRITERIA_FAILED = 3
TOO_NOISY = 4
USAGE = "%(prog)s [--FLAG VALUE ...] -- [flags of the recipe, for all sides]"


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    refuse_several("compare")
    end = words.index("--") if "--" in words else len(words)
    parser = FastArgumentParser(CompareArguments, description=__doc__, usage=USAGE)
    (args,) = parser.parse_args_into_dataclasses(words[:end])
    log = start_run_log(args.output_dir)
    result = compare(args, words[end + 1 :])
    log.info("\n%s\n", (Path(args.output_dir) / "comparison.md").read_text())
    if result["too_noisy"]:
        return TOO_NOISY
    return 0 if result["passed"] else CRITERIA_FAILED

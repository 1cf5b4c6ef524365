"""What each of two processes runs: `python stock_on_ranks.py FOLDER` under torchrun.

Stock Trainer's and FastTrainer's runs of ESM regression take up each other's checkpoints; `stock-RANK.json` says how
many entries of the weights were not bit for bit those that were to arrive.
"""

import gc
import json
import os
import sys
from pathlib import Path

from faulty_runs import bits
from ranks import leave
from stock_runs import BEST, NUM_STEPS, SAVED, Runs, differing
from transformers import EsmForSequenceClassification, Trainer

from hf_ext.trainer import FastTrainer

RANK = int(os.environ.get("RANK", "0"))
KIND = "ESM regression"


def main(folder: Path) -> FastTrainer:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    runs = Runs(folder / f"base-{RANK}")
    _, stock = runs.train(KIND, Trainer, folder / "stock")
    checkpoint = folder / "stock" / f"checkpoint-{SAVED}"
    resumed, seen = runs.train(KIND, FastTrainer, folder / "resumed", checkpoint)
    _, lost = runs.train(KIND, Trainer, folder / "lost", checkpoint)
    resumed.save_model(str(folder / "export"))
    resumed.accelerator.wait_for_everyone()
    export, info = EsmForSequenceClassification.from_pretrained(folder / "export", output_loading_info=True)
    _, fast = runs.train(KIND, FastTrainer, folder / "fast")
    _, read = runs.train(KIND, Trainer, folder / "read", folder / "fast" / f"checkpoint-{SAVED}", max_steps=SAVED + 1)
    report = {
        "began_at": seen.began_at,
        "resumed at 3": len(differing(seen.weights[SAVED], stock.weights[SAVED])),
        "resumed at 6": len(differing(seen.weights[NUM_STEPS], stock.weights[NUM_STEPS])),
        "stock resumed at 3": len(differing(lost.weights[SAVED], stock.weights[SAVED])),
        "read by stock": len(differing(read.weights[SAVED], fast.weights[SAVED])),
        "export": len(differing(bits(export), bits(resumed.model))),
        "missing keys": sorted({*info["missing_keys"], *info["unexpected_keys"]}),
    }
    for name, trainer_class in (("best", FastTrainer), ("stock best", Trainer)):
        best, watch = runs.train(KIND, trainer_class, folder / name, **BEST)
        report[name] = len(differing(bits(best.model), watch.weights[SAVED]))
    (folder / f"stock-{RANK}.json").write_text(json.dumps(report))
    return resumed


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))  # stock trainers hold DDP models until main is over

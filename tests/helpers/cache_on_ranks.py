"""What each process of a nightly test runs: `python cache_on_ranks.py FOLDER kill|go_on`, under torchrun.

Two processes fill the embedding cache of FOLDER together and train on it; `kill` ends the second one while it encodes
its second shard. `encoded-RANK.json` in FOLDER: how often each process encoded each sequence, by input.
"""

import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from equal_cases import make_parts
from ranks import leave

from hf_ext.embeddings.encode import SMALLEST_SHARD
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))


def make_few_antigens(encoders: Path) -> tuple:
    """As `make_parts`, with three antigens in all: one process has none of them to encode."""
    model, collator, rows = make_parts("frozen_cache", encoders)
    antigens = [rows["antigen"][i % 3] for i in range(len(rows))]
    return model, collator, rows.remove_columns("antigen").add_column("antigen", antigens)


class Counting(FastTrainer):
    """Counts what this process encodes, and may kill it."""

    dies = False

    def encode_sequences(self, name, sequences):
        counts = self.__dict__.setdefault("counts", {}).setdefault(name, Counter())
        counts.update(sequences)
        if self.dies and counts.total() > SMALLEST_SHARD:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_sequences(name, sequences)


def main(folder: Path, task: str) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    model, collator, rows = make_few_antigens(folder / "encoders")
    settings = {"max_steps": 2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    settings |= {"speedups": ["embedding_cache"], "embedding_cache_dir": str(folder / "cache")}
    args = FastTrainingArguments(str(folder / "run"), **settings)
    trainer = Counting(model, args, collator, rows)
    trainer.dies = task == "kill" and RANK == 1
    trainer.train()
    evidence = trainer.plan["embedding_cache"].evidence
    report = {"counts": trainer.__dict__.get("counts", {}), "num_encoded": evidence["num_encoded"]}
    (folder / f"encoded-{RANK}.json").write_text(json.dumps(report))
    leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""What each process runs: `python memory_on_ranks.py FOLDER`, under torchrun: runs for which memory does not suffice.

Writes losses and weights of two runs, and `report-RANK.json`: the batch that was found, and how the other run ended.
"""

import gc
import json
import os
import sys
from pathlib import Path

from equal_cases import make_esm, make_tokens, save_numbers
from ranks import leave
from small_memory import Room
from token_rows import pad_rows

from hf_ext.errors import MemoryExhausted
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ["RANK"])


def make_trainer(folder: Path, room: Room, **given) -> FastTrainer:
    """Three steps of two micro-batches, where process 1 has so much room."""
    model = make_esm()
    if RANK == 1:
        room.watch(model.esm.encoder.layer[0])
    settings = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3, "per_device_train_batch_size": 4}
    fixed = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    args = FastTrainingArguments(str(folder), **settings, gradient_accumulation_steps=2, **fixed, **given)
    return FastTrainer(model, args, pad_rows, make_tokens("masked_lm"))


def main(folder: Path) -> None:
    gc.freeze()
    plain = make_trainer(folder / "plain", Room())
    plain.train()
    save_numbers(folder, "plain", plain)
    found = make_trainer(folder / "found", Room(3), speedups="find_batch_size")
    found.train()
    save_numbers(folder, "found", found)
    tried = found.plan["find_batch_size"].evidence["tried"]
    report = {"found": [found.args.per_device_train_batch_size, found.args.gradient_accumulation_steps, tried]}
    ended = make_trainer(folder / "ended", Room(), preset="max_speed", without=["compile"])
    # On both, since none is left to end one that waits for the other.
    Room(0).watch(ended.model.esm.encoder.layer[0])
    try:
        ended.train()
    except MemoryExhausted as raised:
        report["ended"] = str(raised)
    (folder / f"report-{RANK}.json").write_text(json.dumps(report))
    leave(ended)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

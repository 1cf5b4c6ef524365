"""What each process runs: `python ladder_on_ranks.py FOLDER`, under torchrun: runs for which memory does not suffice.

Writes losses and weights of each run, and `report-RANK.json`: how often memory failed on this process, and the rung.
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
NEVER = Room()
RUNS = {  # name -> the room of each process
    "plain": (NEVER, NEVER),
    "idle": (NEVER, NEVER),
    "first on 0": (Room(calls=(1,)), NEVER),
    "first on both": (Room(calls=(1,)), Room(calls=(1,))),
    "second on 1": (NEVER, Room(calls=(2,))),
    "backward on 1": (NEVER, Room(where="backward", calls=(2,))),
    "later on 0": (Room(where="backward", calls=(4,)), NEVER),
    "all": (Room(2), Room(1)),
    "nothing left": (NEVER, Room(0)),
}


def make_trainer(folder: Path, name: str) -> FastTrainer:
    model = make_esm()
    if name != "plain":
        RUNS[name][RANK].watch(model.esm.encoder.layer[0])
    settings = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3, "per_device_train_batch_size": 4}
    fixed = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    policy = "stop" if name == "plain" else "step_down"
    passes = {"gradient_accumulation_steps": 2, "oom_policy": policy}
    args = FastTrainingArguments(str(folder / name), **settings, **passes, **fixed)
    return FastTrainer(model, args, pad_rows, make_tokens("masked_lm"))


def find(folder: Path) -> list:
    """The batch that each process trains with, where one has room for fewer rows, and what it tried."""
    model = make_esm()
    (Room(3) if RANK == 1 else NEVER).watch(model.esm.encoder.layer[0])
    settings = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3, "per_device_train_batch_size": 4}
    fixed = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    passes = {"gradient_accumulation_steps": 2, "find_batch_size": True, "embedding_cache_dir": str(folder / "cache")}
    args = FastTrainingArguments(str(folder / "found"), **settings, **passes, **fixed)
    trainer = FastTrainer(model, args, pad_rows, make_tokens("masked_lm"))
    trainer.train()
    save_numbers(folder, "found", trainer)
    tried = trainer.plan["find_batch_size"].evidence["tried"]
    return [trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps, tried]


def evaluate(folder: Path, room: Room) -> list:
    """Losses of evaluations, where process 1 has room for fewer rows, and how often that failed."""
    model = make_esm()
    room.only_training, room.only_evaluation = False, True
    (room if RANK == 1 else NEVER).watch(model.esm.encoder.layer[0])
    settings = {"max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 4, "eval_strategy": "steps"}
    fixed = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    given = {"eval_steps": 1, "per_device_eval_batch_size": 4, "oom_policy": "step_down"}
    args = FastTrainingArguments(str(folder / "evaluated"), **settings, **given, **fixed)
    rows = make_tokens("masked_lm")
    trainer = FastTrainer(model, args, pad_rows, rows, rows.select(range(11)))
    trainer.train()
    return [[e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e], room.num_failed]


def main(folder: Path) -> None:
    gc.freeze()
    report = {
        "found": find(folder),
        "evaluated": evaluate(folder, Room(1)),
        "evaluated whole": evaluate(folder, Room()),
    }
    for name in RUNS:
        trainer = make_trainer(folder, name)
        try:
            trainer.train()
            save_numbers(folder, name, trainer)
            error = ""
        except MemoryExhausted as raised:
            error = str(raised)
        rung = trainer.plan["oom_ladder"].evidence.get("rung", "")
        report[name] = [RUNS[name][RANK].num_failed if name != "plain" else 0, rung, error]
    (folder / f"report-{RANK}.json").write_text(json.dumps(report))
    leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What each process of a two-process test runs: `python resume_on_ranks.py FOLDER` under torchrun.

For each kind of training data: a run over two passes, one resumed in the second, and one that goes on where one process
stopped (FOLDER/alone has its checkpoints); `resume-RANK.json` in FOLDER holds the rows of their batches, and of a run
whose length-grouping sampler is not told the epoch. `whole-KIND.safetensors` are the weights.
"""

import gc
import json
import os
import sys
from pathlib import Path

from ranks import leave
from run_outcomes import losses, same_weights
from safetensors.torch import save_file
from token_rows import RecordingCollator
from train_on_ranks import make_model, make_rows, settings

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))
STEPS, SAVED = 10, 7  # five steps a pass
ROWS_PER_STEP, BUDGET = 4, 54  # of two processes, two rows or one budget each
NUM_ROWS = {"random": 17, "grouped": 17, "tokens": 20, "stream": 20, "shuffled stream": 20}  # 17: one is left over
KINDS = tuple(NUM_ROWS)


def settings_of(kind: str, keeps_step: bool) -> dict:
    """What a kind trains with; `keeps_step`: in the same steps on any number of processes."""
    if kind == "tokens":
        passes = 2 // int(os.environ.get("WORLD_SIZE", "1")) if keeps_step else 1
        return {"max_tokens_per_batch": BUDGET, "gradient_accumulation_steps": passes}
    given = {"per_device_train_batch_size": 2, **({"effective_batch_size": ROWS_PER_STEP} if keeps_step else {})}
    return {**given, **({"train_sampling_strategy": "group_by_length"} if kind == "grouped" else {})}


def train(folder: Path, kind: str, resume: str | Path | None = None, tell_epoch: bool = True, **given) -> FastTrainer:
    """A run in `folder`, or the continuation of a checkpoint."""
    rows = make_rows(NUM_ROWS[kind])
    if "stream" in kind:
        rows = rows.to_iterable_dataset(1)  # fewer shards than processes
    if kind == "shuffled stream":
        rows = rows.shuffle(seed=0, buffer_size=6)
    keeps_step = given.pop("keeps_step", True)
    given = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "logging_steps": 1, **given}
    args = FastTrainingArguments(**settings(folder, **settings_of(kind, keeps_step), **given))
    trainer = FastTrainer(make_model(), args, RecordingCollator(), rows)
    if not tell_epoch:
        trainer._ext_parts.loaders.on_epoch_begin = lambda *given, **more: None
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def rows_of_steps(ranks: list[list[list[int]]], passes: int, num_batches: int) -> list[list[int]]:
    """Rows of each optimizer step, from the batches of each process: `passes` a step, `num_batches` an epoch."""
    steps = []
    for start in range(0, min(map(len, ranks)), num_batches):
        for first in range(start, start + num_batches, passes):
            end = min(first + passes, start + num_batches)
            steps.append(sorted({row for own in ranks for batch in own[first:end] for row in batch}))
    return steps


def main(folder: Path) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    report = {}
    for kind in KINDS:
        whole = train(folder / kind, kind)
        resumed = train(folder / kind, kind, folder / kind / f"checkpoint-{SAVED}")
        grown = train(folder / "grown", kind, folder / "alone" / kind / f"checkpoint-{SAVED}", save_strategy="no")
        report[kind] = {
            "whole": whole.data_collator.batches[:STEPS],  # loaders fetch ahead
            "resumed": resumed.data_collator.batches[: STEPS - SAVED],
            "same_weights": same_weights(resumed.model, whole.model),
            "same_losses": losses(resumed) == losses(whole),
            "losses": losses(whole),
            "grown": grown.data_collator.batches[: STEPS - SAVED],
        }
        if RANK == 0:
            save_file(dict(whole.model.named_parameters()), folder / f"whole-{kind}.safetensors")
            save_file(dict(grown.model.named_parameters()), folder / f"grown-{kind}.safetensors")
    lost = train(folder / "grouped", "grouped", folder / "grouped" / f"checkpoint-{SAVED}", tell_epoch=False)
    report["lost"] = lost.data_collator.batches[: STEPS - SAVED]
    (folder / f"resume-{RANK}.json").write_text(json.dumps(report))
    leave(lost)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

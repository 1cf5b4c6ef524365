"""What each process of a two-process test runs: `python resume_on_ranks.py FOLDER` under torchrun.

For each kind of training data: a run over two passes, and one resumed in the second; `resume-RANK.json` in FOLDER holds
the rows of their batches, and of a run whose length-grouping sampler is not told the epoch.
"""

import gc
import json
import os
import sys
from pathlib import Path

from ranks import leave
from train_on_ranks import RecordingCollator, make_model, make_rows, settings

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))
NUM_ROWS, BATCH, STEPS, SAVED = 20, 2, 10, 7  # five steps a pass on two processes
KINDS = ("random", "grouped", "stream", "shuffled stream")


def train(folder: Path, kind: str, resume: bool = False, tell_epoch: bool = True, accumulation: int = 1) -> FastTrainer:
    """A run in `folder`, or the continuation of the one there from its checkpoint."""
    rows = make_rows(NUM_ROWS)
    given = {"train_sampling_strategy": "group_by_length"} if kind == "grouped" else {}
    if "stream" in kind:
        rows = rows.to_iterable_dataset(4)
    if kind == "shuffled stream":
        rows = rows.shuffle(seed=0, buffer_size=6)
    args = FastTrainingArguments(
        **settings(folder, max_steps=STEPS, save_strategy="steps", save_steps=SAVED, logging_steps=1, **given),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulation,
    )
    trainer = FastTrainer(make_model(), args, RecordingCollator(), rows)
    if not tell_epoch:
        build = trainer.get_train_dataloader

        def without_epoch():
            loader = build()
            del loader.batch_sampler.set_epoch  # what hf_ext adds to Accelerate's BatchSamplerShard
            return loader

        trainer.get_train_dataloader = without_epoch
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    return trainer


def same_weights(ours: FastTrainer, theirs: FastTrainer) -> bool:
    return all(bool((a == b).all()) for a, b in zip(ours.model.parameters(), theirs.model.parameters()))


def losses(trainer: FastTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: Path) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    report = {}
    for kind in KINDS:
        whole = train(folder / kind, kind)
        resumed = train(folder / kind, kind, resume=True)
        report[kind] = {
            "whole": whole.data_collator.batches[:STEPS],  # loaders fetch ahead
            "resumed": resumed.data_collator.batches[: STEPS - SAVED],
            "same_weights": same_weights(resumed, whole),
            "same_losses": losses(resumed) == losses(whole),
        }
    lost = train(folder / "grouped", "grouped", resume=True, tell_epoch=False)
    report["lost"] = lost.data_collator.batches[: STEPS - SAVED]
    (folder / f"resume-{RANK}.json").write_text(json.dumps(report))
    leave(lost)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""How much of hf_ext one plain save runs: functions and files, beside those of transformers and stock Trainer's save.

    python benchmarks/save_trace.py

One process, no speed-ups, an ESM-2 of two layers. From `_save_checkpoint` to the end of the step after it, at which the
checkpoint has its name. Writes `benchmarks/results/save_trace.json`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from datasets import Dataset
from transformers import EsmConfig, EsmForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_ext import FastTrainer, FastTrainingArguments

RESULT = Path(__file__).parent / "results" / "save_trace.json"
ROWS = Dataset.from_list([{"input_ids": [0, 5, 6, 7, 2], "attention_mask": [1] * 5, "labels": 0.5}] * 8)


class Trace(TrainerCallback):
    """Notes what is entered while it is on, in every thread."""

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[str, str]]] = defaultdict(set)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if event == "call" and package in ("hf_ext", "transformers"):
            self.seen[package].add((frame.f_code.co_filename, frame.f_code.co_qualname))

    def begin(self) -> None:
        threading.setprofile_all_threads(self.note) if sys.version_info >= (3, 12) else threading.setprofile(self.note)
        sys.setprofile(self.note)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def traced(cls: type, arguments: type, folder: str) -> dict[str, dict[str, int]]:
    trace = Trace()

    class Saves(cls):  # type: ignore[misc, valid-type]
        def _save_checkpoint(self, *args: Any) -> None:
            trace.begin()
            super()._save_checkpoint(*args)
            trace.end()

    def traced_save(write: Any) -> None:
        trace.begin()
        save(write)
        saver.finish()
        trace.end()

    config = EsmConfig(vocab_size=33, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config.update({"pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary", "num_labels": 1})
    given = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps", "report_to": "none", "disable_tqdm": True}
    # An override would be a plain save no more: others may write into its checkpoint.
    made = FastTrainer if cls is FastTrainer else Saves
    trainer = made(EsmForSequenceClassification(config), arguments(folder, use_cpu=True, **given), train_dataset=ROWS)
    if cls is FastTrainer:
        saver, save = trainer._ext_saver, trainer._ext_saver.save
        saver.save = traced_save
    trainer.train()
    return {
        package: {"functions": len(found), "files": len({file for file, _ in found})}
        for package, found in sorted(trace.seen.items())
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        found = {
            "FastTrainer": traced(FastTrainer, FastTrainingArguments, one),
            "Trainer": traced(Trainer, TrainingArguments, other),
        }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

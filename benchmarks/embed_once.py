"""What embedding once is worth: a loop that runs every row of every epoch through the encoders, one sequence at a time,
against training from the cache. Both in one process on one machine; the slow side on a sample, before and after.

    python benchmarks/embed_once.py --config recipes/configs/omicron.yaml --output_json RESULT.json

Uses a fresh cache, so that encoding is part of the fast side.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.building import build_collator, build_model
from hf_ext.affinity.scoring import compute_metrics, score_split
from hf_ext.affinity.task import TASK
from hf_ext.arguments.parser import FastArgumentParser
from hf_ext.arguments.presets import PRESETS
from hf_ext.data.arguments import DataArguments
from hf_ext.data.collators import SequenceCollator
from hf_ext.data.loading import load_data
from hf_ext.models.affinity import AffinityModel, AffinityOutput
from hf_ext.reporting.run_log import start_run_log
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

logger = logging.getLogger("hf_ext")


@dataclass
class BenchmarkArguments:
    """Sizes of the comparison."""

    output_json: str = field(metadata={"help": "Where the measurements go."})
    slow_rows: int = field(default=600, metadata={"help": "Rows that stand for the slow side."})
    loop_batch_size: int = field(default=12, metadata={"help": "Rows per pass of the slow loop."})
    loop_accumulation: int = field(default=4, metadata={"help": "Passes per optimizer step of the slow loop."})


@dataclass
class Task:
    """What both sides work on."""

    bench: BenchmarkArguments
    model_args: AffinityArguments
    data_args: DataArguments
    args: FastTrainingArguments
    splits: Any
    parser: FastArgumentParser


class RowByRow(nn.Module):
    """An `AffinityModel` that takes rows of text, and encodes each input of each row by itself."""

    def __init__(self, model: AffinityModel, collator: SequenceCollator):
        super().__init__()
        model.attach_encoders()
        self.model, self.collator = model, collator

    def forward(self, rows: list[dict[str, Any]]) -> AffinityOutput:
        """Loss and predictions of `rows`."""
        pooled = {name: torch.cat([self.embed(name, row) for row in rows]) for name in self.collator.columns}
        labels = torch.tensor([float(row["label"]) for row in rows])
        return self.model(embeddings=pooled, labels=labels, missing={})

    def embed(self, name: str, row: dict[str, Any]) -> torch.Tensor:
        """The pooled embedding of one input of one row: (1, width), float32."""
        batch = self.collator.encode_rows(name, [row])
        with torch.no_grad():
            return self.model.encode(name, dict(batch))


def time_slow_rows(task: Task, rows: list[dict[str, Any]]) -> list[float]:
    """Seconds per row, one value per pass: each sequence encoded alone, then the head trained."""
    set_seed(task.args.seed)
    model = build_model(task.model_args, task.data_args.sequence_columns)
    loop = RowByRow(model, build_collator(model, task.data_args, task.model_args.max_length)).train()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    size, seconds = task.bench.loop_batch_size, []
    for step, start in enumerate(range(0, len(rows), size)):
        batch, began = rows[start : start + size], time.perf_counter()
        (loop(batch).loss / task.bench.loop_accumulation).backward()
        if (step + 1) % task.bench.loop_accumulation == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds.append((time.perf_counter() - began) / len(batch))
    return seconds


def make_trainer(task: Task, output_dir: str, **changes: Any) -> FastTrainer:
    """A FastTrainer for the task's data, with a fresh model and arguments changed as given."""
    set_seed(task.args.seed)
    args = FastTrainingArguments(**{**_init_fields(task.args), "output_dir": output_dir, **changes})
    args.mark_explicit(task.parser.explicit | frozenset(changes))
    model = build_model(task.model_args, task.data_args.sequence_columns)
    return FastTrainer(
        model,
        args,
        data_collator=build_collator(model, task.data_args, task.model_args.max_length),
        train_dataset=task.splits["train"],
        eval_dataset=task.splits["validation"],
        compute_metrics=compute_metrics,
    )


def _init_fields(args: FastTrainingArguments) -> dict[str, Any]:
    derived = ("accelerator_config", "gradient_checkpointing", "gradient_checkpointing_kwargs", "local_rank")
    names = (name for name, spec in args.__dataclass_fields__.items() if spec.init and name not in derived)
    return {name: getattr(args, name) for name in names}


def run_fast(task: Task, folder: str) -> dict[str, Any]:
    """The whole run at max_speed's batch, then one epoch at the slow loop's batch from the filled cache."""
    cache = str(Path(folder) / "cache")
    began = time.perf_counter()
    trainer = make_trainer(task, str(Path(folder) / "run"), embedding_cache_dir=cache)
    trainer.train()
    trainer.save_model()
    whole = time.perf_counter() - began
    test = score_split(trainer, task.splits, "test", task.model_args.binder_threshold, task.data_args.group_column)
    evidence = trainer.plan["embedding_cache"].evidence
    trainer.end()

    settings = {
        "per_device_train_batch_size": task.bench.loop_batch_size,
        "gradient_accumulation_steps": task.bench.loop_accumulation,
        "num_train_epochs": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }
    again = make_trainer(task, str(Path(folder) / "epoch"), embedding_cache_dir=cache, **settings)
    again.embed_dataset(task.splits["train"])
    again.fit_scaling()
    began = time.perf_counter()
    again.train()
    epoch = time.perf_counter() - began
    encoded_again = again.plan["embedding_cache"].evidence["num_encoded"]
    again.end()
    return {
        "whole_run_seconds": whole,
        "encoding": {key: evidence[key] for key in ("num_encoded", "encoding_seconds", "residues_per_second")},
        "decisions": [[one.name, one.status, one.reason] for one in trainer.plan.decisions],
        "epoch_at_loop_batch_seconds": epoch,
        "encoded_by_second_run": encoded_again,
        "batch_size": trainer.args.per_device_train_batch_size,
        "test": test.to_dict(),
    }


def main() -> None:
    """Measures and writes the JSON."""
    parser = FastArgumentParser(
        (BenchmarkArguments, AffinityArguments, DataArguments, FastTrainingArguments),
        presets=PRESETS,
        defaults=TASK.defaults,
        description=__doc__,
    )
    bench, model_args, data_args, args = parser.parse_args_into_dataclasses()
    with tempfile.TemporaryDirectory() as folder:
        start_run_log(folder)
        splits = load_data(data_args, output_dir=folder, seed=args.seed).splits
        task = Task(bench, model_args, data_args, args, splits, parser)
        rows = splits["train"].shuffle(seed=args.seed).select(range(bench.slow_rows)).to_list()
        half = len(rows) // 2
        slow = time_slow_rows(task, rows[:half])
        fast = run_fast(task, folder)
        slow += time_slow_rows(task, rows[half:])
    per_row, num_train, epochs = statistics.median(slow), len(splits["train"]), args.num_train_epochs
    slow_epoch = per_row * num_train
    result = {
        "what": "affinity head on frozen encoders: rows encoded one sequence at a time, against cached embeddings",
        "machine": {"torch": torch.__version__, "num_threads": torch.get_num_threads()},
        "num_train_rows": num_train,
        "num_epochs": epochs,
        "slow": {
            "num_rows": len(rows),
            "note": f"measured on {len(rows)} rows, half before and half after the fast side; scaled to the epoch",
            "batch_size": bench.loop_batch_size,
            "accumulation": bench.loop_accumulation,
            "seconds_per_row_median": per_row,
            "seconds_per_row_quartiles": statistics.quantiles(slow, n=4),
            "epoch_seconds": slow_epoch,
            "whole_run_days": slow_epoch * epochs / 86400,
        },
        "fast": fast,
        "epoch_speedup_at_loop_batch": slow_epoch / fast["epoch_at_loop_batch_seconds"],
        "whole_run_speedup": slow_epoch * epochs / fast["whole_run_seconds"],
    }
    path = Path(bench.output_json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, default=str) + "\n")
    logger.info("%s", json.dumps({key: value for key, value in result.items() if key != "fast"}, indent=2))


if __name__ == "__main__":
    main()

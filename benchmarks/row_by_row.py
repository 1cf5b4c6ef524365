"""The loop that scripts on frozen encoders are written with: in every step, each row by itself through every encoder.

    python benchmarks/row_by_row.py --sample_rows 96 [arguments of recipes/max_speed.py]

Nothing is cached; a Python loop in `forward` tokenizes and
encodes one input after the other, in float32 and without a gradient, and the head trains on their pooled embeddings.
With transformers' own Trainer, on a sample of the training rows, without evaluation or checkpoints; of the run only
`throughput.json` is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.building import build_collator, build_model, fill_in_demo, settle_training
from hf_ext.affinity.rows import load_rows
from hf_ext.data.arguments import DataArguments
from hf_ext.data.collators import SequenceCollator
from hf_ext.data.demo import make_demo_encoders
from hf_ext.errors import ArgumentError, exit_on_errors
from hf_ext.models.affinity import AffinityModel, AffinityOutput
from hf_ext.reporting.run_log import start_run_log
from hf_ext.reporting.throughput import WARMUP_STEPS, ThroughputCallback
from hf_ext.running import parse_command, stock_arguments
from hf_ext.training_args import FastTrainingArguments

# What the loop is without, whatever the recipe is asked for.
PLAIN: dict[str, Any] = {
    **dict.fromkeys(("bf16", "fp16", "torch_compile", "push_to_hub", "load_best_model_at_end"), False),
    **dict.fromkeys(("eval_strategy", "save_strategy"), "no"),
    "report_to": "none",
    "hub_strategy": "end",
    "remove_unused_columns": False,
}


@dataclass
class SampleArguments:
    """How much of the training data stands for all of it."""

    sample_rows: int = field(default=96, metadata={"help": "Training rows to measure, after the warm-up steps."})

    def __post_init__(self) -> None:
        if self.sample_rows < 1:
            raise ArgumentError(f"--sample_rows {self.sample_rows}: must be at least 1.")


class RowByRow(nn.Module):
    """An `AffinityModel` that takes rows of text, and encodes each input of each row by itself."""

    def __init__(self, model: AffinityModel, collator: SequenceCollator):
        super().__init__()
        model.attach_encoders()
        self.model, self.collator = model, collator

    def forward(self, rows: Sequence[Mapping[str, Any]], labels: torch.Tensor) -> AffinityOutput:
        """Loss and predictions of `rows`, with `labels` (n,)."""
        pooled = {name: torch.cat([self.embed(name, row) for row in rows]) for name in self.collator.columns}
        absent = {
            name: torch.tensor([not any(row[c] for c in self.collator.columns[name]) for row in rows]).to(labels.device)
            for name in self.collator.optional_inputs
        }
        return self.model(embeddings=pooled, labels=labels, missing=absent)

    def embed(self, name: str, row: Mapping[str, Any]) -> torch.Tensor:
        """The pooled embedding of one input of one row: (1, width), float32."""
        batch = self.collator.encode_rows(name, [row])
        with torch.no_grad():
            return self.model.encode(name, {key: value.to(self.model.device) for key, value in batch.items()})


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as they are, and their labels."""
    return {"rows": list(rows), "labels": torch.tensor([float(row["label"]) for row in rows])}


def measure(args: TrainingArguments, sample_rows: int, model: RowByRow, rows: Any) -> Trainer:
    """Trains on `sample_rows` of `rows`, drawn by the seed, after the warm-up; leaves `throughput.json`."""
    rows_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    args.max_steps = WARMUP_STEPS + math.ceil(sample_rows / rows_per_step)
    args._n_gpu = min(1, args.n_gpu)  # such a loop knows one device
    throughput = ThroughputCallback(model)
    trainer = Trainer(model, args, data_collator=collate, train_dataset=rows, callbacks=[throughput])
    trainer.train()
    return trainer


def main(words: Sequence[str] | None = None) -> None:
    """Runs the measurement.

    Raises:
        ArgumentError: an encoder trains, or the data is a stream, of which no sample is drawn.
    """
    _, (sample, model_args, data_args, args) = parse_command(
        (SampleArguments, AffinityArguments, DataArguments, FastTrainingArguments), {}, __doc__, words
    )
    training, _ = settle_training(model_args, args.use_peft)
    if {*training} != {"frozen"}:
        raise ArgumentError(f"row_by_row is a loop on frozen encoders: --tower_training {' '.join(training)}.")
    if data_args.streaming:
        raise ArgumentError("row_by_row draws a sample of all training rows: leave --streaming out.")
    log = start_run_log(args.output_dir, args.process_index == 0)
    set_seed(args.seed)
    table = None
    if data_args.dataset_name is None:
        with args.main_process_first(desc="demo encoders"):
            encoders = make_demo_encoders(Path(str(args.output_dir)) / "demo_encoders")
        table = fill_in_demo(model_args, data_args, encoders)
    rows = load_rows(model_args, data_args, output_dir=args.output_dir, seed=args.seed, table=table)
    model_args.num_seeds, model_args.init_head_from = 1, None
    model = build_model(model_args, data_args.sequence_columns)
    plain = stock_arguments(args, frozenset(), **PLAIN)
    train = rows.splits["train"]
    log.info("%d of %d training rows, each by itself through every encoder.", sample.sample_rows, len(train))
    module = RowByRow(model, build_collator(model, data_args, model_args.max_length))
    measure(plain, sample.sample_rows, module, train)


if __name__ == "__main__":
    with exit_on_errors():
        main()

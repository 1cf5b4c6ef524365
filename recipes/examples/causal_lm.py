"""Any causal language model: GPT-2 from scratch learns to repeat what was said.

    accelerate launch --quiet recipes/examples/causal_lm.py                      # generated data
    accelerate launch --quiet recipes/examples/causal_lm.py --gradient_accumulation_steps 4

What is said of proteins elsewhere holds here: the plan says of each speed-up whether it serves this model, killed runs
go on where they were (`--resume auto`, the default), and beside the loss stands that of a table of which word follows
which. `--stock_trainer true` trains with transformers.Trainer itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from hf_ext.recipes.examples.any_model import (
    TOKEN_METRICS,
    AnyModelArguments,
    BigramTable,
    build_trainer,
    compute_next_tokens,
    data_seed,
    finish_any_run,
    judge_next_tokens,
    sum_next_tokens,
)
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from hf_ext.arguments.checks import check_metric_name
from hf_ext.arguments.parser import parse_command
from hf_ext.checkpoints.run_lock import run_folder
from hf_ext.errors import exit_on_errors
from hf_ext.training_args import FastTrainingArguments

DEFAULTS = {
    "preset": "max_speed",
    # Rows of one length in a batch teach the place to look at for that length alone.
    "without": ["length_grouping"],
    "output_dir": "outputs/causal_lm",
    "learning_rate": 3e-3,
    "warmup_steps": 0.1,
    "num_train_epochs": 5,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "metric_for_best_model": "perplexity",
    "resume": "auto",
    "logging_steps": 20,
    "report_to": "none",
}
PAD, BEGIN, AGAIN, END = range(4)
NUM_WORDS = 8
TOKENS: dict[str, Any] = {
    "vocab_size": END + 1 + NUM_WORDS,
    "pad_token_id": PAD,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
}
NO_DROPOUT: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def make_rows(num_rows: int, seed: int) -> Dataset:
    """3 to 8 random words, then the same words again: the second half can be known, the first cannot."""
    generator = np.random.default_rng(seed)
    halves = [
        generator.integers(END + 1, END + 1 + NUM_WORDS, generator.integers(3, 9)).tolist() for _ in range(num_rows)
    ]
    rows = [[BEGIN, *half, AGAIN, *half, END] for half in halves]
    return Dataset.from_dict({"input_ids": rows, "length": [len(row) for row in rows]})


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `labels` (n, longest), int64; nothing is learned from padding (-100)."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True, PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.masked_fill(ids == PAD, -100)}


def main(argv: list[str] | None = None) -> dict:
    """Runs the example; returns what `all_results.json` holds."""
    parser, (example, args) = parse_command((AnyModelArguments, FastTrainingArguments), DEFAULTS, __doc__, argv)
    check_metric_name(args.metric_for_best_model, TOKEN_METRICS)
    with run_folder(args):
        set_seed(args.seed)
        rows = make_rows(example.num_rows + example.num_test_rows, data_seed(args))
        training, held_out = rows.select(range(example.num_rows)), rows.select(range(example.num_rows, len(rows)))
        model = GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=64, n_layer=2, n_head=4, **TOKENS, **NO_DROPOUT))
        trainer = build_trainer(
            *(model, args, example, parser),
            data_collator=collate,
            train_dataset=training,
            eval_dataset=held_out,
            preprocess_logits_for_metrics=sum_next_tokens,  # 12 bytes a row are kept, and not all logits
            compute_metrics=compute_next_tokens,
        )
        trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        table = BigramTable.fit(training["input_ids"], TOKENS["vocab_size"])
        scores = judge_next_tokens(trainer.predict(held_out), table, args.seed)
        return finish_any_run(trainer, trained, parser, example, scores)


if __name__ == "__main__":
    with exit_on_errors():
        main()

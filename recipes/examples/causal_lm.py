"""Any causal language model: GPT-2 from scratch learns to repeat what was said.

    accelerate launch recipes/examples/causal_lm.py                      # generated data
    accelerate launch recipes/examples/causal_lm.py --gradient_accumulation_steps 4

What is said of proteins elsewhere holds here: the plan says of each speed-up whether it serves this model, killed runs
go on where they were (`--resume auto`, the default), and beside the loss stands that of a table of which word follows
which. `--stock_trainer true` trains with transformers.Trainer itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from any_model import (
    DEFAULTS,
    TOKEN_METRICS,
    AnyModelTask,
    BigramTable,
    compute_next_tokens,
    data_seed,
    judge_next_tokens,
    sum_next_tokens,
)
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from hf_ext import Run, exit_on_errors

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


class CausalLM(AnyModelTask):
    """Train GPT-2 from scratch to repeat what was said, on generated rows."""

    recipe = "examples/causal_lm"
    metrics = TOKEN_METRICS
    defaults = {
        **DEFAULTS,
        # Rows of one length in a batch teach the place to look at for that length alone.
        "without": ["length_grouping"],
        "output_dir": "outputs/causal_lm",
        "learning_rate": 3e-3,
        "num_train_epochs": 5,
        "metric_for_best_model": "perplexity",
    }

    def load(self, run: Run) -> tuple[Dataset, Dataset]:
        """Training and held-out rows."""
        num_rows = run.model_args.num_rows
        rows = make_rows(num_rows + run.model_args.num_test_rows, data_seed(run.args))
        return rows.select(range(num_rows)), rows.select(range(num_rows, len(rows)))

    def build(self, run: Run, data: tuple[Dataset, Dataset]) -> dict[str, Any]:
        """What Trainer takes."""
        config = GPT2Config(n_positions=32, n_embd=64, n_layer=2, n_head=4, **TOKENS, **NO_DROPOUT)
        return {
            "model": GPT2LMHeadModel(config),
            "data_collator": collate,
            "train_dataset": data[0],
            "eval_dataset": data[1],
            "preprocess_logits_for_metrics": sum_next_tokens,  # 12 bytes a row are kept, and not all logits
            "compute_metrics": compute_next_tokens,
        }

    def judge(self, run: Run, trainer: Any, data: tuple[Dataset, Dataset]) -> dict[str, Any]:
        """Loss beside that of a table of which word follows which."""
        table = BigramTable.fit(data[0]["input_ids"], TOKENS["vocab_size"])
        return judge_next_tokens(trainer.predict(data[1]), table, run.args.seed)


if __name__ == "__main__":
    with exit_on_errors():
        CausalLM().main()

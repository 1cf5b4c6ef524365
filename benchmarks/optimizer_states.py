"""AdamW with states in 8 bits beside AdamW, masked language modelling from scratch on generated chains, over seeds.

Chains are drawn from a random first-order chain of residues, so there is something to learn; ESM-2's form, 4 layers of
width 128, 250 steps of 16 chains. Both sides of a seed have the same weights, rows and masks. The loss is that of the
last 50 steps; states are those in the optimizer after training.

python benchmarks/optimizer_states.py --output benchmarks/results/optimizer_states.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import EsmConfig, EsmForMaskedLM

from hf_ext import FastTrainer, FastTrainingArguments

SIDES = ("adamw_torch", "adamw_8bit")
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4}
ROWS, STEPS, SEEDS = 2_000, 250, 3
MASK, FIRST, IGNORED = 32, 4, -100


def make_rows() -> Dataset:
    """Chains of 20 to 59 residues, 15 % of which are masked."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(20, 20, generator=generator).pow(6)
    rows = []
    for length in torch.randint(20, 60, (ROWS,), generator=generator).tolist():
        chain = [int(torch.randint(0, 20, (1,), generator=generator))]
        while len(chain) < length:
            chain.append(int(torch.multinomial(chances[chain[-1]], 1, generator=generator)))
        ids = torch.tensor(chain) + FIRST
        is_masked = torch.rand(length, generator=generator) < 0.15
        is_masked[0] = True
        labels = ids.where(is_masked, torch.tensor(IGNORED))
        rows.append({"input_ids": ids.masked_fill(is_masked, MASK).tolist(), "labels": labels.tolist()})
    return Dataset.from_list(rows)


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [1] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] + [IGNORED] * (width - len(row["labels"])) for row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(1).long(), "labels": labels}


def train(side: str, seed: int, rows: Dataset, folder: str, steps: int = STEPS, use_cpu: bool = True) -> dict[str, Any]:
    """One run: its last logged loss, and bytes of states per trained number."""
    torch.manual_seed(seed)
    special = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": MASK, "position_embedding_type": "rotary"}
    fixed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = EsmForMaskedLM(EsmConfig(**special, **fixed, **SHAPE))
    settings = {"max_steps": steps, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "warmup_steps": 20}
    quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": min(50, steps), "disable_tqdm": True}
    args = FastTrainingArguments(output_dir=folder, optim=side, seed=seed, use_cpu=use_cpu, **settings, **quiet)
    trainer = FastTrainer(model, args, pad, rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    kept = [value for state in trainer.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_bytes = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in kept}.values())
    return {"side": side, "seed": seed, "losses": losses, "bytes_per_number": num_bytes / trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows, runs = make_rows(), []
    for seed in range(SEEDS):
        for side in SIDES:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(train(side, seed, rows, folder))
            print(runs[-1], flush=True)
    last = {side: [run["losses"][-1] for run in runs if run["side"] == side] for side in SIDES}
    differences = [ours - theirs for theirs, ours in zip(*last.values())]
    result = {
        "runs": runs,
        "loss": {side: {"mean": statistics.mean(x), "sd": statistics.stdev(x)} for side, x in last.items()},
        "difference": {"mean": statistics.mean(differences), "sd": statistics.stdev(differences)},
        "torch": torch.__version__,
    }
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What each process of a nightly test runs under torchrun: `python labels_on_ranks.py FOLDER`, every kind of label."""

import gc
import os
import sys
from pathlib import Path

import numpy as np
import torch
from labelled_rows import KINDS, make_trainer
from ranks import leave

WEIGHTS = {"classes": [2.0, 0.5, 1.0], "sets": [[1.0, 3.0, 1.0], [2.0, 1.0, 5.0]]}
NUM_ROWS = 13  # two steps of 8 and 5 rows: processes have unequal numbers, and labels that are not known
PER_RANK = "per_rank"  # the broken twin: each process divides by the labels that it knows itself
CASES = {**{name: (name, "full") for name in KINDS}, "cached_residues": ("residue_classes", "frozen")}
CASES["windows"] = ("residue_classes", "lora")  # of proteins of up to 33 residues
CASES |= {f"weighted_{name}": (name, "full") for name in WEIGHTS}
CASES |= {"taught_numbers": ("numbers", "full"), "taught_classes": ("classes", "frozen")}  # by a teacher, too


def train(case: str, folder: Path, encoder: str):
    """Trains two steps; writes weights, and predictions of all rows with their labels, as one process sees them."""
    name, training = CASES.get(case, ("residue_classes", "full"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {"max_steps": 2, "per_device_train_batch_size": 4 // world_size, "gradient_accumulation_steps": 2}
    settings |= {"per_device_eval_batch_size": 3, "adam_epsilon": 1e-6, "use_cpu": world_size == 1}
    settings |= {"average_tokens_across_devices": case != PER_RANK}
    settings |= {"speedups": ["embedding_cache"]} if training == "frozen" else {}
    trainer = make_trainer(name, folder, encoder, training, num=NUM_ROWS, taught=case.startswith("taught"), **settings)
    if case == "windows":
        trainer.data_collator.too_long = "window"
        trainer.data_collator.resolve_long(None, 10)
    if case.startswith("weighted"):
        trainer.model.config.update({"class_weights": WEIGHTS[name], "loss": "focal"})
    trainer.model.head.layers[-1].bias.data = torch.linspace(-1, 2, trainer.model.head.num_outputs or 1)
    trainer.train()
    output = trainer.predict(trainer.eval_dataset)
    weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters() if weight.requires_grad])
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    found = {"weights": weights.numpy(), "losses": losses, "loss": output.metrics["test_loss"]}
    np.savez(folder / f"{case}-{world_size}-{trainer.args.process_index}.npz", **found, predictions=output.predictions)
    return trainer


if __name__ == "__main__":
    gc.freeze()  # Trainer collects garbage before each run
    for case in (*CASES, PER_RANK):
        last = train(case, Path(sys.argv[1]), str(Path(sys.argv[1]) / "encoders" / "esm"))
    leave(last)

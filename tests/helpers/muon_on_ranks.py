"""What each process of a two-process test runs: `python muon_on_ranks.py FOLDER`, alone or under torchrun.

Writes to FOLDER the losses and final weights of 20 steps of Muon, and of a run that goes on from the tenth.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from miniature_esm import WIDE, make_esm
from ranks import leave
from run_outcomes import losses
from safetensors.torch import save_file
from token_rows import stack_rows
from transformers import EsmForMaskedLM

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}


def make_model() -> EsmForMaskedLM:
    model = make_esm(EsmForMaskedLM, **WIDE)
    model.esm.contact_head.requires_grad_(False)  # gets no gradient, which stops DDP
    return model


def make_rows() -> Dataset:
    ids = torch.randint(4, 24, (40, 16), generator=torch.Generator().manual_seed(0))
    masked = torch.arange(16) % 5 == 1
    return Dataset.from_dict({"input_ids": ids.masked_fill(masked, 32).tolist(), "labels": ids.tolist()})


def train(folder: Path, batch: int, resume: str | None = None, **given) -> FastTrainer:
    """Takes 20 steps of 8 rows: `batch` rows a pass and process, clipped, with weight decay, in two passes a step.

    Muon's iteration is bfloat16: a gradient that one process sums in another order than two leaves weights up to 1e-5
    apart at this learning rate, and 1.7e-4 at ten times it (1e-7 were the iteration float32).
    """
    fixed = {"max_steps": 20, "learning_rate": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1}
    steps = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 2, "save_strategy": "no", "seed": 3}
    args = FastTrainingArguments(str(folder), **{**QUIET, **fixed, **steps, "speedups": "muon", **given})
    trainer = FastTrainer(make_model(), args, stack_rows, make_rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: FastTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def main(folder: Path) -> None:
    gc.freeze()
    whole = train(folder / "whole", 2, save_strategy="steps", save_steps=10)
    resumed = train(folder / "resumed", 2, str(folder / "whole" / "checkpoint-10"))
    save_file(weights(whole), folder / f"whole-{RANK}.safetensors")
    save_file(weights(resumed), folder / f"resumed-{RANK}.safetensors")
    report = {"losses": losses(whole), "world_size": whole.args.world_size}
    (folder / f"report-{RANK}.json").write_text(json.dumps(report))
    leave(resumed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What each process of a two-process test runs: `python muon_sharded_on_ranks.py FOLDER`, alone or under torchrun.

Under torchrun: FSDP2 on the CPU, which Accelerate leaves out unless it takes the processes for GPUs. Writes to FOLDER
the losses and gathered weights of 20 steps of stock Trainer with Muon, and of a run that goes on from the tenth.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from muon_on_ranks import QUIET, make_model, make_rows
from run_outcomes import losses
from safetensors.torch import save_file
from token_rows import stack_rows
from transformers import Trainer, TrainingArguments

from hf_ext.models.muon import MuonAdamW, block_matrices

FSDP2 = {
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "EsmLayer",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


class MuonTrainer(Trainer):
    """As a caller without FastTrainer would use the optimizer."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = MuonAdamW(super().create_optimizer(model), block_matrices(self.model))
        return self.optimizer


def train(folder: Path, batch: int, resume: str | None = None, **given) -> MuonTrainer:
    """20 steps of 8 rows, clipped, with weight decay; every row has equally many labels, so means may be averaged."""
    fixed = {"max_steps": 20, "learning_rate": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1}
    fixed |= {"per_device_train_batch_size": batch, "save_strategy": "no", "seed": 3}
    args = TrainingArguments(str(folder), **{**QUIET, **fixed, **given})
    trainer = MuonTrainer(make_model(), args, stack_rows, make_rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def gathered(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole weights; raises where one is not sharded over the processes."""
    return {name: weight.full_tensor().detach().clone() for name, weight in trainer.model.named_parameters()}


def main(folder: Path) -> None:
    os.environ.update(FSDP2)
    backend = ("gloo", DistributedType.MULTI_GPU)
    with mock.patch.object(PartialState, "_prepare_backend", return_value=backend):
        whole = train(folder / "whole", 4, use_cpu=False, save_strategy="steps", save_steps=10)
        resumed = train(folder / "resumed", 4, str(folder / "whole" / "checkpoint-10"), use_cpu=False)
    weights = {"whole": gathered(whole), "resumed": gathered(resumed)}
    if whole.args.process_index == 0:
        for name, tensors in weights.items():
            save_file(tensors, folder / f"{name}.safetensors")
        report = {"losses": losses(whole), "kind": str(whole.accelerator.distributed_type)}
        (folder / "report.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an interpreter that goes down while a model is wrapped


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What each process runs: `python unused_on_ranks.py FOLDER`, under torchrun; with and without DDP's search.

Writes losses and weights of each run, and `report-RANK.json`: how DDP was set up.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from equal_cases import make_esm, make_tokens, save_numbers
from ranks import leave
from token_rows import pad_rows
from torch import nn

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RUNS = {  # name -> speed-ups and what the user sets
    "searching": {"speedups": []},
    "not": {"speedups": ["ddp"]},
    "asked": {"speedups": ["ddp"], "ddp_find_unused_parameters": True},
    "spare": {"speedups": ["ddp"]},  # of a model with weights that no pass uses
    "spare-searching": {"speedups": []},
    "own": {"speedups": ["ddp"]},  # with a loss of the user's that does not go through the head
    "own-searching": {"speedups": []},
    "function": {"speedups": ["ddp"]},  # the same as a function
    "function-searching": {"speedups": []},
    "later": {"speedups": ["ddp"]},  # which is assigned to a trainer that is made
    "later-searching": {"speedups": []},
}


def skip_head(outputs, labels, num_items_in_batch=None):
    return outputs["hidden_states"][-1].square().mean()


class SkipsHead(FastTrainer):
    """Trains without the masked-language-model head, and once more without the last layer."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, output_hidden_states=True)
        loss = outputs["hidden_states"][-2].square().mean()
        return (loss, outputs) if return_outputs else loss


def make_trainer(folder: Path, name: str) -> FastTrainer:
    model = make_esm()
    if name.startswith("spare"):
        torch.manual_seed(0)
        model.spare = nn.Linear(2, 2)
    settings = {"max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "per_device_train_batch_size": 4}
    fixed = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    args = FastTrainingArguments(str(folder / name), gradient_accumulation_steps=2, **settings, **fixed, **RUNS[name])
    kind = name.split("-")[0]
    model.config.output_hidden_states = kind in ("function", "later")
    cls, given = (SkipsHead if kind == "own" else FastTrainer), {}
    if kind == "function":
        given = {"compute_loss_func": skip_head}
    trainer = cls(model, args, pad_rows, make_tokens("masked_lm"), **given)
    if kind == "later":
        trainer.compute_loss_func = skip_head
    return trainer


def main(folder: Path) -> None:
    gc.freeze()
    report = {}
    for name in RUNS:
        trainer = make_trainer(folder, name)
        trainer.train()
        wrapped, decision = trainer.model_wrapped, trainer.plan["ddp"]
        again = decision.evidence.get("searches_again_for")
        report[name] = [wrapped.find_unused_parameters, wrapped.gradient_as_bucket_view, decision.reason, again]
        save_numbers(folder, name, trainer)
    (folder / f"report-{trainer.args.process_index}.json").write_text(json.dumps(report))
    leave(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The same run by stock Trainer and by FastTrainer, in numbers that can be compared to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from token_rows import pad_rows
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

SIZES = {
    "vocab_size": 24,
    "pad_token_id": 1,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 3,
}
FAMILIES = {
    "Esm": {"mask_token_id": 23, "position_embedding_type": "rotary"},
    "Bert": {},
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 1}
    | {"eos_token_id": 2},
}


class PlainClassifier(nn.Module):
    """No model of transformers: three classes from the mean of token embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(24, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> dict[str, Any]:
        mask = attention_mask[..., None]
        logits = self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "Plain":
        return PlainClassifier()
    family = name.rsplit("For", 1)[0]
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    return getattr(transformers, name)(config)


def make_rows(name: str, num: int, seed: int = 0) -> Dataset:
    """Rows of 3 to 12 tokens; labels of tokens, some of them left out, or of rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(num):
        ids = torch.randint(4, 23, (int(torch.randint(3, 13, (1,), generator=generator)),), generator=generator)
        ids[-1] = 2  # T5's end of a sequence
        labels = [int(token) % 3 if t % 3 != i % 3 else -100 for t, token in enumerate(ids)]
        rows.append({"input_ids": ids.tolist(), "labels": labels if "Token" in name else i % 3})
    return Dataset.from_list(rows)


@dataclass
class Numbers:
    """What a run shows of itself."""

    losses: list[float]
    grad_norms: list[float]
    eval_losses: list[float]
    test_loss: float
    best: tuple[int | None, float | None]
    weights: dict[str, torch.Tensor]

    def differences(self, other: Numbers) -> list[str]:
        """Names of what is not the same to the bit."""
        plain = [f.name for f in fields(self) if f.name != "weights"]
        names = [name for name in plain if getattr(self, name) != getattr(other, name)]
        same = self.weights.keys() == other.weights.keys() and all(
            torch.equal(weight, other.weights[name]) for name, weight in self.weights.items()
        )
        return names if same else [*names, "weights"]


def settings(folder: Path, **given: Any) -> dict[str, Any]:
    """Arguments of a run of 3 steps that evaluates after each.

    It saves nothing, unless told to, and does not load the best model: stock Trainer would lose ESM's layer norms.
    """
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "metric_for_best_model": "eval_loss",
        **given,
    }


def run(trainer: Trainer) -> Numbers:
    trainer.train()
    history, state = trainer.state.log_history, trainer.state
    return Numbers(
        losses=[log["loss"] for log in history if "loss" in log],
        grad_norms=[log["grad_norm"] for log in history if "grad_norm" in log],
        eval_losses=[log["eval_loss"] for log in history if "eval_loss" in log] + [trainer.evaluate()["eval_loss"]],
        test_loss=trainer.predict(trainer.eval_dataset).metrics["test_loss"],
        best=(state.best_global_step, state.best_metric),
        weights={name: weight.detach().clone() for name, weight in trainer.model.state_dict().items()},
    )


def run_both(
    folder: Path,
    name: str,
    override: Callable[[type], type] = lambda base: base,
    after: Callable[[Any], None] = lambda trainer: None,
    args_cls: type = FastTrainingArguments,
    extra: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    num_rows: int = 24,
    **given: Any,
) -> tuple[Numbers, Numbers]:
    """Numbers of FastTrainer and of stock Trainer.

    Args:
        name: of a model class, or "Plain".
        override: makes a subclass of a trainer class.
        after: is called with the trainer that was made.
        args_cls: of the arguments that FastTrainer gets.
        extra: more arguments of the constructor, from the model.
        num_rows: of training.
        given: training arguments.
    """
    numbers = []
    for cls, arguments in ((FastTrainer, args_cls), (Trainer, TrainingArguments)):
        model = make_model(name)
        args = arguments(**settings(folder / cls.__name__, **given))
        rows, evals = make_rows(name, num_rows), make_rows(name, 11, seed=1)
        trainer = override(cls)(
            model, args, data_collator=pad_rows, train_dataset=rows, eval_dataset=evals, **extra(model)
        )
        after(trainer)
        numbers.append(run(trainer))
    return numbers[0], numbers[1]

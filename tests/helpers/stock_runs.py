"""Runs of stock Trainer and of FastTrainer on the same tiny models, which take up each other's checkpoints."""

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from faulty_runs import Watch, make_lora, make_rows
from miniature_esm import make_narrow_esm
from token_rows import stack_rows
from transformers import EsmForMaskedLM, T5Config, T5ForSequenceClassification, Trainer, TrainingArguments

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_STEPS, SAVED = 6, 3
NUM_LAYERS = 2
LAYER_NORMS = 4 * NUM_LAYERS  # entries of ESM's state dict that stock Trainer saves under other names than it reads
EOS = 1
KINDS = ("ESM regression", "masked LM", "LoRA", "T5")
ESM_KINDS = KINDS[:2]
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "seed": 3,
    "per_device_train_batch_size": 2,
    "max_steps": NUM_STEPS,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": SAVED,
}
# The highest loss is the best: the model of the first evaluation, not of the last.
BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": SAVED, "load_best_model_at_end": True}
BEST |= {"metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 1e-3}


def make_t5() -> T5ForSequenceClassification:
    """Two layers, 8 wide."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": NUM_LAYERS, "num_heads": 2}
    return T5ForSequenceClassification(T5Config(**sizes, num_labels=1, eos_token_id=EOS, decoder_start_token_id=0))


def collate_tokens(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """For masked language modelling, without masks: the labels are the tokens."""
    ids = stack_rows(rows)["input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def collate_with_eos(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """For T5, whose head reads the end of the sequence."""
    return stack_rows([{**row, "input_ids": [*row["input_ids"], EOS]} for row in rows])


class Runs:
    """Makes trainers of a kind, all on copies of one model."""

    def __init__(self, folder: Path):
        self.folder, self.base, self._whole = folder, folder / "base", {}  # the base of LoRA
        makers = (
            lambda: make_narrow_esm(num_hidden_layers=NUM_LAYERS),
            lambda: make_narrow_esm(EsmForMaskedLM, num_hidden_layers=NUM_LAYERS),
            lambda: make_lora(self.base),
            make_t5,
        )
        self.makers, self.models = dict(zip(KINDS, makers)), {}
        self.collators = dict(zip(KINDS, (stack_rows, collate_tokens, stack_rows, collate_with_eos)))

    def make(self, kind: str, trainer_class: type[Trainer], folder: Path, **given: Any) -> tuple[Any, Watch]:
        """A trainer, and what will have watched it."""
        args_class = FastTrainingArguments if issubclass(trainer_class, FastTrainer) else TrainingArguments
        args = args_class(output_dir=str(folder), **{**SETTINGS, **given})
        watch = Watch()
        rows: Dataset = make_rows()
        held_out = make_rows(6) if args.eval_strategy != "no" else None
        if kind not in self.models:
            self.models[kind] = self.makers[kind]()
        model = copy.deepcopy(self.models[kind])
        return trainer_class(model, args, self.collators[kind], rows, held_out, callbacks=[watch]), watch

    def train(
        self, kind: str, trainer_class: type[Trainer], folder: Path, resume: Path | str | None = None, **given: Any
    ) -> tuple[Any, Watch]:
        """The same, trained."""
        trainer, watch = self.make(kind, trainer_class, folder, **given)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer, watch

    def whole(self, kind: str, trainer_class: type[Trainer]) -> tuple[Path, Any, Watch]:
        """(checkpoint of step 3, trainer, watch) of a run that nobody interrupted, trained once."""
        key = kind, trainer_class
        if key not in self._whole:
            folder = self.folder / f"{kind} {trainer_class.__name__}"
            self._whole[key] = (folder / f"checkpoint-{SAVED}", *self.train(kind, trainer_class, folder))
        return self._whole[key]


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Names of entries that are not bit for bit the same."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]

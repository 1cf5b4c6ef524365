"""Rows with every kind of label, some of them not known, and small models that learn them."""

import math

import torch
from datasets import Dataset
from inside import build_affinity_model
from transformers import TrainingArguments

from hf_ext.data import DataArguments
from hf_ext.labels import make_kind
from hf_ext.property import AffinityArguments, build_collator
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

KINDS = {
    "numbers": make_kind("regression", ("a", "b"), ("a", "b")),
    "classes": make_kind("classification", ("class",), ("nucleus", "cytoplasm", "membrane")),
    "sets": make_kind("multilabel", *[("binds", "folds", "cuts")] * 2),
    "residue_classes": make_kind("residue_classification", ("structure",), ("H", "E", "C")),
    "residue_numbers": make_kind("residue_regression", ("exposure",), ("exposure",)),
}
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
MAX_RESIDUES = 30  # what the encoder reads: the longest rows are cut


def make_rows(name: str, num: int = 16) -> Dataset:
    """Sequences of 3 to 33 residues in no order, more and more of whose labels are not known."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(num):
        sequence = [*torch.randint(0, 20, (3 + 2 * (7 * i % 16),), generator=generator).tolist()]
        is_known = torch.rand(len(sequence), generator=generator) > 0.05 * (i % 16)
        if name == "numbers":
            label = [i / 4 - 1, math.nan if i % 3 == 0 else 100.0 + 5 * (i % 4)]
        elif name == "classes":
            label = i % 3 if i % 4 else -100
        elif name == "sets":
            label = [float(i % 2), math.nan if i % 3 == 0 else 1.0, math.nan if i % 5 else float(i % 2)]
        elif name == "residue_classes":
            label = [letter % 3 if known else -100 for letter, known in zip(sequence, is_known.tolist())]
        else:
            label = [letter / 2 + 3 if known else math.nan for letter, known in zip(sequence, is_known.tolist())]
        rows.append({"chain": "".join(LETTERS[letter] for letter in sequence), "label": label})
    return Dataset.from_list(rows)


def add_teacher(rows: Dataset) -> Dataset:
    """Rows with what a teacher says of each, of rows without a label too: two numbers, or logits of three classes."""
    said = [[math.sin(i + j) + 100 * j for j in range(2)] for i in range(len(rows))]
    if not isinstance(rows[0]["label"], list):
        said = [[2 * math.sin(i + j) for j in range(3)] for i in range(len(rows))]
    return rows.add_column("teacher", said)


def make_labelled(name: str, encoder: str, training: str = "full", **settings):
    """A model of one tower without dropout, and its collator."""
    torch.manual_seed(0)
    given = {"head_sizes": [8], "head_dropout": 0.0, "tower_training": [training], **settings}
    model = build_affinity_model(AffinityArguments(encoders=[encoder], **given), ["chain"], kind=KINDS[name])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    data = DataArguments(sequence_columns=["chain"], too_long="truncate", max_residues=MAX_RESIDUES)
    return model, build_collator(model, data)


def make_trainer(
    name: str, folder, encoder: str, training: str = "full", cls=FastTrainer, num: int = 16, taught=False, **given
):
    """A trainer of `cls` of such a model and its rows, on a CPU, one step of all rows unless `given` says otherwise."""
    model, collator = make_labelled(name, encoder, training)
    settings = {"max_steps": 1, "per_device_train_batch_size": num, "learning_rate": 1e-3, "max_grad_norm": 0.0}
    settings |= {"logging_steps": 1, "save_strategy": "no", "remove_unused_columns": False, "report_to": "none"}
    settings |= {"disable_tqdm": True, "train_sampling_strategy": "sequential", **given}
    if issubclass(cls, FastTrainer):
        settings |= {"embedding_cache_dir": str(folder / "cache")}
    args_cls = FastTrainingArguments if issubclass(cls, FastTrainer) else TrainingArguments
    rows = make_rows(name, num)
    rows = add_teacher(rows) if taught else rows
    args = args_cls(output_dir=str(folder), **settings)
    return cls(model, args, collator, train_dataset=rows, eval_dataset=rows)

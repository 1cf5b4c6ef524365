"""Five kinds of tiny runs, and with data workers: ESM regression, T5, LoRA, cached, two processes."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from faulty_runs import make_rows
from inside import build_affinity_model
from miniature_esm import make_narrow_esm
from protein_families import write_family
from tiny_t5 import write_t5_encoder
from token_rows import stack_rows

from hf_ext.data import DataArguments, make_demo_encoders
from hf_ext.property import AffinityArguments, build_collator
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_STEPS, SAVE_STEPS = 16, 4
COLUMNS = ["heavy", "antigen"]
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 8,
    "max_steps": NUM_STEPS,  # of 12 rows: several passes
    "learning_rate": 1e-2,
    "logging_steps": 3,
    "save_steps": SAVE_STEPS,
    "save_total_limit": 2,
}
# The loss that counts as best is the highest: the first checkpoint stays, is kept by rotation, and ends as the model.
BEST = {"eval_strategy": "steps", "eval_steps": SAVE_STEPS, "load_best_model_at_end": True, "greater_is_better": True}
BEST |= {"metric_for_best_model": "loss"}


@dataclass(frozen=True)
class Family:
    """A kind of run.

    Attributes:
        towers: encoders of an affinity model, as folders of `write_encoders`; none: ESM regression.
        training: how the towers train.
        settings: beyond `SETTINGS`.
        num_ranks: processes.
    """

    towers: tuple[str, ...] = ()
    training: str = "frozen"
    settings: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1


FAMILIES = {
    "ESM regression": Family(settings={**BEST, "gradient_accumulation_steps": 2}),
    "T5 tower": Family(("t5", "t5"), "full"),
    "LoRA": Family(settings={"use_peft": True, "lora_r": 2, **BEST}),
    "frozen and cached": Family(("bert", "esm"), settings={"speedups": ["embedding_cache"]}),
    "two processes": Family(settings=BEST, num_ranks=2),
}
# The same with data workers: asked for as of stock Trainer, or with the plan's settings.
ONE: dict[str, Any] = {"dataloader_num_workers": 1}
PLANNED: dict[str, Any] = {"dataloader_num_workers": 2, "speedups": ["data_loading"]}
WORKERS: dict[str, dict[str, Any]] = {
    "ESM regression": ONE,
    "T5 tower": PLANNED,
    "LoRA": PLANNED,
    "frozen and cached": {**PLANNED, "speedups": ["data_loading", "embedding_cache"]},
    "two processes": {**ONE, "gradient_accumulation_steps": 2},
}
WITH_WORKERS = {
    f"{name}, workers": replace(FAMILIES[name], settings={**FAMILIES[name].settings, **given})
    for name, given in WORKERS.items()
}


WITH_WORKERS["ESM C towers, workers"] = Family(("esmc", "esmc"), "full", PLANNED)


def write_encoders(folder: Path) -> None:
    """Writes the encoders that towers are made of: `bert`, `esm`, `esmc`, `t5`."""
    make_demo_encoders(folder)
    write_family("esmc", folder)
    write_t5_encoder(folder / "t5")


def make_trainer(name: str, encoders: Path, output_dir: Path, **given: Any) -> FastTrainer:
    """The trainer of a family; `given` are further arguments."""
    family = {**FAMILIES, **WITH_WORKERS}[name]
    settings = {**SETTINGS, **family.settings, "embedding_cache_dir": str(output_dir.parent / "cache"), **given}
    args = FastTrainingArguments(output_dir=str(output_dir), **settings)
    if not family.towers:
        return FastTrainer(
            make_narrow_esm(), args, stack_rows, make_rows(), make_rows(6) if "eval_strategy" in settings else None
        )
    torch.manual_seed(0)
    towers = AffinityArguments(
        encoders=[str(encoders / tower) for tower in family.towers],
        tower_inputs=COLUMNS,
        tower_training=[family.training],
        head_sizes=[8],
        head_dropout=0.2,  # so that random states matter
    )
    model = build_affinity_model(towers, COLUMNS)
    return FastTrainer(model, args, build_collator(model, DataArguments(sequence_columns=COLUMNS)), make_table())


def make_table() -> Dataset:
    """12 rows of two sequences of 8 to 19 residues, and a label."""
    letters = "ACDEFGHIKLMNPQRSTVWY"
    drawn = torch.randint(20, (12, 2, 12), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [["".join(letters[i] for i in ids) for ids in pair] for pair in drawn]
    return Dataset.from_dict(
        {"heavy": [row[0] for row in rows], "antigen": [row[1] for row in rows], "label": [p[0][0] / 10 for p in drawn]}
    )

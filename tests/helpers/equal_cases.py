"""What several processes must train exactly as one does: models, rows, 20 steps of 8 rows, and what is compared.

For test processes, alone or launched: `write_encoders(folder)` once, before any of them; then `train(case, ...)`.
"""

import json
from pathlib import Path

import torch
from closeness import largest
from datasets import Dataset
from inside import build_affinity_model
from labelled_rows import make_labelled, make_rows
from miniature_esm import MASK, WIDE
from miniature_esm import make_esm as make_base_esm
from run_outcomes import losses
from safetensors.torch import load_file, save_file
from tiny_encoders import tiny_esmc
from tiny_t5 import write_t5_encoder
from token_rows import pad_rows
from torch.distributed.tensor import DTensor
from transformers import EsmForMaskedLM, EsmForSequenceClassification

from hf_ext.data import DataArguments, make_demo_encoders, make_demo_table
from hf_ext.property import AffinityArguments, build_collator
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_STEPS, ROWS_PER_STEP, PASSES = 20, 8, 2
COLUMNS = ["heavy", "light", "antigen"]  # read by a BERT, a T5 and an ESM encoder
TOWERS = {  # case -> how each encoder trains
    "full": ["full", "full", "full"],
    "lora_towers": ["frozen", "lora", "lora"],
    "frozen_cache": ["frozen", "frozen", "frozen"],
}
EXTRA = {  # case -> arguments beside those of all
    "full": {"encoder_learning_rate": 3e-4},
    "lora_towers": {"use_peft": True},
    "frozen_cache": {"speedups": ["embedding_cache"]},
    "lora": {"use_peft": True, "lora_r": 4},
    "masked_lm": {},  # input and output embeddings are one tensor
    "esm_c": {},
    "muon": {"speedups": "muon", "learning_rate": 1e-4},
}
CASES = tuple(EXTRA)
LABELLED = {  # case -> labels of `labelled_rows`, how the encoder trains, and arguments beside those of all
    "classes": ("classes", "full", {}),
    "residues": ("residue_classes", "frozen", {"speedups": ["embedding_cache"]}),
}


def write_encoders(folder: Path) -> None:
    """A BERT, a T5 and an ESM encoder in `folder`, without dropout, which no two process counts draw alike."""
    bert, esm = make_demo_encoders(folder)
    for path in (bert, write_t5_encoder(folder / "t5"), esm):
        file = Path(path) / "config.json"
        config = json.loads(file.read_text())
        config |= {name: 0.0 for name in config if name.endswith(("dropout_prob", "dropout_rate"))}
        file.write_text(json.dumps(config))


def make_esm(head: type = EsmForMaskedLM, **settings):
    """ESM-2 in miniature; its contact head is trainable and never gets a gradient, as in a loaded checkpoint."""
    return make_base_esm(head, **WIDE | settings)


def make_tokens(kind: str) -> Dataset:
    """Rows of 6 to 30 tokens: every fifth masked and labelled ("masked_lm"), or one class a row ("lora")."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(6, 31, (NUM_STEPS * ROWS_PER_STEP,), generator=generator).tolist()
    ids = [torch.randint(4, 24, (size,), generator=generator) for size in sizes]
    if kind == "lora":
        return Dataset.from_dict(
            {"input_ids": [row.tolist() for row in ids], "labels": [int(row[2] > 13) for row in ids]}
        )
    masked = [torch.arange(len(row)) % 5 == 1 for row in ids]
    inputs = [row.masked_fill(chosen, MASK).tolist() for row, chosen in zip(ids, masked)]
    labels = [row.masked_fill(~chosen, -100).tolist() for row, chosen in zip(ids, masked)]
    return Dataset.from_dict({"input_ids": inputs, "labels": labels, "length": sizes})


def make_parts(case: str, encoders: Path) -> tuple:
    """Model, collator and training rows of a case; `encoders` is what `write_encoders` filled."""
    if case in LABELLED:
        name, training, _ = LABELLED[case]
        return *make_labelled(name, str(encoders / "esm"), training), make_rows(name, NUM_STEPS * ROWS_PER_STEP)
    if case == "esm_c":
        return tiny_esmc(), pad_rows, make_tokens("masked_lm")
    if case not in TOWERS:
        head = EsmForSequenceClassification if case == "lora" else EsmForMaskedLM
        return make_esm(head), pad_rows, make_tokens("lora" if case == "lora" else "masked_lm")
    torch.manual_seed(0)
    paths = [str(encoders / name) for name in ("bert", "t5", "esm")]
    towers = {"encoders": paths, "tower_inputs": COLUMNS, "tower_training": TOWERS[case]}
    model = build_affinity_model(AffinityArguments(**towers, head_sizes=[8], head_dropout=0.0), COLUMNS)
    rows = make_demo_table(NUM_STEPS * ROWS_PER_STEP).rename_column("pKd", "label")
    return model, build_collator(model, DataArguments(sequence_columns=COLUMNS)), rows


class LouderRank(FastTrainer):
    """The broken twin: gradients of the last process count twice, its losses do not."""

    def compute_loss(self, *args, **kwargs):
        found = super().compute_loss(*args, **kwargs)
        if self.args.process_index < self.args.world_size - 1:
            return found
        loss = found[0] if isinstance(found, tuple) else found
        louder = loss + (loss - loss.detach())
        return (louder, *found[1:]) if isinstance(found, tuple) else louder


def make_trainer(case: str, folder: Path, num_processes: int, encoders: Path, broken: bool = False, **given):
    """A FastTrainer for 20 steps of 8 rows in two passes, on 1, 2 or 4 processes; `given` goes over its arguments.

    AdamW at 1e-3, weight decay, clipped, float32. Where the gradient is zero in exact arithmetic (the bias of a key in
    BERT), AdamW would make steps of rounding; `adam_epsilon` keeps them small.
    """
    model, collator, rows = make_parts(case, encoders)
    each = ROWS_PER_STEP // PASSES // num_processes
    settings = {"max_steps": NUM_STEPS, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    settings |= {"per_device_train_batch_size": each, "gradient_accumulation_steps": PASSES, "adam_epsilon": 1e-6}
    settings |= {"logging_steps": 1, "save_strategy": "no", "seed": 3, "remove_unused_columns": False}
    settings |= {"report_to": "none", "disable_tqdm": True, "embedding_cache_dir": str(folder / "cache")}
    settings |= {"use_cpu": num_processes == 1, **(LABELLED[case][2] if case in LABELLED else EXTRA[case]), **given}
    trainer_class = LouderRank if broken else FastTrainer
    held_out = rows.select(range(ROWS_PER_STEP)) if "eval_strategy" in settings else None
    return trainer_class(model, FastTrainingArguments(str(folder), **settings), collator, rows, held_out)


def train(case: str, folder: Path, num_processes: int, encoders: Path, broken: bool = False, **given):
    """`make_trainer`, trained."""
    trainer = make_trainer(case, folder, num_processes, encoders, broken, **given)
    assert trainer.args.world_size == num_processes
    trainer.train()
    return trainer


def gathered(trainer) -> dict[str, torch.Tensor]:
    """Whole weights on the CPU, by the model's own names; all processes call it. ZeRO-3's have no whole ones here."""
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named}
    clean = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in whole.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in clean.items()}


def save_numbers(folder: Path, name: str, trainer) -> None:
    """Losses and whole weights as `name.json` and `name.safetensors`, written by the main process."""
    weights = gathered(trainer)
    if trainer.args.process_index == 0:
        save_file(weights, folder / f"{name}.safetensors")
        report = {"losses": losses(trainer), "kind": str(trainer.accelerator.distributed_type)}
        (folder / f"{name}.json").write_text(json.dumps(report))


def load_numbers(folder: Path, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What `save_numbers` wrote."""
    return json.loads((folder / f"{name}.json").read_text())["losses"], load_file(folder / f"{name}.safetensors")


def differences(ours: tuple, theirs: tuple, num_steps: int = NUM_STEPS) -> tuple[float, float]:
    """The largest difference between losses, and between weights, of two runs: pairs as `load_numbers` gives."""
    assert len(ours[0]) == len(theirs[0]) == num_steps
    assert ours[1].keys() == theirs[1].keys()
    loss = largest(abs(a - b) for a, b in zip(ours[0], theirs[0]))
    return loss, largest((ours[1][name] - theirs[1][name]).abs().max() for name in ours[1])

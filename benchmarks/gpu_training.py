"""Steps of training, a part of `gpu_session.py`: a model, a process, and sides that take turns.

They are stock Trainer at its best (half precision under autocast, rows grouped by length, SDPA, fused AdamW, data
workers), and FastTrainer with `max_speed`, first without compiled blocks, then with them. Each turn begins at the same
weights and trains once on the same rows.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from gpu_parts import COMPILES_S, OURS, ROUNDS, STOCK, Shape, build_model, build_tokenizer, draw_chains, free_memory
from gpu_rounds import Entry
from transformers import TrainerCallback

from hf_ext.arguments import preset_values
from hf_ext.data import AntibodyCollator, MaskedLMCollator, PairEncoder, ResidueTokenizer, make_demo_pairs
from hf_ext.hardware import Hardware, detect_hardware
from hf_ext.models import AntibodyGenerator, GeneratorConfig, LoraSettings, wrap_with_lora
from hf_ext.reporting import ThroughputCallback
from hf_ext.tasks.running import build_stock_trainer
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

COMPILED = "max_speed, compiled"
AGAIN_S = 6.0  # of a turn whose blocks are compiled already, beside its steps


@dataclass
class Subject:
    """A model that sides train in turn, and what they train it on.

    Attributes:
        kept: its weights, at which each turn begins. classes: of its modules.
    """

    model: Any
    rows: Any
    collator: Any
    tokenizer: Any
    batch: int
    passes: int
    shape: Shape

    def __post_init__(self) -> None:
        self.kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.classes = [type(module) for module in self.model.modules()]

    def restore(self) -> None:
        """Gives the model its first weights, and its layers: `max_speed` leaves those beside adapters rounded."""
        for module, kind in zip(self.model.modules(), self.classes, strict=True):
            module.__class__ = kind
        for parameter, kept in zip(self.model.parameters(), self.kept, strict=True):
            parameter.grad = None
            parameter.data = kept.clone()
        free_memory()


def build_masked_lm(family: str, lora: bool, shape: Shape, hardware: Hardware) -> Subject:
    model = build_model(family, shape, hardware.kind)
    if lora:
        model = wrap_with_lora(model, LoraSettings(r=8))
    batch = shape.rows if family == "esm2" else shape.esmc_rows
    chains = draw_chains(batch * shape.passes * shape.steps, shape.is_toy, longest=510)
    tokenizer = build_tokenizer()
    collator = MaskedLMCollator(ResidueTokenizer(tokenizer, 1, 512), max_residues=510)
    rows = Dataset.from_dict({"sequence": chains, "length": [len(chain) for chain in chains]})
    return Subject(model, rows, collator, tokenizer, batch, shape.passes, shape)


def build_generator(shape: Shape, hardware: Hardware) -> Subject:
    """Of antibodies: the Transformer of `hf-ext generate`, on its generated pairs."""
    torch.manual_seed(0)
    config = GeneratorConfig.of_size("transformer", "tiny" if shape.is_toy else "full")
    model = AntibodyGenerator.from_new_weights(config).to(hardware.kind)
    pairs = make_demo_pairs(shape.pairs * shape.steps)
    encoder = PairEncoder(None)
    columns = encoder.encode_rows(*(pairs[name][:] for name in ("antigen", "heavy", "light")))
    columns["length"] = [len(antigen) + len(pair) for antigen, pair in zip(columns["input_ids"], columns["labels"])]
    collator = AntibodyCollator(encoder.antigens.pad_token_id)
    return Subject(model, Dataset.from_dict(columns), collator, encoder.tokenizer, shape.pairs, 1, shape)


def build_trainer(side: str, subject: Subject, hardware: Hardware, folder: str) -> Any:
    """Trainer at its best, or FastTrainer with `max_speed`."""
    given: dict[str, Any] = {"per_device_train_batch_size": subject.batch, "max_steps": subject.shape.steps}
    given |= {"gradient_accumulation_steps": subject.passes, "learning_rate": 1e-4, "logging_steps": 1000}
    given |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 0}
    if hardware.kind == "cuda":
        given |= {"bf16": True} if hardware.native_bf16 else {"fp16": True}
    if side == STOCK:
        given |= {"train_sampling_strategy": "group_by_length"}
        given |= {"dataloader_num_workers": 2} if hardware.kind == "cuda" else {}
    else:
        given |= {**preset_values("max_speed"), "without": ["compile"] if side == OURS else []}
    args = FastTrainingArguments(folder, **given)
    parts = {"model": subject.model, "train_dataset": subject.rows, "data_collator": subject.collator}
    if not hasattr(subject.collator, "tokenizer"):
        parts["processing_class"] = subject.tokenizer
    if side == STOCK:
        trainer: Any = build_stock_trainer(args, frozenset(), **parts)
    else:
        parts["train_dataset"] = subject.rows.remove_columns("length")
        trainer = FastTrainer(args=args, **parts)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ThroughputCallback):
            callback.warmup_steps = subject.shape.warmup
    return trainer


def is_enough(step: int, shape: Shape, entry: Entry) -> bool:
    """Whether a turn ends early: its time is used, and a step counts."""
    return step > shape.warmup and entry.clock() >= entry.turn_ends


class EndsInTime(TrainerCallback):
    """Ends a turn whose time is used."""

    def __init__(self, shape: Shape, entry: Entry) -> None:
        self.shape = shape
        self.entry = entry

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        if is_enough(state.global_step, self.shape, self.entry):
            control.should_training_stop = True


def train_once(side: str, subject: Subject, hardware: Hardware, entry: Entry) -> dict[str, Any]:
    """A turn: what the steps after the warm-up took, and the loss where all were taken.

    Raises:
        RuntimeError: the side was to compile, and could not.
    """
    subject.restore()
    kept_bytes = sum(kept.nbytes for kept in subject.kept)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(side, subject, hardware, folder)
        trainer.add_callback(EndsInTime(subject.shape, entry))
        try:
            if side == COMPILED and trainer.plan["compile"].status != "applied":
                raise RuntimeError(f"not compiled: {trainer.plan['compile'].reason}")
            found = trainer.train().metrics
        finally:
            trainer.accelerator.free_memory() if side == STOCK else trainer.close()
    unit = next(name for name in ("residues", "tokens", "sequences") if f"train_{name}_per_s" in found)
    steps = trainer.state.global_step
    rows = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps
    step_s = rows / found["train_sequences_per_s"]
    turn = {"unit": unit, "rate": found[f"train_{unit}_per_s"], "mfu": found.get("train_mfu")}
    turn |= {"steps": steps - subject.shape.warmup, "step_s": round(step_s, 5)}
    turn["peak_bytes"] = torch.cuda.max_memory_allocated() - kept_bytes if hardware.kind == "cuda" else 0
    turn["loss"] = round(found["train_loss"], 4) if steps == subject.shape.steps else None
    return turn | ({"again_s": AGAIN_S + subject.shape.steps * step_s} if side == COMPILED else {})


def run_training(part: str, entry: Entry, shape: Shape) -> bool:
    """Sides in turn, then compiled blocks."""
    hardware = detect_hardware()
    entry.begin("its model")
    training, _, family = part.partition("_")
    if part == "generator":
        subject = build_generator(shape, hardware)
        what = "generator, Transformer"
    else:
        subject = build_masked_lm(family, training == "lora", shape, hardware)
        model = f"ESM-2 {shape.esm2}" if family == "esm2" else "ESM C 300M"
        what = f"{model}, {'LoRA' if training == 'lora' else training}"
    trained = sum(one.numel() for one in subject.model.parameters() if one.requires_grad)
    entry.result |= {"what": what, "rows_per_step": subject.batch * subject.passes, "trained_parameters": trained}
    turns = {side: partial(train_once, side, subject, hardware, entry) for side in (STOCK, OURS, COMPILED)}
    compiled = {COMPILED: turns.pop(COMPILED)}
    rounds = 1 if shape.is_toy else ROUNDS
    if not entry.take_rounds(turns, rounds):
        return False
    least_s = 0 if shape.is_toy else COMPILES_S
    return part == "generator" or entry.take_rounds(compiled, rounds, least_s=least_s)

"""The parts of `gpu_session.py`, each in a process that it starts: what they measure, in rounds.

Models have random weights, made on the device itself from a configuration: 650M of them take a second there, and ten
on a CPU. Sides of a training part are one model in one process: stock Trainer at its best (half precision under
autocast, rows grouped by length, SDPA, fused AdamW, data workers), and FastTrainer with `max_speed`, first without
compiled blocks, then with them. Each turn begins at the same weights and trains once on the same rows.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import make_esm2
from gpu_session import CUT_CODE, PARTS, ROOT, Entry, first_line, open_entry
from transformers import TrainerCallback

from hf_ext.hardware import Hardware, detect_hardware

ROUNDS = 3
COMPILES_S = 30.0  # with less left, compiled blocks are not begun
AGAIN_S = 6.0  # of a turn whose blocks are compiled already, beside its steps
TEST_S = 10.0  # with less left, no further test is
COMPILES = re.compile("compile|flex")  # tests that come last
STOCK, OURS, COMPILED = "stock", "max_speed", "max_speed, compiled"


@dataclass(frozen=True)
class Shape:
    """What fits a card into the time and memory that a part has.

    Attributes:
        rows, passes: of a step in training; rows have at most 510 residues. esmc_rows: the same of ESM C 300M.
        encoded: rows of an encoding. pairs: of a generator's step.
        warmup, steps: of a turn, before those that count and with them.
    """

    esm2: str = "650M"
    rows: int = 16
    esmc_rows: int = 16
    passes: int = 2
    encoded: int = 512
    pairs: int = 64
    warmup: int = 4
    steps: int = 12
    is_toy: bool = False


def choose_shape(hardware: Hardware, is_toy: bool) -> Shape:
    """Of a card: with AdamW, ESM-2 650M trains in 30 GiB, and ESM-2 150M in 7, at 8 rows.

    As many rows are encoded as keep a turn below five seconds.
    """
    if is_toy:
        return Shape("tiny", rows=2, esmc_rows=2, encoded=12, pairs=2, warmup=1, steps=3, is_toy=True)
    if (hardware.memory_gib or 0) < 38:
        return Shape("150M", rows=8, esmc_rows=4, encoded=64, pairs=32)
    is_fast = hardware.peak_tflops.get("bf16", 0) > 500
    return Shape() if is_fast else Shape(passes=1, encoded=256)


# --- what all measure with -------------------------------------------------------------------------------------------


def draw_chains(number: int, is_toy: bool, longest: int = 1022) -> list[str]:
    """Random residues; lengths are log-normal about 270 from 30 on, as proteins' are, and 6 to 24 of toys."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(number, generator=generator) * 0.7 + 5.6).exp().clamp(30, longest)
    if is_toy:
        lengths = torch.randint(6, 25, (number,), generator=generator)
    drawn = [torch.randint(0, 20, (int(length),), generator=generator).tolist() for length in lengths]
    return ["".join("ACDEFGHIKLMNPQRSTVWY"[i] for i in row) for row in drawn]


def build_model(family: str, shape: Shape, device: str) -> Any:
    """A masked language model, made on `device`, with random weights that are always the same there."""
    from transformers import EsmcConfig, EsmcForMaskedLM

    with torch.device(device):
        if family == "esm2":
            return make_esm2(shape.esm2, token_dropout=True, layer_norm_eps=1e-5, max_position_embeddings=1026)
        width, layers, heads, inner = (32, 2, 2, 64) if shape.is_toy else (960, 30, 15, 2560)
        torch.manual_seed(0)
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        return EsmcForMaskedLM(EsmcConfig(**sizes, intermediate_size=inner))


def build_tokenizer() -> Any:
    """ESM-2's, whose ids are also those of ESM C."""
    from transformers import EsmTokenizer

    from hf_ext.data import ESM_VOCABULARY

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.txt"
        path.write_text("\n".join(ESM_VOCABULARY) + "\n")
        return EsmTokenizer(str(path), model_max_length=1024)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- training --------------------------------------------------------------------------------------------------------


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
        """Gives the model its first weights, in the precision that they had: of LoRA's base they stay rounded."""
        for module, kind in zip(self.model.modules(), self.classes, strict=True):
            module.__class__ = kind
        for parameter, kept in zip(self.model.parameters(), self.kept, strict=True):
            parameter.grad = None
            parameter.data = kept.clone()
        free_memory()


def build_masked_lm(family: str, lora: bool, shape: Shape, hardware: Hardware) -> Subject:
    from datasets import Dataset

    from hf_ext.data import MaskedLMCollator, ResidueTokenizer
    from hf_ext.models import LoraSettings, wrap_with_lora

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
    from hf_ext.data import make_demo_pairs
    from hf_ext.generation.building import Inputs
    from hf_ext.generation.rows import AntibodyRows
    from hf_ext.models import AntibodyGenerator, GeneratorConfig

    torch.manual_seed(0)
    config = GeneratorConfig.of_size("transformer", "tiny" if shape.is_toy else "full")
    model = AntibodyGenerator.from_new_weights(config).to(hardware.kind)
    pairs = make_demo_pairs(shape.pairs * shape.steps)
    inputs = Inputs()
    columns = [tuple(pairs[name][:]) for name in ("heavy", "light", "antigen")]
    rows = inputs.tokenize(AntibodyRows(*columns, (None,) * len(pairs)))
    return Subject(model, rows, inputs.collator, inputs.encoder.tokenizer, shape.pairs, 1, shape)


def build_trainer(side: str, subject: Subject, hardware: Hardware, folder: str) -> Any:
    """Trainer at its best, or FastTrainer with `max_speed`."""
    from hf_ext.arguments import preset_values
    from hf_ext.reporting import ThroughputCallback
    from hf_ext.tasks.running import build_stock_trainer
    from hf_ext.trainer import FastTrainer
    from hf_ext.training_args import FastTrainingArguments

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
    return part == "generator" or entry.take_rounds(compiled, rounds, least_s=COMPILES_S)


# --- the other parts -------------------------------------------------------------------------------------------------


def run_memory(entry: Entry, shape: Shape) -> bool:
    """Bytes of three set-ups, as the ledger predicts them and as torch allocates them."""
    from memory_ledger import CASES, measure, predict

    kind = detect_hardware().kind

    def compare(name: str) -> dict[str, Any]:
        free_memory()
        (case,) = [replace(case, size=shape.esm2) for case in CASES if case.name == name]
        return {"predicted_bytes": predict(case, kind)["bytes"], "measured_bytes": measure(case, kind)["bytes"]}

    names = ("full, bf16", "LoRA, bf16", "full, bf16, recomputing all")
    entry.result["what"] = f"ESM-2 {shape.esm2}"
    return entry.take_rounds({name: partial(compare, name) for name in names}, rounds=1)


class Recorder:
    """Of pytest: writes down how each test ended when it has; begins none that passed before, or has no time."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.found: dict[str, str] = entry.result.setdefault("tests", {})
        self.is_cut = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        left = [item for item in items if self.found.get(item.nodeid) != "passed"]
        items[:] = sorted(left, key=lambda item: bool(COMPILES.search(item.nodeid)))

    def pytest_runtest_protocol(self, item: Any) -> None:
        if not self.entry.begin(item.nodeid, TEST_S):
            self.is_cut = True
            item.session.shouldstop = "no time left"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = report.longrepr[2] if report.skipped else getattr(crash, "message", "")
            self.found[report.nodeid] = f"{report.outcome} {first_line(said)}".strip()
            self.entry.save()


def run_tests(entry: Entry, shape: Shape) -> bool:
    """Those marked `gpu`; without one they are collected only."""
    import pytest

    marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    words = ["-o", "addopts=", "-m", "gpu", "--disable-warnings", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    words += [] if torch.cuda.is_available() else ["--collect-only", "-q"]
    recorder = Recorder(entry)
    code = pytest.main([*words, *marked], plugins=[recorder])
    if code in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.OK) and recorder.is_cut:
        return False
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        wrong = [name for name, outcome in recorder.found.items() if outcome.startswith("failed")]
        sys.exit(f"{len(wrong)} tests failed: {', '.join(name.rpartition('/')[2] for name in wrong)}")
    return True


def run_processes(entry: Entry, shape: Shape) -> bool:
    """Two ranks beside one process: NCCL where there are two cards; it refuses two ranks on one, gloo does not."""
    from distributed_smoke import compare_ranks

    small = ["--model_size", "tiny", "--steps", "2", "--rows", "4", "--length", "12"]
    words = small if shape.is_toy else ["--steps", "8"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    turn = partial(compare_ranks, words, device, backend, entry.ends - entry.clock())
    is_done = entry.take_rounds({f"DDP, {backend}": turn}, rounds=1)
    if any(not one["passed"] for turns in entry.result["rounds"].values() for one in turns):
        entry.result["problems"] = {"DDP": "weights or losses are other than those of one process"}
    return is_done


RUN: dict[str, Callable[[Entry, Shape], bool]] = {
    "tests": run_tests,
    "memory": run_memory,
    "processes": run_processes,
    **{part: partial(run_training, part) for part in ("full_esm2", "lora_esm2", "full_esmc", "generator")},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--size", choices=("full", "toy"), default="full")
    parser.add_argument("--session", type=Path, required=True, help="The file that has an entry of the part.")
    parser.add_argument("--ends", type=float, required=True, help="On the monotonic clock.")
    args = parser.parse_args()
    if args.part == "encoding":
        from gpu_encoding import run_encoding as run
    else:
        run = RUN[args.part]
    entry = open_entry(args.session, args.part, args.ends)
    is_done = run(entry, choose_shape(detect_hardware(), args.size == "toy"))
    problems = entry.result.get("problems", {})
    if problems and not any(entry.result["rounds"].values()):
        sys.exit(next(iter(problems.values())))
    return 0 if is_done else CUT_CODE


if __name__ == "__main__":
    sys.exit(main())

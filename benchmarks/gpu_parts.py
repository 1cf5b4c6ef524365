"""The parts of `gpu_session.py`, each in a process that it starts: what they measure, in rounds.

Models have random weights, made on the device itself from a configuration: 650M of them take a second there, and ten
on a CPU.
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
from gpu_rounds import ROOT, Entry, first_line, open_entry
from gpu_session import CUT_CODE, PARTS

from hf_ext.hardware import Hardware, detect_hardware

ROUNDS = 3
COMPILES_S = 30.0  # with less left, what is compiled is not begun
END_S = 3.0  # of ranks, within the time of their part
TEST_S = 10.0  # with less left, no further test is
COMPILES = re.compile("compile|flex")  # tests that come last
STOCK, OURS = "stock", "max_speed"


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

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """Keeps pytest from a test that it returns something for."""
        if self.entry.begin(item.nodeid, TEST_S):
            return None
        self.is_cut = True
        item.session.shouldstop = "no time left"
        return True

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
    """Two ranks on one card beside one process: over gloo, since NCCL refuses a second rank on a card."""
    from distributed_smoke import compare_ranks

    small = ["--model_size", "tiny", "--steps", "2", "--rows", "4", "--length", "12"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = small if shape.is_toy else ["--steps", "8"]
    turn = partial(compare_ranks, words, device, entry.ends - entry.clock() - END_S)
    is_done = entry.take_rounds({"DDP over gloo": turn}, rounds=1)
    if any(not one["passed"] for turns in entry.result["rounds"].values() for one in turns):
        entry.result["problems"] = {"DDP": "weights or losses are other than those of one process"}
    return is_done


RUN = {"tests": run_tests, "memory": run_memory, "processes": run_processes}
TRAINING = ("full_esm2", "lora_esm2", "full_esmc", "generator")


def find_part(name: str) -> Callable[[Entry, Shape], bool]:
    """What runs a part: given its entry and the shape for the card, whether it has all its rounds."""
    if name == "encoding":
        from gpu_encoding import run_encoding

        return run_encoding
    if name in TRAINING:
        from gpu_training import run_training

        return partial(run_training, name)
    return RUN[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--size", choices=("full", "toy"), default="full")
    parser.add_argument("--session", type=Path, required=True, help="The file that has an entry of the part.")
    parser.add_argument("--ends", type=float, required=True, help="On the monotonic clock.")
    args = parser.parse_args()
    entry = open_entry(args.session, args.part, args.ends)
    is_done = find_part(args.part)(entry, choose_shape(detect_hardware(), args.size == "toy"))
    problems = entry.result.get("problems", {})
    if problems and not any(entry.result["rounds"].values()):
        sys.exit(next(iter(problems.values())))
    return 0 if is_done else CUT_CODE


if __name__ == "__main__":
    sys.exit(main())

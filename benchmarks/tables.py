"""Writes the tables and pictures of all pages; `--check` only says whether they are current.

    python benchmarks/tables.py

Tables of measurements are made from benchmarks/results/ (`measured.py`), pictures by `figures.py`; speed-ups are listed
by the first lines of their docstrings, and what differs by device is asked of the decisions themselves.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from figures import FIGURES
from measured import MEASURED, table

from hf_ext.hardware import Hardware, describe_hardware
from hf_ext.models import FAMILIES, PACKED_FAMILIES, Training, choose_encoder
from hf_ext.speedups import REGISTRY, Context, Decision, find_speedup
from hf_ext.speedups.base import DataFacts, ModelFacts
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("README.md")),
)
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# --- speed-ups -------------------------------------------------------------------------------------------------------

CLASSES = {"I": "identical", "N": "numerics", "L": "learning"}


def speedup_index() -> str:
    """One line per speed-up, in the order in which they are applied; its name links to its file."""
    rows = []
    for speedup in REGISTRY:
        module = type(speedup).__module__
        first = (inspect.getdoc(speedup) or "").partition("\n\n")[0]
        rows.append([f"[`{speedup.NAME}`](../{module.replace('.', '/')}.py)", CLASSES[speedup.KIND], first])
    return table(rows, ["speed-up", "class", "what it does"])


# --- what differs by device -----------------------------------------------------------------------------------------

DEVICES = ("P100", "V100", "T4", "A100", "L4", "H100", "B200", "RTX-4090", "mps", "cpu", "cpu-amx-bf16")
DATA = DataFacts(num_rows=10_000, has_lengths=True, padding_share_random=0.3, distinct_inputs={"heavy": 1200})
TRAINED = ModelFacts(("esm",), blocks="33 EsmLayer")
T5 = ModelFacts(("t5",), blocks="24 T5Block")
FROZEN = ModelFacts(("esm",), ("heavy",), trains_encoders=False)


@dataclass(frozen=True)
class Entry:
    """A line of the table: what it is, what it is on a device, and where that is tested (file::function)."""

    what: str
    cell: Callable[[Hardware], str]
    test: str


def decide(name: str, hardware: Hardware, model: ModelFacts = TRAINED) -> Decision:
    """What a run with all speed-ups decides on a device with eight cores."""
    args = FastTrainingArguments(output_dir="o", speedups=["all"])
    return find_speedup(name).decide(Context(hardware, args, model, DATA, cpu_cores=8))


def precision(hardware: Hardware) -> str:
    decision = decide("precision", hardware)
    return decision.settings["mixed_precision"] if decision.status == "applied" else "float32"


def encoder_precision(hardware: Hardware) -> str:
    decision = decide("encoder_precision", hardware, FROZEN)
    return "{dtype} ({mode})".format(**decision.settings) if decision.status == "applied" else "float32"


def attention(model: ModelFacts) -> Callable[[Hardware], str]:
    return lambda hardware: decide("attention", hardware, model).settings.get("kernel", "-")


def applied(name: str) -> Callable[[Hardware], str]:
    return lambda hardware: "yes" if decide(name, hardware).status == "applied" else "-"


def workers(hardware: Hardware) -> str:
    settings = decide("data_loading", hardware).settings
    return f"{settings['dataloader_num_workers']}{', pinned' if settings['dataloader_pin_memory'] else ''}"


_DECISIONS = "tests/speedups/test_decisions.py::"
CHOICE = f"{_DECISIONS}test_facts_decide_and_say_why"
UNITS = f"{_DECISIONS}test_each_device_trains_in_what_it_has_units_for"
LOADING = f"{_DECISIONS}test_what_compiles_and_what_loads_by_device"
ENTRIES = (
    Entry("precision of what trains", precision, UNITS),
    Entry("of frozen encoders", encoder_precision, UNITS),
    Entry("attention of ESM", attention(TRAINED), CHOICE),
    Entry("attention of T5", attention(T5), CHOICE),
    Entry("TF32", applied("tf32"), CHOICE),
    Entry("blocks compiled", applied("compile"), LOADING),
    Entry("oneDNN's products tried", applied("cpu_matmul"), LOADING),
    Entry("data workers of 8 cores", workers, LOADING),
)


def device_rows() -> list[list[str]]:
    """A row per entry: what it is, and a cell per device."""
    hardware = [describe_hardware(name) for name in DEVICES]
    return [[entry.what, *map(entry.cell, hardware)] for entry in ENTRIES]


def devices() -> str:
    """What is decided on each device."""
    return table(device_rows(), ["", *DEVICES])


# --- encoders -------------------------------------------------------------------------------------------------------

CARDS = ("cpu", "T4", "L4", "RTX-4090", "A100", "H100", "H200")


def families() -> str:
    """Families of encoders that recipes take: model type, models, what packs it, LoRA's layers."""
    packed = {True: "no layer computes on padding", False: "padded, rows grouped by length"}
    rows = [
        [f"`{name}`", family.models, packed[name in PACKED_FAMILIES], ", ".join(family.lora_targets)]
        for name, family in FAMILIES.items()
    ]
    return table(rows, ["type", "models", "packing", "layers that LoRA adapts"])


def encoder_choices() -> str:
    """The encoder that each kind of card should take frozen, with LoRA and with all weights, as the doctor chooses."""
    trainings: tuple[Training, ...] = ("frozen", "lora", "full")
    rows = [[name, *(_choice(name, training) for training in trainings)] for name in CARDS]
    return table(rows, ["", "frozen", "LoRA", "all weights"])


def _choice(card: str, training: Training) -> str:
    chosen = choose_encoder(describe_hardware(card), training)
    return f"{chosen.name.split('/')[1]} ({chosen.needed_bytes(training) / 2**30:.1f} GiB)"


COMPUTED = (speedup_index, devices, families, encoder_choices)
TABLES: dict[str, Callable[[], str]] = {**MEASURED, **{made.__name__: made for made in COMPUTED}}


def render(text: str) -> str:
    """`text` with every table block filled."""
    return _BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def main() -> None:
    """Rewrites pages and pictures, or exits with 1 if `--check` finds one out of date."""
    wanted = {path: render(path.read_text()) for path in PAGES} | {path: draw() for path, draw in FIGURES.items()}
    for path, text in wanted.items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"{path} is not what benchmarks/tables.py writes: run it.")


if __name__ == "__main__":
    main()

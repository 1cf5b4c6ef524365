"""Writes the tables of README.md and docs/ and their picture; `--check` only says whether they are current.

    python benchmarks/tables.py

Tables of measurements are made from benchmarks/results/ (`measured.py`); cards of speed-ups are the docstrings of their
modules, and what differs by device is asked of the decisions themselves.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any
from xml.sax.saxutils import escape

from measured import MEASURED, read, table

from hf_ext import speedups
from hf_ext.doctor.encoder_choice import choose_encoders
from hf_ext.doctor.wheels import DEFAULT_WHEELS_FROM
from hf_ext.hardware import Hardware, describe_hardware
from hf_ext.models.families import FAMILIES
from hf_ext.models.packing import PACKED_FAMILIES
from hf_ext.speedups import REGISTRY, Context, DataFacts, Decision, ModelFacts
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# --- cards of speed-ups ---------------------------------------------------------------------------------------------

CLASSES = {"I": "identical", "N": "numerics", "L": "learning"}
_LABEL = re.compile(
    r"(?:^|(?<=[.)])[ \n]|\n)(Class [INL](?: in expectation)?(?:\.|(?=[:,]))"
    r"|(?:Effect and cost|Effect|Hardware|Models|Families|Evidence|Cost|Conflicts|Source)(?=:| \())"
)
_BULLETS = re.compile(r"(?<=\n)(?<!\n\n)(- .*(?:\n(?:- |  ).*)*)\n?")


def speedup_index() -> str:
    """One line per speed-up, in the order in which they are applied."""
    cards: Any = REGISTRY
    rows = [[f"[`{card.NAME}`](#{card.NAME})", CLASSES[card.KIND], read_card(card)[0]] for card in cards]
    return table(rows, ["speed-up", "class", "what it does"])


def speedup_cards() -> str:
    """Each card under a heading of its name, in the order of application."""
    cards: Any = REGISTRY
    return "\n\n".join(format_card(card.NAME, card) for card in cards)


def speedup_shared_cards() -> str:
    """Those of modules that several speed-ups measure by, or that are part of one; by name."""
    modules = [import_module(f"{speedups.__name__}.{found.name}") for found in iter_modules(speedups.__path__)]
    holders = {speedup.__module__ for speedup in REGISTRY if not isinstance(speedup, ModuleType)}
    others = [one for one in modules if one not in REGISTRY and one.__name__ not in holders and read_card(one)[1]]
    return "\n\n".join(format_card(module.__name__.rpartition(".")[2], module) for module in others)


def read_card(module: Any) -> tuple[str, str]:
    """First line and the rest of a module's docstring; "" where there is no more."""
    first, _, body = (inspect.getdoc(module) or "").partition("\n\n")
    return first, body.strip()


def format_card(name: str, module: Any) -> str:
    """A card with its heading; its labels (Class, Effect, Cost, ...) begin a paragraph each, in bold."""
    first, body = read_card(module)
    body = _BULLETS.sub(r"\n\1\n\n", body)
    body = _LABEL.sub(r"\n\n**\1**", body)
    body = re.sub(r"\n{3,}", "\n\n", body).strip()
    place = module.__name__ if isinstance(module, ModuleType) else module.__module__
    return f"### {name}\n\n{first} (`{place.replace('.', '/')}.py`)\n\n{body}"


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
    speedup = next(one for one in REGISTRY if name == one.NAME)
    args = FastTrainingArguments(output_dir="o", speedups=["all"])
    return speedup.decide(Context(hardware, args, model, DATA, cpu_cores=8))


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


def wheels(hardware: Hardware) -> str:
    if hardware.compute_capability is None:
        return "-"
    return "yes" if hardware.compute_capability >= DEFAULT_WHEELS_FROM else "no: CUDA 12.6"


_DECISIONS = "tests/speedups/test_decisions.py::"
CHOICE = f"{_DECISIONS}test_facts_decide_and_say_why"
UNITS = f"{_DECISIONS}test_each_device_trains_in_what_it_has_units_for"
LOADING = f"{_DECISIONS}test_what_compiles_and_what_loads_by_device"
WHEELS = "tests/doctor/test_findings.py::test_wheels_without_kernels_for_the_card_are_named_with_what_to_install"
ENTRIES = (
    Entry("precision of what trains", precision, UNITS),
    Entry("of frozen encoders", encoder_precision, UNITS),
    Entry("attention of ESM", attention(TRAINED), CHOICE),
    Entry("attention of T5", attention(T5), CHOICE),
    Entry("TF32", applied("tf32"), CHOICE),
    Entry("blocks compiled", applied("compile"), LOADING),
    Entry("oneDNN's products tried", applied("cpu_matmul"), LOADING),
    Entry("data workers of 8 cores", workers, LOADING),
    Entry("default torch wheel runs", wheels, WHEELS),
)


def device_rows() -> list[list[str]]:
    """A row per entry: what, a cell per device, the test."""
    hardware = [describe_hardware(name) for name in DEVICES]
    return [[entry.what, *map(entry.cell, hardware), f"`{entry.test.split('::')[1]}`"] for entry in ENTRIES]


def devices() -> str:
    """What is decided on each device, and the test that holds it."""
    return table(device_rows(), ["", *DEVICES, "held by"])


# --- encoders -------------------------------------------------------------------------------------------------------

CARDS = ("cpu", "T4", "L4", "RTX-4090", "A100", "H100", "H200")
DRIVER_SHARE = 0.91  # of the nominal memory, as drivers report it


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
    rows = []
    for name in CARDS:
        hardware = describe_hardware(name)
        room = None if hardware.memory_gib is None else hardware.memory_gib * 2**30 * DRIVER_SHARE
        cells = [
            f"{choice.candidate.name.split('/')[1]} ({choice.num_bytes / 2**30:.1f} GiB)" if choice.candidate else "-"
            for choice in choose_encoders(hardware, room)
        ]
        rows.append([name, *cells])
    return table(rows, ["", "frozen", "LoRA", "all weights"])


# --- the picture ----------------------------------------------------------------------------------------------------

PICTURE = ROOT / "docs" / "memory_switches.svg"
WIDTH, LABELS, BAR, GAP, TOP = 760, 300, 18, 8, 44
COLOURS = {"full": "#4c78c8", "lora": "#2a9d6f", "frozen": "#8b949e"}
# Text has enough contrast on white and on black; where the reader's system is dark, it is lighter.
STYLE = (
    "text{font:13px sans-serif;fill:#656d76}.title{font-weight:bold}"
    "@media(prefers-color-scheme:dark){text{fill:#9198a1}}"
)
CASES = {  # of the ledger -> as the picture calls them
    "full": "full fine-tuning, float32",
    "full, bf16": "bf16",
    "full, fused GELU": "fused GELU",
    "full, AdamW in 8 bits": "AdamW in 8 bits",
    "full, recomputing attention": "all but attention recomputed",
    "full, all together": "these four together",
    "LoRA": "LoRA, float32",
    "LoRA, bf16, half base": "bf16, frozen weights in it too",
    "LoRA, all together": "and packed, fused GELU, recomputed",
    "frozen": "frozen, encoding only",
}


def draw_memory_switches() -> str:
    """SVG: peak memory of one training step of ESM-2 150M, counted, by what trains and which switches are on."""
    rows = {row["case"]: row for row in read("memory_ledger_cpu")["rows"]}
    tokens = "ESM-2 {size}, {rows} x {length} tokens".format(**rows["full"]["settings"])
    title = escape(f"{tokens}: most memory at once in a training step, GiB")
    peaks = {case: rows[case]["allocations"]["bytes"] / 2**30 for case in CASES}
    height = TOP + len(CASES) * (BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        f"<title>{title}</title>",
        f'<text class="title" x="8" y="22">{title}</text>',
    ]
    for place, (case, label) in enumerate(CASES.items()):
        y, length = TOP + place * (BAR + GAP), max(1, round(peaks[case] * (WIDTH - LABELS - 60) / max(peaks.values())))
        colour = COLOURS[rows[case]["settings"]["trains"]]
        lines += [
            f'<text x="{LABELS - 10}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{length}" height="{BAR}" fill="{colour}" rx="2"/>',
            f'<text x="{LABELS + length + 6}" y="{y + 14}">{peaks[case]:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


COMPUTED = (speedup_index, speedup_cards, speedup_shared_cards, devices, families, encoder_choices)
TABLES: dict[str, Callable[[], str]] = {**MEASURED, **{made.__name__: made for made in COMPUTED}}


def render(text: str) -> str:
    """`text` with every table block filled."""
    return _BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def main() -> None:
    """Rewrites pages and picture, or exits with 1 if `--check` finds one out of date."""
    wanted = {path: render(path.read_text()) for path in PAGES} | {PICTURE: draw_memory_switches()}
    for path, text in wanted.items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"{path} is not what benchmarks/tables.py writes: run it.")


if __name__ == "__main__":
    main()

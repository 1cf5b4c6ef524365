"""What differs by device: the decisions themselves, taken for described devices, each beside the test that holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_ext.doctor.machine import DEFAULT_WHEELS_FROM
from hf_ext.hardware import Hardware, describe_hardware
from hf_ext.speedups import REGISTRY, Context, DataFacts, Decision, ModelFacts
from hf_ext.training_args import FastTrainingArguments

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


def decide(name: str, hardware: Hardware, model: ModelFacts) -> Decision:
    """What a run with all speed-ups decides on a device with eight cores."""
    speedup = next(one for one in REGISTRY if name == one.NAME)
    args = FastTrainingArguments(output_dir="o", speedups=["all"])
    return speedup.decide(Context(hardware, args, model, DATA, cpu_cores=8))


def precision(hardware: Hardware) -> str:
    decision = decide("precision", hardware, TRAINED)
    return decision.settings["mixed_precision"] if decision.status == "applied" else "float32"


def encoder_precision(hardware: Hardware) -> str:
    decision = decide("encoder_precision", hardware, FROZEN)
    if decision.status != "applied":
        return "float32"
    return f"{decision.settings['dtype']} ({decision.settings['mode']})"


def attention(model: ModelFacts) -> Callable[[Hardware], str]:
    return lambda hardware: decide("attention", hardware, model).settings.get("kernel", "-")


def applied(name: str) -> Callable[[Hardware], str]:
    return lambda hardware: "yes" if decide(name, hardware, TRAINED).status == "applied" else "-"


def workers(hardware: Hardware) -> str:
    settings = decide("data_loading", hardware, TRAINED).settings
    return f"{settings['dataloader_num_workers']}{', pinned' if settings['dataloader_pin_memory'] else ''}"


def wheels(hardware: Hardware) -> str:
    if hardware.compute_capability is None:
        return "-"
    return "yes" if hardware.compute_capability >= DEFAULT_WHEELS_FROM else "no: CUDA 12.6"


CHOICE = "tests/speedups/test_decisions.py::test_facts_decide_and_say_why"
UNITS = "tests/speedups/test_decisions.py::test_each_device_trains_in_what_it_has_units_for"
HALF = "tests/speedups/test_decisions.py::test_facts_decide_and_say_why"
LOADING = "tests/speedups/test_decisions.py::test_what_compiles_and_what_loads_by_device"
WHEELS = "tests/doctor/test_findings.py::test_wheels_without_kernels_for_the_card_are_named_with_what_to_install"
ENTRIES = (
    Entry("precision of what trains", precision, UNITS),
    Entry("of frozen encoders", encoder_precision, UNITS),
    Entry("attention of ESM", attention(TRAINED), CHOICE),
    Entry("attention of T5", attention(T5), CHOICE),
    Entry("TF32", applied("tf32"), HALF),
    Entry("blocks compiled", applied("compile"), LOADING),
    Entry("oneDNN's products tried", applied("cpu_matmul"), LOADING),
    Entry("data workers of 8 cores", workers, LOADING),
    Entry("default torch wheel runs", wheels, WHEELS),
)


def device_rows() -> list[list[str]]:
    """A row per entry: what, a cell per device, the test."""
    hardware = [describe_hardware(name) for name in DEVICES]
    return [[entry.what, *map(entry.cell, hardware), f"`{entry.test.split('::')[1]}`"] for entry in ENTRIES]

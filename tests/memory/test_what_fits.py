"""The largest batch is the largest, and what does not fit says what would make it fit."""

import dataclasses

import pytest
import torch
from inside import find_switches
from ledger_subjects import SHAPES, make_model, make_subject
from torch import nn

from hf_ext.memory import MemoryModel, MemoryReport, TrainConfig, format_memory, report_memory
from hf_ext.memory.report import CONTEXT_BYTES, IDLE_SHARE, find_fix, largest_rows
from hf_ext.speedups import REGISTRY

pytestmark = pytest.mark.internals
GIB = 2**30
MIB = 2**20
HALF = {"half": True}
OFFERS = [speedup.offer for speedup in REGISTRY]


def forecaster_of(shape=(64, 4, 12), training="full", length=64, **settings):
    return make_subject(make_model(shape, training, **settings), length)


def card_of(room):
    """Bytes of a card of which so many are counted on."""
    return round((room + CONTEXT_BYTES) / (1 - IDLE_SHARE))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ({}, HALF),
        ({}, {"recomputes": True, "half": True}),
        ({"training": "lora"}, {**HALF, "has_half_base": True}),
        ({"packed": True}, HALF),
        ({"training": "frozen"}, {}),
    ],
    ids=str,
)
def test_one_row_more_than_the_largest_batch_exceeds_the_room(settings, ways):
    forecaster, room = forecaster_of(**settings), 64 * MIB
    config = TrainConfig(4, **ways)
    rows = largest_rows(forecaster, config, room)
    assert rows > 4
    assert forecaster.forecast(dataclasses.replace(config, rows=rows)).peak <= room
    assert forecaster.forecast(dataclasses.replace(config, rows=rows + 1)).peak > room


def test_where_not_one_row_fits_the_largest_batch_is_none():
    assert largest_rows(forecaster_of(), TrainConfig(4, **HALF), 3 * MIB) == 0


def test_lines_add_up_to_the_peak_and_each_way_to_train_holds_what_it_must():
    forecaster, config = forecaster_of(), TrainConfig(8, **HALF)
    found = forecaster.forecast(config)
    assert sum(num_bytes for _, num_bytes in found.lines()) == found.peak
    assert found.moment == "backward pass"
    twice = forecaster.forecast(dataclasses.replace(config, passes=2))  # all gradients are there from the beginning
    assert twice.gradients == forecaster.all_gradients > found.gradients
    assert twice.peak > found.peak
    together = dataclasses.replace(forecaster, sends_gradients=True).forecast(config)  # several processes: twice
    assert together.peak - found.peak == forecaster.all_gradients
    there = forecaster.forecast(dataclasses.replace(config, on_host=True))
    assert found.peak - there.peak == found.optimizer == 2 * forecaster.all_gradients


# What a step of 8 rows of 1,024 tokens needs to fit into so many GiB: the 650M model trained in full, the
# others with adapters.
SMALLER = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"
TARGETS = {
    "650M": ("full", 8, "--activation_checkpointing true, --optim adamw_8bit (other numerics)", 8),
    "3B": ("lora", 9, f"{SMALLER}, --activation_checkpointing true, --speedups all lora_base", 4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TARGETS)
def test_the_switches_that_make_esm_2_fit_are_named(name):
    training, room_gib, options, rows = TARGETS[name]
    forecaster = forecaster_of(SHAPES[name], training, 1024)
    config = TrainConfig(8, **HALF)
    assert forecaster.forecast(config).peak > 2 * room_gib * GIB
    fix = find_fix(forecaster, config, room_gib * GIB, OFFERS)
    assert fix.forecast.peak <= room_gib * GIB
    report = MemoryReport(config, forecaster.forecast(config), 1024, 0, fix=fix)
    assert (report.options(), fix.config.rows) == (options, rows)
    assert fix.config.rows * fix.config.passes == 8  # the effective batch stays
    assert len(forecaster.timelines) <= 4  # passes that were computed for it


@pytest.mark.nightly
def test_what_fits_with_no_switch_says_so():
    forecaster = forecaster_of(SHAPES["3B"], length=1024)
    assert find_fix(forecaster, TrainConfig(8, **HALF), 16 * GIB, OFFERS) is None
    report = report_memory(forecaster, TrainConfig(8, **HALF), 1024, 18 * GIB, OFFERS)
    assert not report.fits
    assert "it does not fit with any switch" in format_memory(report)
    assert report.options() == ""


def test_smaller_passes_come_before_all_other_switches():
    forecaster, config = forecaster_of(), TrainConfig(64, **HALF)
    assert find_fix(forecaster, dataclasses.replace(config, rows=63), 3 * MIB, OFFERS) is None  # nothing to halve
    half = forecaster.forecast(dataclasses.replace(config, rows=32, passes=2)).peak
    fix = find_fix(forecaster, config, half, OFFERS)
    assert (fix.switches, fix.config.rows, fix.config.passes) == ((), 32, 2)


@pytest.mark.nightly
def test_switches_that_are_on_or_cannot_help_are_not_offered():
    def names(config, **settings):
        return {switch.option for switch in find_switches(forecaster_of(**settings), config, OFFERS)}

    full = names(TrainConfig(8, **HALF))
    assert "--optim adamw_8bit" in full
    assert not any("lora_base" in option for option in full)  # no frozen base
    assert names(TrainConfig(8, True, half=True, optimizer="adamw_8bit")) == set()
    assert "--speedups all precision" in names(TrainConfig(8))
    lora = names(TrainConfig(8, **HALF), training="lora")
    assert "--speedups all lora_base" in lora


def test_the_report_says_what_fits():
    forecaster = forecaster_of()
    report = report_memory(forecaster, TrainConfig(8, **HALF), 64, card_of(30 * MIB))
    lines = format_memory(report)
    assert lines[0].startswith("memory of 8 rows of 64 tokens: weights ")
    assert f"in all, of 30.0 MiB counted on; at most {report.largest} rows fit" in lines[0]


class Asking(nn.Module):
    """What no tensor without values answers."""

    def __init__(self, error: type[Exception] | None = None):
        super().__init__()
        self.layer, self.error = nn.Linear(4, 4), error

    def forward(self, x):
        if self.error:
            raise self.error("a fault")
        return self.layer(x).sum() * float(x.sum())


def test_a_model_that_asks_for_values_has_a_report_of_what_it_stores_and_a_fault_is_one():
    def report(model):
        memory = MemoryModel(model, lambda rows: {"x": torch.zeros(rows, 4, device="meta")})
        return report_memory(memory, TrainConfig(8), 1, 4 * GIB)

    found = report(Asking())
    assert (found.forecast.peak, found.stored) == (20 * 16, 20 * 16)  # weights, gradients, two states
    assert "activations are not counted" in " ".join(format_memory(found))
    with pytest.raises(ValueError, match="a fault"):
        report(Asking(ValueError))

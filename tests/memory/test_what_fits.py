"""The largest batch is the largest, and what does not fit says what would make it fit."""

import dataclasses
import json

import pytest
from ledger_subjects import SHAPES, make_model, make_subject

from hf_ext.memory.forecast import Choice, Forecaster
from hf_ext.memory.probe import Graph
from hf_ext.memory.report import describe_remedy, format_memory, format_savings, report_memory
from hf_ext.memory.what_fits import (
    CONTEXT_BYTES,
    find_remedy,
    largest_rows,
    switches,
    usable_bytes,
)

GIB = 2**30
MIB = 2**20
HALF = Graph("none", half=True)


def forecaster_of(shape=(64, 4, 12), training="full", length=64, **settings):
    return Forecaster(make_subject(make_model(shape, training, **settings), length))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("settings", "graph"),
    [
        ({}, HALF),
        ({}, Graph("attention", half=True)),
        ({"training": "lora"}, Graph("none", half=True, base="half")),
        ({"packed": True}, HALF),
        ({"training": "frozen"}, Graph("none")),
    ],
    ids=str,
)
def test_one_row_more_than_the_largest_batch_exceeds_the_room(settings, graph):
    forecaster, room = forecaster_of(**settings), 64 * MIB
    choice = Choice(4, graph)
    rows = largest_rows(forecaster, choice, room)
    assert rows > 4
    assert forecaster.forecast(dataclasses.replace(choice, rows=rows)).peak <= room
    assert forecaster.forecast(dataclasses.replace(choice, rows=rows + 1)).peak > room


@pytest.mark.nightly
def test_few_passes_find_the_largest_batch_where_each_number_of_rows_is_a_pass():
    subject = make_subject(make_model((64, 4, 12)), 64, scales=False)
    rows = largest_rows(Forecaster(subject), Choice(4, HALF), 256 * MIB)
    assert rows == largest_rows(forecaster_of(), Choice(4, HALF), 256 * MIB)
    assert len(subject.known) <= 8


def test_where_not_one_row_fits_the_largest_batch_is_none():
    assert largest_rows(forecaster_of(), Choice(4, HALF), 3 * MIB) == 0


def test_lines_add_up_to_the_peak():
    found = forecaster_of().forecast(Choice(8, HALF))
    assert sum(num_bytes for _, num_bytes in found.lines()) == found.peak
    assert found.moment == "backward pass"


def test_with_few_rows_the_optimizer_step_is_the_fullest_moment():
    forecaster = forecaster_of(length=2)
    found = forecaster.forecast(Choice(1, Graph("full"), "adamw_torch"))
    assert found.moment == "optimizer step"
    # Weights, gradients, two states, and a copy of each tensor that steps.
    assert found.peak == found.weights + 4 * forecaster.all_gradients


def test_more_passes_hold_all_gradients_from_the_beginning():
    forecaster = forecaster_of()
    once, twice = (forecaster.forecast(Choice(8, HALF, passes=passes)) for passes in (1, 2))
    assert twice.gradients == forecaster.all_gradients > once.gradients
    assert twice.peak > once.peak


def test_several_processes_hold_gradients_twice():
    alone = forecaster_of()
    together = dataclasses.replace(alone, sends_gradients=True)
    assert together.forecast(Choice(8, HALF)).peak - alone.forecast(Choice(8, HALF)).peak == alone.all_gradients


def test_an_optimizer_on_the_host_leaves_the_device():
    forecaster = forecaster_of()
    here, there = (forecaster.forecast(Choice(8, HALF, on_host=on_host)) for on_host in (False, True))
    assert here.peak - there.peak == here.optimizer == 2 * forecaster.all_gradients
    assert there.host == here.optimizer + forecaster.all_gradients


# What a step of 8 rows of 1,024 tokens needs to fit into so many GiB: the 650M model trained in full, the
# others with adapters.
TARGETS = {
    "650M": ("full", 8, "--activation_policy attention, --optim adamw_8bit (other numerics)", 8),
    "3B": (
        "lora",
        9,
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2, --activation_policy attention, "
        "--speedups lora_base",
        4,
    ),
    "15B": (
        "lora",
        16,
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2, --activation_policy attention, "
        "--load_in_4bit true (other numerics)",
        4,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TARGETS)
def test_the_switches_that_make_esm_2_fit_are_named(name):
    training, room_gib, options, rows = TARGETS[name]
    forecaster = forecaster_of(SHAPES[name], training, 1024)
    choice = Choice(8, HALF)
    assert forecaster.forecast(choice).peak > 2 * room_gib * GIB
    remedy = find_remedy(forecaster, choice, room_gib * GIB)
    assert remedy.forecast.peak <= room_gib * GIB
    assert (describe_remedy(remedy, choice, 1024), remedy.choice.rows) == (options, rows)
    assert remedy.choice.rows * remedy.choice.passes == 8  # the effective batch stays
    assert len(forecaster.subject.known) <= 4  # passes that were computed for it


@pytest.mark.nightly
def test_what_fits_with_no_switch_says_so():
    forecaster = forecaster_of(SHAPES["3B"], length=1024)
    assert find_remedy(forecaster, Choice(8, HALF), 16 * GIB) is None
    report = report_memory(forecaster, Choice(8, HALF), 1024, 20 * GIB, 16 * GIB)
    assert not report.fits
    assert "it does not fit with any switch" in format_memory(report)
    assert report.options() == ""


def test_smaller_passes_come_before_all_other_switches():
    forecaster, choice = forecaster_of(), Choice(64, HALF)
    assert find_remedy(forecaster, dataclasses.replace(choice, rows=63), 3 * MIB) is None  # nothing to halve
    half = forecaster.forecast(dataclasses.replace(choice, rows=32, passes=2)).peak
    remedy = find_remedy(forecaster, choice, half)
    assert (remedy.switches, remedy.choice.rows, remedy.choice.passes) == ((), 32, 2)


@pytest.mark.nightly
def test_switches_that_are_on_or_cannot_help_are_not_offered():
    def names(choice, **settings):
        return {s.option for group in switches(forecaster_of(**settings), choice) for s in group}

    full = names(Choice(8, HALF))
    assert "--optim adamw_8bit" in full
    assert not any("load_in" in option for option in full)  # no frozen base
    assert names(Choice(8, Graph("full", half=True), "adamw_8bit")) == set()
    assert "--speedups precision" in names(Choice(8, Graph("none")))
    lora = names(Choice(8, HALF), training="lora")
    assert {"--load_in_8bit true", "--load_in_4bit true", "--speedups lora_base"} <= lora


def test_only_what_changes_nothing_comes_without_a_note():
    groups = switches(forecaster_of(training="lora"), Choice(8, Graph("none")))
    groups += switches(forecaster_of(), Choice(8, HALF))
    silent = {s.option for group in groups for s in group if not s.note}
    assert silent <= {
        *("--activation_policy attention", "--activation_policy full"),
        *("--speedups lora_base", "--optim_ext cpu_offload"),
    }


def test_the_margin_is_a_share_and_a_context():
    assert usable_bytes(16 * GIB, "cuda") == round(16 * GIB * 0.92) - CONTEXT_BYTES
    assert usable_bytes(MIB, "cuda") == 0


def test_the_report_says_what_each_switch_saves_and_is_json():
    forecaster = forecaster_of()
    report = report_memory(forecaster, Choice(8, HALF), 64, 40 * MIB, 30 * MIB)
    lines, table = format_memory(report), format_savings(report)
    assert lines[0].startswith("memory of 8 rows of 64 tokens: weights ")
    assert f"in all, of 30.0 MiB counted on; at most {report.largest} rows fit" in lines[0]
    assert "--activation_policy full" in table
    assert all(found.peak <= report.forecast.peak for _, found in report.savings)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["predicted_peak_bytes"] == report.forecast.peak == sum(values["lines"].values())


@pytest.mark.nightly
def test_a_report_takes_one_pass_for_each_way_to_compute():
    forecaster = forecaster_of(training="lora")
    report_memory(forecaster, Choice(8, HALF), 64, 40 * MIB, 30 * MIB)
    bases, policies = 3, 3  # as it is, half, codes; none, attention, full
    assert len(forecaster.subject.known) <= bases * policies


def test_a_step_with_room_to_spare_is_not_asked_what_would_save():
    forecaster = forecaster_of()
    report = report_memory(forecaster, Choice(8, HALF), 64, 200 * GIB, 100 * GIB)
    assert (report.savings, len(forecaster.subject.known)) == ([], 1)
    assert report.largest > 8

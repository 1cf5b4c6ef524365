"""What the doctor says of memory: the ledger's numbers, on a described card, with the switches that would help."""

import pytest
from doctored import look

from hf_ext.doctor.findings import find_problems
from hf_ext.doctor.page import format_page
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.memory.report import MemoryReport

GIB = 2**30
ESM_650M = MaskedLMArguments(model_size="esm2_650M")


@pytest.fixture(scope="module")
def on_8_gib():
    return look("rtx-3070", model=ESM_650M, per_device_train_batch_size=16)


def test_the_page_has_the_table_and_the_largest_batch(on_8_gib):
    page = " ".join(format_page(on_8_gib, find_problems(on_8_gib)).split())
    assert "memory of 16 rows of 93 tokens: weights 2.43 GiB" in page
    assert "in all, of 6.00 GiB counted on; at most 0 rows fit (not calibrated on a card)" in page
    assert "--optim adamw_8bit 7.26 GiB" in page


def test_what_does_not_fit_stops_and_names_the_switches(on_8_gib):
    (finding,) = [found for found in find_problems(on_8_gib) if found.name == "memory"]
    assert finding.level == "stops"
    assert "--activation_policy attention" in finding.remedy
    report = on_8_gib.forecast
    assert report.fix.forecast.peak <= report.room < report.forecast.peak


@pytest.mark.nightly
def test_a_card_with_room_to_spare_has_nothing_off():
    facts = look("h200", model=ESM_650M)
    assert [found for found in find_problems(facts) if found.name == "memory"] == []
    assert facts.forecast.fits
    assert facts.forecast.largest > 16


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("device", "settings"), [("t4", {"without": ["packing"]}), ("a100", {}), (None, {"without": ["lora_base"]})]
)
def test_towers_with_adapters_have_a_prediction(device, settings):
    facts = look(device, use_peft=True, **settings)
    assert isinstance(facts.forecast, MemoryReport)
    head_and_encoders = dict(facts.memory)["weights"]
    assert facts.forecast.forecast.weights == pytest.approx(head_and_encoders, rel=0.05)


def test_where_all_inputs_are_cached_the_formula_answers():
    assert look("t4").forecast == "no encoder runs while training"


@pytest.mark.nightly
def test_the_formula_is_an_upper_bound_within_a_third_of_the_ledger():
    for settings in ({"bf16": True}, {"without": ["precision", "tf32"]}):
        facts = look("a100-80gb", model=ESM_650M, per_device_train_batch_size=64, speedups=[], **settings)
        predicted = facts.forecast.forecast.peak
        assert predicted <= facts.step_bytes * 1.05
        assert facts.step_bytes < 1.35 * predicted

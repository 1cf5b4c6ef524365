"""What the doctor says of memory: the ledger's numbers, on a described card, with the switches that would help."""

import pytest
import torch
from doctored import gather_facts, main
from inside import BLOCK_BYTES, GeneratorArguments, Ledger, MaskedLMArguments, find_problems, format_page, record_pass

from hf_ext.models import AntibodyGenerator

GIB = 2**30
ESM_650M = MaskedLMArguments(model_size="esm2_650M")


@pytest.fixture(scope="module")
def on_8_gib():
    return gather_facts("rtx-3070", model=ESM_650M, per_device_train_batch_size=16)


def test_the_page_has_the_table_and_the_largest_batch(on_8_gib):
    page = " ".join(format_page(on_8_gib, find_problems(on_8_gib)).split())
    assert "memory of 16 rows of 93 tokens: weights 2.43 GiB" in page
    assert "in all, of 6.00 GiB counted on; at most 0 rows fit (not calibrated on a card)" in page
    assert "it would with --activation_checkpointing true, --speedups all cpu_offload" in page


def test_what_does_not_fit_stops_and_names_the_switches(on_8_gib):
    (finding,) = [found for found in find_problems(on_8_gib) if found.name == "memory"]
    assert finding.level == "stops"
    assert "--activation_checkpointing true, --speedups all cpu_offload" in finding.remedy
    report = main(on_8_gib).memory
    assert report.fix.forecast.peak <= report.room < report.forecast.peak


@pytest.mark.nightly
def test_a_card_with_room_to_spare_has_nothing_off():
    facts = gather_facts("h200", model=ESM_650M)
    assert [found for found in find_problems(facts) if found.name == "memory"] == []
    assert main(facts).memory.fits
    assert main(facts).memory.largest > 16


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("device", "settings"), [("t4", {"without": ["packing"]}), ("a100", {}), (None, {"without": ["lora_base"]})]
)
def test_towers_with_adapters_have_a_prediction(device, settings):
    facts = gather_facts(device, use_peft=True, **settings)
    report, stage = main(facts).memory, main(facts).stage
    head = sum(p.numel() for p in stage.model.head.parameters())
    whole = 4 * (head + sum(part.num_parameters for part in stage.parts))
    linear = 2 * 2 * (4 * 64 * 64 + 2 * 64 * 128)  # of two encoders, in two layers: attention, feed-forward
    in_half = 2 * linear if main(facts).plan.applied("lora_base") else 0
    assert report.forecast.weights == pytest.approx(whole - in_half, rel=0.01)


def test_where_all_inputs_are_cached_only_the_head_is_held():
    found = main(gather_facts("t4"))
    head = sum(parameter.numel() for parameter in found.stage.model.head.parameters())
    assert found.memory.stored == pytest.approx(16 * head, rel=0.01)
    assert found.encoding_bytes == 4 * sum(part.num_parameters for part in found.stage.parts)


def test_a_generators_step_takes_what_is_predicted_and_one_that_asks_for_values_what_it_stores():
    small = {"d_model": 32, "d_ff": 64, "num_heads": 4, "dropout": 0.0}
    plain = {"speedups": [], "per_device_train_batch_size": 4}
    found = main(gather_facts("cpu", model=GeneratorArguments(architecture="transformer", **small), **plain))
    rows = found.memory.config.rows
    model, make_batch = found.stage.as_trained(found.plan)
    real = AntibodyGenerator(model.config).train()
    batch = {name: torch.full(value.shape, 5) for name, value in make_batch(rows).items()}
    batch["attention_mask"][0, -9:] = 0  # some padding: else transformers leaves the mask out
    peak = record_pass(Ledger(BLOCK_BYTES, 0), real, [], batch, False, "cpu").peak()
    assert found.memory.note == ""
    assert found.memory.forecast.activations == pytest.approx(peak.activations, rel=0.02)
    asking = main(gather_facts("a100", model=GeneratorArguments(architecture="lstm"))).memory
    assert "activations are not counted" in asking.note
    assert asking.forecast.peak == asking.stored

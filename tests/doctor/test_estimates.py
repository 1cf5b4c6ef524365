"""Estimates against sums worked out by hand, and bounds against what the run itself bounds."""

import pytest
import torch
from doctored import gather_facts, main
from inside import GeneratorArguments, MaskedLMArguments, format_page
from torch.utils._pytree import tree_map

from hf_ext.doctor import estimates
from hf_ext.doctor.gather import BASELINE_BYTES
from hf_ext.hardware import describe_hardware
from hf_ext.plan import Plan
from hf_ext.property import AffinityArguments
from hf_ext.reporting import peak_bytes
from hf_ext.speedups import Decision
from hf_ext.tasks import Part, RowLengths, Stage, Step
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
TERA = 1e12


# 15 % to 45 % of the data sheet's dense peak where products are wide, 3 % to 20 % where they are 512 and less.
@pytest.mark.parametrize(
    ("card", "dtype", "width", "low", "high"),
    [
        ("T4", "fp16", 1280, 9.75, 29.25),
        ("T4", "fp16", 320, 1.95, 13.0),
        ("A100", "tf32", 512, 4.68, 31.2),
        ("H100", "bf16", 1280, 148.425, 445.275),
    ],
)
def test_rates_are_shares_of_the_published_peaks(card, dtype, width, low, high):
    rate = estimates.published_rate(describe_hardware(card), dtype, width)
    assert (rate.low / TERA, rate.high / TERA) == (pytest.approx(low), pytest.approx(high))
    assert card in rate.basis
    assert "assumed" in rate.basis


def test_a_peak_that_nobody_published_gives_no_rate():
    assert estimates.published_rate(describe_hardware("T4"), "bf16", 1280) is None
    assert estimates.published_rate(describe_hardware("cpu"), "fp32", 1280) is None


def stage(training: str, **part) -> Stage:
    """2 FLOPs for each of 10 tokens of a row, of which there are 300, 55 validated; 110 distinct; a head of 10."""
    parts = [Part("p", training, 100, 0, 20.0, lambda device, num: None, num_distinct=110, **part)]
    args = FastTrainingArguments(output_dir="never_made", report_to="none")
    return Stage(
        args,
        None,
        parts,
        lambda plan: None,
        RowLengths({"train": 300, "validation": 55}, {}, {}),
        num_head_parameters=10,
    )


SCHEDULE = estimates.Schedule(
    batch_rows=10, steps=20, updates=20, epochs=2, evaluations=4, evaluated_share=0.5, saves=2, kept_epochs=0
)
RATES = [estimates.Rate(low=10.0, high=100.0, basis="by hand")]
CARD = describe_hardware("T4")


def test_frozen_encoders_are_timed_once_and_the_head_in_every_epoch():
    plan = Plan(CARD, [Decision("embedding_cache", "I", "applied", "")])
    # 2,200 FLOPs once; the head 18,000 x 2, and 20 steps of 3 to 20 ms
    assert estimates.sum_seconds(plan, stage("frozen"), SCHEDULE, RATES) == [
        ("encoding 110 distinct inputs once", (22.0, 220.0)),
        ("training, 20 passes", (pytest.approx(360.06), pytest.approx(3600.4))),
    ]


def test_what_trains_is_timed_in_every_epoch_with_evaluations_and_padding():
    plan = Plan(CARD, [], facts={"data": {"padding_share_random": 0.5}})
    # 18,000 x 2 + 1,100 x 4 x 0.5 = 38,200 FLOPs, doubled by padding; the head as above
    assert estimates.sum_seconds(plan, stage("full"), SCHEDULE, RATES) == [
        ("training, 20 passes", (pytest.approx(1124.06), pytest.approx(11240.4)))
    ]


def test_reading_rows_and_scoring_them_take_time_beside_training():
    scored, rate = 10**13, estimates.published_rate(CARD, "fp32", 100)
    plan = Plan(CARD, [])
    given = plan, stage("lora", num_scored=scored), SCHEDULE, CARD, 0.0
    (*_, last) = estimates.estimate_times(*given, read_seconds=2.0).lines
    low, high = 5 + 2 + 20 * scored / rate.high, 25 + 2.6 + 20 * scored / rate.low
    assert last == ("starting, rows and scores", (pytest.approx(low), pytest.approx(high)))
    assert [what for what, _ in estimates.estimate_times(*given, read_seconds=None).lines] == ["training, 20 passes"]


def test_the_hosts_memory_is_that_of_this_process_and_of_baselines():
    facts = gather_facts("t4", model=MaskedLMArguments(model_size="esm2_8M"))
    before, after = facts.host_bytes - BASELINE_BYTES, peak_bytes(torch.device("cpu"))
    assert after / 2 < before <= after
    assert "host memory: about" in " ".join(format_page(facts, []).split())


EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch"}


@pytest.mark.parametrize(
    ("arguments", "steps", "evaluations", "saves"),
    [
        # 2,400 rows; batches of 32 (75 an epoch, which the plan chooses for cached inputs)
        ({"num_train_epochs": 3, "cached_batch_size": 1024}, 225, 0, 1),
        ({"max_steps": 30, "per_device_train_batch_size": 80, "gradient_accumulation_steps": 2}, 60, 0, 1),
        ({"num_train_epochs": 4, **EPOCHS, "eval_every_epochs": 2}, 1200, 2, 4),
        ({"max_steps": 100, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 25}, 100, 10, 4),
    ],
)  # fmt: skip
@pytest.mark.nightly
def test_the_schedule_is_that_of_the_arguments_as_the_plan_leaves_them(arguments, steps, evaluations, saves):
    schedule = main(gather_facts(**arguments, eval_subset=60.0)).schedule
    assert (schedule.steps, schedule.evaluations, schedule.saves) == (steps, pytest.approx(evaluations), saves)
    assert schedule.evaluated_share == pytest.approx(0.2)  # of 300 validation rows


def test_memory_is_weights_gradients_and_two_optimizer_states():
    found = main(gather_facts("t4", model=MaskedLMArguments(model_size="esm2_8M")))
    total, trained = 7_512_474, 7_512_353  # all but the contact head's 121 train
    assert (found.stage.parts[0].num_parameters, found.memory.stored // 2**16) == (
        total,
        (4 * total + 12 * trained) // 2**16,
    )


@pytest.mark.nightly
def test_the_output_folder_holds_what_is_kept_and_what_is_being_written():
    found = main(gather_facts(num_train_epochs=10, save_strategy="epoch", save_total_limit=2))
    one, model = found.checkpoint.full_bytes, found.exported_bytes
    assert found.output_bytes == 3 * one + model
    assert main(gather_facts(num_train_epochs=10, save_strategy="epoch")).output_bytes == 10 * one + model
    assert main(gather_facts(num_train_epochs=10, save_strategy="no")).output_bytes == model


DEMOS = {
    "affinity": {"model": AffinityArguments(tower_training=["full"]), "per_device_train_batch_size": 32},
    "masked_lm": {"model": MaskedLMArguments(), "without": ["masked_lm_head"]},
    "generation": {"model": GeneratorArguments(d_model=32, hidden_size=64), "per_device_train_batch_size": 16},
}


@pytest.mark.nightly
@pytest.mark.parametrize("demo", DEMOS)
def test_on_this_machine_a_step_takes_about_what_is_estimated(demo):
    """The model that the run would train, on random rows of the longest there is: forward, backward, no optimizer."""
    facts = gather_facts(None, measure_seconds=0.5, use_cpu=True, **DEMOS[demo])
    found = main(facts)
    assert "measured here on a batch of" in found.times.basis
    model, make_batch = found.stage.as_trained(found.plan)
    real = model.to_empty(device="cpu").train()
    for tensor in (*real.parameters(), *real.buffers()):
        tensor.data.fill_(0.01) if tensor.is_floating_point() else tensor.data.zero_()
    rows = round(found.schedule.batch_rows)
    step = Step(real, tree_map(lambda value: torch.ones_like(value, device="cpu"), make_batch(rows)))
    found.plan.speed_up(real)
    (span,) = (span for what, span in found.times.lines if what.startswith("training"))
    least, most = (seconds / found.schedule.steps for seconds in span)
    assert least / 2 < estimates.time_passes(step, "cpu") < 2 * most

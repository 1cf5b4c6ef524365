"""Estimates against sums worked out by hand, and bounds against what the run itself bounds."""

import re

import pytest
from doctored import look, main

from hf_ext.doctor import estimates
from hf_ext.hardware import describe_hardware, detect_hardware
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.plan import Plan
from hf_ext.speedups.base import Decision
from hf_ext.tasks.sketch import Part, Stage, Step
from hf_ext.training_args import FastTrainingArguments

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


def timed(size: int, seconds: list[float]) -> Step | None:
    """Sizes up to 4; 100 FLOPs for each."""
    return Step(lambda: seconds.append(size), 100.0 * size, f"size {size}") if size <= 4 else None


@pytest.mark.parametrize(("patience", "largest"), [(100.0, 4), (7.0, 2), (1.0, 1)])
def test_steps_are_as_large_as_the_time_allows(monkeypatch, patience, largest):
    """On a clock that shows the sizes that were run: a step of size n takes n seconds."""
    sizes: list[float] = []
    monkeypatch.setattr(estimates.time, "perf_counter", lambda: float(sum(sizes)))
    part = Part("p", "full", 100, 0, make_step=lambda device, size: timed(size, sizes))
    rate = estimates.measure_rate(part, detect_hardware("cpu"), "fp32", patience)
    assert f"measured here on size {largest} " in rate.basis
    assert (rate.low, rate.high) == (pytest.approx(50.0), pytest.approx(150.0))


def stage(training: str, **part) -> Stage:
    """6 or 2 FLOPs for 3,000 tokens an epoch, 2 for 500 evaluated ones and for 1,000 distinct ones; a head of 10."""
    flops = {"train_flops": (2.0 if training == "frozen" else 6.0) * 3000, "eval_flops": 1100.0, "once_flops": 2200.0}
    parts = [Part("p", training, 100, 0, lambda device, size: None, **flops, num_distinct=50, **part)]
    args = FastTrainingArguments(output_dir="never_made", report_to="none")
    given = {"num_rows": {"train": 100}, "head_flops": 6.0 * 10 * 100, "serial_seconds": (0.01, 0.03)}
    return Stage(args, None, parts, lambda plan: None, **given)


SCHEDULE = estimates.Schedule(
    batch_rows=10, steps=20, updates=20, epochs=2, evaluations=4, evaluated_share=0.5, saves=2
)
RATES = [estimates.Rate(low=10.0, high=100.0, basis="by hand")]
CARD = describe_hardware("T4")


def test_frozen_encoders_are_timed_once_and_the_head_in_every_epoch():
    plan = Plan(CARD, [Decision("embedding_cache", "I", "applied", "")])
    # 2,200 FLOPs once; the head 6,000 x 2, and 20 steps of 3 to 20 ms
    assert estimates.sum_seconds(plan, stage("frozen"), SCHEDULE, RATES, waits=False) == [
        ("encoding 50 distinct inputs once", (22.0, 220.0)),
        ("training, 20 passes", (pytest.approx(120.06), pytest.approx(1200.4))),
    ]


def test_what_trains_is_timed_in_every_epoch_with_evaluations_padding_and_waits():
    plan = Plan(CARD, [], facts={"data": {"padding_share_random": 0.5}})
    # 18,000 x 2 + 1,100 x 4 x 0.5 = 38,200 FLOPs, doubled by padding; the head as above; waits of 10 to 30 ms
    assert estimates.sum_seconds(plan, stage("full"), SCHEDULE, RATES) == [
        ("training, 20 passes", (pytest.approx(884.26), pytest.approx(8841.0)))
    ]


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
    schedule = main(look(**arguments, eval_subset=60.0)).schedule
    assert (schedule.steps, schedule.evaluations, schedule.saves) == (steps, pytest.approx(evaluations), saves)
    assert schedule.evaluated_share == pytest.approx(0.2)  # of 300 validation rows


def test_money_is_hours_times_the_price():
    assert estimates.money((1800.0, 7200.0), 3.0) == (1.5, 6.0)
    assert estimates.money((1800.0, 7200.0), None) is None
    assert estimates.money(None, 3.0) is None


def test_memory_is_weights_gradients_and_two_optimizer_states():
    found = main(look("t4", model=MaskedLMArguments(model_size="esm2_8M")))
    total, trained = 7_512_474, 7_512_353  # all but the contact head's 121 train
    assert (found.stage.parts[0].num_parameters, found.memory.stored // 2**16) == (
        total,
        (4 * total + 12 * trained) // 2**16,
    )


@pytest.mark.nightly
def test_the_output_folder_holds_what_is_kept_and_what_is_being_written():
    found = main(look(num_train_epochs=10, save_strategy="epoch", save_total_limit=2))
    one, model = found.checkpoint.full_bytes, found.exported_bytes
    assert found.output_bytes == 3 * one + model
    assert main(look(num_train_epochs=10, save_strategy="epoch")).output_bytes == 10 * one + model
    assert main(look(num_train_epochs=10, save_strategy="no")).output_bytes == model


@pytest.mark.nightly
def test_on_this_machine_the_rate_is_measured():
    facts = look(None, measure_seconds=0.2, use_cpu=True)
    times = main(facts).times
    assert re.search("measured here on one layer, forward", times.basis)
    assert [what for what, _ in times.lines] == ["encoding 739 distinct inputs once", "training, 900 passes"]
    assert all(0 < least < most for _, (least, most) in times.lines)

"""Estimates against sums worked out by hand, and bounds against what really is kept."""

import contextlib
import dataclasses

import pytest
import torch
from doctored import look
from miniature_esm import NO_DROPOUT, esm_config
from transformers import EsmConfig, EsmModel

from hf_ext.doctor import estimates, sizes
from hf_ext.doctor.work import Encoder, Tokens
from hf_ext.hardware import describe_hardware
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

TERA = 1e12


# 15 % to 45 % of the data sheet's dense peak where products are wide, 3 % to 20 % where they are 512 and less.
@pytest.mark.parametrize(
    ("card", "dtype", "width", "low", "high"),
    [
        ("T4", "fp16", 1280, 9.75, 29.25),
        ("T4", "fp16", 320, 1.95, 13.0),
        ("T4", "fp32", 1280, 1.215, 3.645),
        ("A100", "bf16", 1280, 46.8, 140.4),
        ("A100", "tf32", 512, 4.68, 31.2),
        ("H100", "bf16", 1280, 148.425, 445.275),
    ],
)
def test_rates_are_shares_of_the_published_peaks(card, dtype, width, low, high):
    rate = estimates.published_rate(describe_hardware(card), dtype, width)
    assert (rate.low / TERA, rate.high / TERA) == (pytest.approx(low), pytest.approx(high))
    assert card in rate.basis
    assert "assumed" in rate.basis


@pytest.mark.nightly
def test_a_peak_that_nobody_published_gives_no_rate():
    assert estimates.published_rate(describe_hardware("T4"), "bf16", 1280) is None
    assert estimates.published_rate(describe_hardware("cpu"), "fp32", 1280) is None
    facts = look("cpu")
    assert facts.seconds == []
    assert facts.why_no_time == "no fp32 peak of cpu is published"


def small_work(facts, training: str):
    """One encoder: 2 FLOPs a token forward, 6 as it trains; 1,000 tokens once, 3,000 an epoch, 500 evaluated."""
    encoder = dataclasses.replace(
        facts.work.encoders[0],
        training=training,
        flops=(2.0 if training == "frozen" else 6.0, 0.0),
        forward_flops=(2.0, 0.01),
        distinct=Tokens(1000, 20_000, 20),
        train=Tokens(3000, 60_000, 20),
        evaluated=Tokens(500, 10_000, 20),
        num_distinct=50,
    )
    return dataclasses.replace(facts.work, encoders=[encoder], head_parameters=10, num_rows={"train": 100})


SCHEDULE = estimates.Schedule(batch_rows=10, steps=20, epochs=2, evaluations=4, evaluated_share=0.5, saves=2)
RATE = estimates.Rate(low=10.0, high=100.0, basis="by hand")


@pytest.mark.nightly
def test_frozen_encoders_are_timed_once_and_the_head_in_every_epoch():
    facts = look()
    lines = estimates.estimate_seconds(facts.plan, small_work(facts, "frozen"), SCHEDULE, [RATE])
    # 2 x 1,000 + 0.01 x 20,000 = 2,200 FLOPs once; the head 6 x 10 x 100 x 2 = 12,000, and 20 steps of 3 to 20 ms
    assert lines == [
        ("encoding 50 distinct inputs once", (22.0, 220.0)),
        ("training, 20 passes", (pytest.approx(120.06), pytest.approx(1200.4))),
    ]


@pytest.mark.nightly
def test_encoders_that_train_are_timed_in_every_epoch_with_evaluations_and_padding():
    facts = look()
    plan = facts.plan
    plan.facts["data"]["padding_share_random"] = 0.5
    lines = estimates.estimate_seconds(plan, small_work(facts, "full"), SCHEDULE, [RATE])
    # 6 x 3,000 x 2 + (2 x 500 + 0.01 x 10,000) x 4 x 0.5 = 38,200 FLOPs, doubled by padding; the head as above
    assert lines == [("training, 20 passes", (pytest.approx(884.06), pytest.approx(8840.4)))]


EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "steps", "evaluations", "saves"),
    [
        # 2,400 rows; batches of 32 (75 an epoch, which the plan chooses for cached inputs)
        ({"num_train_epochs": 3, "cached_batch_size": 1024}, 225, 0, 1),
        ({"num_train_epochs": 3, "per_device_train_batch_size": 100}, 72, 0, 1),
        ({"max_steps": 30, "per_device_train_batch_size": 80, "gradient_accumulation_steps": 2}, 60, 0, 1),
        ({"num_train_epochs": 4, **EPOCHS, "eval_every_epochs": 2}, 1200, 2, 4),
        ({"max_steps": 100, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 25}, 100, 10, 4),
    ],
)  # fmt: skip
def test_the_schedule_is_that_of_the_arguments_as_the_plan_leaves_them(arguments, steps, evaluations, saves):
    schedule = look(**arguments).schedule
    assert (schedule.steps, schedule.evaluations, schedule.saves) == (steps, pytest.approx(evaluations), saves)


@pytest.mark.nightly
def test_a_subset_of_the_evaluation_costs_its_share():
    # of 300 validation rows
    assert look(eval_subset=60.0).schedule.evaluated_share == pytest.approx(0.2)
    assert look(eval_subset=0.05).schedule.evaluated_share == pytest.approx(0.05)


def test_money_is_hours_times_the_price():
    assert estimates.money((1800.0, 7200.0), 3.0) == (1.5, 6.0)
    assert estimates.money((1800.0, 7200.0), None) is None
    assert estimates.money(None, 3.0) is None


def test_memory_is_weights_gradients_two_optimizer_states_and_half_copies():
    facts = look("t4", model=MaskedLMArguments(model_size="esm2_8M"))
    total, trained = 7_512_474, 7_512_353  # all but the contact head's 121 train
    lines = dict(facts.memory)
    assert (facts.work.encoders[0].num_parameters, facts.work.num_trainable) == (total, trained)
    assert lines["weights"] == 4 * total
    assert lines["gradients"] == 4 * trained
    assert lines["half-precision copies"] == 2 * trained
    assert next(value for name, value in lines.items() if name.startswith("optimizer")) == 8 * trained
    assert facts.static_bytes == 4 * total + 14 * trained


@pytest.mark.nightly
def test_states_in_host_memory_take_none_of_the_card():
    before, after = look("t4", use_peft=True), look("t4", use_peft=True, speedups=["all", "cpu_offload"])
    lines = dict(after.memory)
    assert lines["optimizer (in host memory)"] == 0
    assert before.static_bytes - after.static_bytes == 2 * lines["gradients"]


@pytest.mark.nightly
def test_a_lora_base_takes_two_bytes_a_weight_in_half_precision_and_six_otherwise():
    linear = 2 * 2 * (4 * 64 * 64 + 2 * 64 * 128)  # of two encoders, in two layers: attention, feed-forward
    facts = look("t4", use_peft=True)
    half, work = dict(facts.memory), facts.work
    assert facts.plan.applied("lora_base")
    assert sum(encoder.num_base for encoder in work.encoders) == linear
    everything = sum(encoder.num_parameters for encoder in work.encoders) + work.head_parameters
    assert half["weights"] == 4 * everything - 2 * linear
    assert half["half-precision copies"] == 2 * work.num_trainable
    full = dict(look("t4", use_peft=True, without=["lora_base"]).memory)
    assert full["weights"] == 4 * everything
    assert full["half-precision copies"] == 2 * (work.num_trainable + linear)
    exact = dict(look("t4", use_peft=True, without=["precision"]).memory)
    assert exact["weights"] == 4 * everything
    assert "half-precision copies" not in exact


def kept_bytes(config: EsmConfig, tokens: tuple[int, int], *, is_half: bool) -> int:
    """What autograd keeps of one pass in training, without weights and their copies."""
    torch.manual_seed(0)
    model = EsmModel._from_config(config, attn_implementation="sdpa").train()
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes_of: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.shape[:1] == tokens[:1]:
            sizes_of[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(4, 24, tokens)
    context = torch.autocast("cpu", torch.bfloat16) if is_half else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context:
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.sum()
    return sum(sizes_of.values())


@pytest.mark.parametrize("is_half", [False, True])
def test_the_bound_on_activations_holds_for_esm_and_a_halved_one_would_not(is_half):
    layers = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    config = esm_config(**layers, **NO_DROPOUT, token_dropout=True)
    shape = (4, 128)
    encoder = Encoder("esm", None, "full", config.to_dict(), 0, 0, (0, 0), (0, 0), train=Tokens(0, 0, 128))
    bound = sizes.activation_bytes(encoder, 4 * 128, is_half=is_half, checkpointed=False)
    kept = kept_bytes(config, shape, is_half=is_half)
    assert bound / 2 < kept <= bound


def test_recomputed_layers_keep_one_layer_and_every_input():
    encoder = Encoder("esm", None, "full", {"hidden_size": 10, "num_hidden_layers": 5}, 0, 0, (0, 0), (0, 0))
    # 100 bytes per token and width of one layer, 4 of each of five inputs
    assert sizes.activation_bytes(encoder, 7, is_half=False, checkpointed=True) == 7 * 10 * 100 + 5 * 7 * 10 * 4
    assert sizes.activation_bytes(encoder, 7, is_half=False, checkpointed=False) == 5 * 7 * 10 * 100


@pytest.mark.nightly
@pytest.mark.parametrize("trainings", [("frozen", "frozen"), ("lora", "full")])
def test_checkpoints_are_as_large_as_the_run_itself_bounds_them(make_affinity, demo_rows, tmp_path, trainings):
    model, collator = make_affinity(*trainings, head_sizes=[256, 128])
    args = FastTrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = FastTrainer(model, args, collator, demo_rows)
    trainer.create_optimizer()
    real = trainer.checkpoint_sizes()
    facts = look(data=None)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    work = dataclasses.replace(facts.work, encoders=[], head_parameters=trained)
    guess = sizes.checkpoint_sizes(args, work)
    assert guess.optimizer == pytest.approx(real.optimizer, rel=0.1)
    assert 0 <= real.weights - guess.weights < 0.3 * 2**20 + sum(p.numel() for p in model.parameters()) * 0.4
    trainer.end()


@pytest.mark.nightly
def test_the_output_folder_holds_what_is_kept_and_what_is_being_written():
    facts = look(num_train_epochs=10, save_strategy="epoch", save_total_limit=2)
    one = facts.checkpoint.full_bytes
    model = facts.work.num_trainable * 4 + 2**20
    assert facts.output_bytes == 3 * one + model
    assert look(num_train_epochs=10, save_strategy="epoch").output_bytes == 10 * one + model
    assert look(num_train_epochs=10, save_strategy="no").output_bytes == model

"""Stages of a generator: tokens, FLOPs and times against sums by hand, rows and plan against those of the run."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_ext.data.arguments import DataArguments
from hf_ext.data.demo import make_demo_encoders, make_demo_pairs
from hf_ext.doctor import stage_estimates
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.doctor.estimates import Rate
from hf_ext.doctor.findings import find_problems
from hf_ext.doctor.pair_lengths import PairLengths, count_pair_flops
from hf_ext.doctor.stage_gathering import gather_generator
from hf_ext.doctor.stage_page import describe_times, format_stages
from hf_ext.doctor.stage_trial import measure_training
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.building import Inputs, build_model
from hf_ext.generation.preparing import load_pairs, settle_columns
from hf_ext.generation.stages import settle_stage
from hf_ext.hardware import describe_hardware, detect_hardware
from hf_ext.models.encoders import read_encoder
from hf_ext.models.generation.configuration import GeneratorConfig
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.models.lora import LoraSettings
from hf_ext.plan import make_plan
from hf_ext.training_args import FastTrainingArguments

SMALL = {"architecture": "transformer", "d_model": 16, "d_ff": 32, "num_heads": 2}
# As the recipe has them.
EACH_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2, "remove_unused_columns": False}


@pytest.fixture
def pairs(tmp_path):
    """60 antigens with 5 rows of pKd 5 to 9 each; 240 train."""
    table = make_demo_pairs(60)
    rows = [{**table[i], "pKd": 5.0 + j} for i in range(60) for j in range(5)]
    Dataset.from_list(rows).to_csv(str(tmp_path / "pairs.csv"))
    return str(tmp_path / "pairs.csv")


def look(device="a100", *, data=None, explicit=(), measure_seconds=0.0, model=None, **arguments):
    args = FastTrainingArguments(
        **{"output_dir": "never_made", "speedups": ["all"], "report_to": "none", **EACH_EPOCH, **arguments}
    )
    data_args = DataArguments(dataset_name=data, **({} if data is None else {"label_column": "pKd"}))
    args.mark_explicit(frozenset({*explicit, *arguments, *({"label_column"} if data else ())}))
    doctor = DoctorArguments(device=device, measure_seconds=measure_seconds)
    return gather_generator(GeneratorArguments(**{**SMALL, **(model or {})}), data_args, args, doctor)


# Three rows have antigen 0, of 10 tokens; one has antigen 1, of 20.
ROWS = PairLengths(np.array([0, 0, 0, 1]), np.array([10, 20]), np.array([5, 5, 5, 7]), np.array([6.0, 7.0, 8.0, 9.0]))


def test_a_batch_encodes_each_antigen_that_it_has_once():
    # Of two rows one surely has antigen 0; antigen 1 is in half of the pairs of rows.
    assert ROWS.encoded_in_batch(2) == pytest.approx(10 + 10)
    assert ROWS.encoded_in_batch(1) == pytest.approx(0.75 * 10 + 0.25 * 20)
    assert ROWS.encoded_in_batch(9) == 30


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("lstm", {}), ("lstm", {"attend": True}), ("transformer", {}), ("light", {})],
    ids=["lstm", "attending_lstm", "transformer", "light"],
)
@pytest.mark.parametrize("is_training", [False, True])
def test_flops_are_about_those_that_torch_counts(architecture, settings, is_training):
    torch.manual_seed(0)
    shape = {"d_model": 64, "d_ff": 128, "num_heads": 4, "hidden_size": 48, "dropout": 0.0}
    model = AntibodyGenerator(GeneratorConfig.of_size(architecture, "tiny", **{**shape, **settings})).train()
    rows = PairLengths(np.array([0, 1, 1]), np.array([40, 40]), np.array([64, 64, 64]))
    batch = {
        "input_ids": torch.randint(4, 24, (2, 40)),
        "attention_mask": torch.ones(2, 40, dtype=torch.long),
        "antigen_index": torch.from_numpy(rows.antigen_index),
        "labels": torch.randint(4, 24, (3, 64)),
    }
    counter = FlopCounterMode(display=False)
    # Kernels that torch does not look into: LSTMs of oneDNN, and fused attention.
    with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH), counter:
        loss = model(**batch).loss
        if is_training:
            loss.backward()
    found = count_pair_flops(model, rows, 3, is_training)
    assert found == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_a_frozen_encoder_costs_a_step_nothing(demo_encoders):
    found = []
    for training in ("frozen", "lora", "full"):
        spec = read_encoder(demo_encoders[1], None, training, LoraSettings())
        model = AntibodyGenerator.from_encoder(spec, "tiny", d_model=64, d_ff=128)
        found.append(count_pair_flops(model, ROWS, 2, is_training=True))
    assert found[0] < 0.8 * found[2] < found[1]  # adapters compute beside what they adapt


def test_the_filter_keeps_larger_affinities_and_the_limit_takes_what_the_run_takes():
    assert len(ROWS.above(7.0)) == 2
    assert len(ROWS.above(None)) == 4
    assert len(dataclasses.replace(ROWS, affinities=None).above(7.0)) == 4
    chosen = np.sort(np.random.default_rng(3).permutation(4)[:2])
    assert ROWS.limited(2, seed=3).pair_tokens.tolist() == ROWS.pair_tokens[chosen].tolist()
    assert ROWS.limited(9, seed=3) is ROWS


def test_seconds_are_flops_over_rate_with_steps_and_padding_and_an_lstms_time_steps():
    work = stage_estimates.StageWork(
        **{"number": 1, "goal": "", "size": "tiny", "config": None, "num_parameters": 0, "num_rows": 0},
        **{"batch_rows": 1, "steps": 100, "passes": 200, "flops": 6e9, "time_steps": (1e5, 2e5)},
    )
    rate = Rate(low=1e9, high=2e9, basis="by hand")
    # 6e9 / 2e9 and 6e9 / 1e9, with 200 passes of 3 to 20 ms
    assert stage_estimates.estimate_stage(work, rate, None, False) == (pytest.approx(3.6), pytest.approx(10.0))
    # twice the FLOPs for padding; 1e5 time steps of 10 us, 2e5 of 50 us
    assert stage_estimates.estimate_stage(work, rate, None, True, padding=0.5) == (
        pytest.approx(6.6 + 1),
        pytest.approx(16.0 + 10),
    )


def test_a_row_per_stage_has_the_rows_and_steps_that_it_would_take(pairs):
    facts = look(data=pairs, model={"stage": "auto"})
    assert facts.problems == []
    works = [stage.work for stage in facts.stages]
    # 48 of 60 antigens train; of their 5 rows two are above 7. Steps of 32, of 64 and of 2 x 64.
    assert [(work.number, work.num_rows, work.steps) for work in works] == [
        *((1, 96, 3 * 10), (2, 96, 2 * 20), (3, 240, 2 * 50))
    ]
    assert [stage.here.seconds for stage in facts.stages] == [span for _, span in facts.seconds]
    assert facts.work.num_trainable == works[2].num_parameters
    limited = look(data=pairs, explicit=("min_affinity",), model={"stage": "2", "min_affinity": 8.5})
    assert [stage.work.num_rows for stage in limited.stages] == [48, 48, 48]
    assert [what for what, _ in limited.seconds] == ["stage 2, at most 20 steps"]


def test_larger_stages_compute_more_and_faster_cards_take_less(pairs):
    stages = look(data=pairs, model={"stage": "auto", "d_model": None, "d_ff": None, "num_heads": None}).stages
    assert [stage.work.size for stage in stages] == ["tiny", "small", "full"]
    flops = [stage.work.flops for stage in stages]
    assert flops == sorted(flops)
    for stage in stages:
        spans = [stage.cards[name].seconds for name in ("T4", "A100-80GB", "H100-SXM")]
        assert spans == sorted(spans, reverse=True)
    assert stages[0].cards["T4"].dtype == "fp16"
    assert stages[0].cards["A100-80GB"].dtype == "bf16"


def test_the_plan_is_that_of_the_run(pairs, tmp_path):
    facts = look("t4", data=pairs)
    model_args, data_args = GeneratorArguments(**SMALL), DataArguments(dataset_name=pairs, label_column="pKd")
    settle_columns(model_args, data_args, set())
    settle_stage(1, model_args, data_args, facts.args, facts.args.explicit_fields)
    data = load_pairs(model_args, data_args, {"label_column"}, output_dir=tmp_path, seed=42)
    inputs = Inputs()
    tokens = inputs.tokenize(data.antibodies("train"), data.affinities("train"))
    model = build_model(model_args, facts.args, data)
    real = make_plan(facts.args, model, tokens, inputs.collator, describe_hardware("t4"))
    for found, expected in zip(facts.plan.decisions, real.decisions, strict=True):
        assert (found.name, found.status, found.reason) == (expected.name, expected.status, expected.reason)
    assert facts.stages[0].work.num_parameters == sum(p.numel() for p in model.parameters())
    lengths = PairLengths.of_sequences(*(getattr(data.antibodies("train"), n) for n in ("antigens", "heavy", "light")))
    assert lengths.pair_tokens.sum() + lengths.antigen_tokens[lengths.antigen_index].sum() == sum(tokens["length"])


@pytest.mark.nightly
def test_a_frozen_encoder_is_timed_once_and_what_it_stores_is_counted(pairs, tmp_path):
    _, esm = make_demo_encoders(tmp_path / "encoders")
    facts = look(data=pairs, model={"architecture": "esm", "antigen_encoder": esm})
    (encoder,) = facts.work.encoders
    antigens = set(make_demo_pairs(60)["antigen"])
    assert (encoder.num_distinct, encoder.distinct.total) == (60, sum(len(antigen) + 2 for antigen in antigens))
    assert facts.embedding_bytes == encoder.distinct.total * 64 * 4
    assert facts.stages[0].work.encoder is encoder
    trained = look(data=pairs, model={"architecture": "esm", "antigen_encoder": esm, "encoder_training": "full"})
    assert trained.stages[0].work.encoder is None
    assert trained.embedding_bytes == 0
    assert trained.stages[0].work.flops > facts.stages[0].work.flops


@pytest.mark.nightly
def test_this_machine_is_measured_with_the_model_itself(pairs):
    facts = look(None, data=pairs, measure_seconds=0.2, use_cpu=True)
    assert re.search(r"measured here on 32 rows of stage 1, cut at \d+ tokens, forward and backward", facts.rate_basis)
    ((_, (least, most)),) = facts.seconds
    assert 0 < least < most


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", ["lstm", "transformer", "light"])
def test_a_trial_has_all_rows_of_a_step_with_as_many_tokens_as_its_time_allows(architecture, monkeypatch):
    """On a clock that goes on by a second whenever it is read, so that each step takes one."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    config = GeneratorConfig.of_size(architecture, "tiny", d_model=16)
    rows = PairLengths.assumed(100, antigen=12, pair=20, rows_per_antigen=1)
    cpu, six = detect_hardware("cpu"), rows.take(np.arange(6))
    model = AntibodyGenerator(config)
    rate, limit = measure_training(config, cpu, "fp32", rows, 6, seconds=10)
    assert limit == 22  # 8, 16, and all that there is
    assert rate == pytest.approx(count_pair_flops(model, six, 6, is_training=True))
    rate, limit = measure_training(config, cpu, "fp32", rows, 6, seconds=3)  # 16 tokens might take 2 s, and again
    assert limit == 8
    assert rate == pytest.approx(count_pair_flops(model, PairLengths.assumed(6, 6, 6, 1), 6, is_training=True))


def test_without_rows_the_stages_have_the_numbers_that_are_said_to_be_assumed():
    facts = look(model={"stage": "auto"})
    assert [stage.work.num_rows for stage in facts.stages] == [1_000, 10_000, 127_000]
    assert "127,000 train, 16,000 validation rows, assumed" in facts.notes[1]
    assert find_problems(facts) == []


@pytest.mark.nightly
def test_what_the_run_would_refuse_stops_it_here(pairs, tmp_path):
    (tmp_path / "bad.csv").write_text("antigen,heavy,light,pKd\nMKT,EVQ,DIQ,7\nMKV,EV1,DIQ,8\nMKL,EVQ,DIQ,9\n")
    found = [
        *look(data=str(tmp_path / "bad.csv")).problems,
        *look(data=pairs, explicit=("min_affinity",), model={"min_affinity": 9.5}).problems,
        *look(data=pairs, metric_for_best_model="rho").problems,
        *look(data=pairs, push_to_hub=True, hub_token="hf_x", model={"stage": "auto"}).problems,
        *look(data=pairs, use_peft=True).problems,
    ]
    said = ["row 3, column 'heavy'", "--min_affinity 9.5 leaves 0 of 240", "rho", "push the stage that you want"]
    assert [finding.level for finding in found] == ["stops"] * 5
    for finding, words in zip(found, [*said, "--encoder_training lora"], strict=True):
        assert words in finding.text


def test_the_table_has_a_price_where_one_was_given():
    stages = look(model={"stage": "auto", "architecture": "lstm", "d_ff": None}).stages
    table = format_stages(stages, 36.0)
    seconds = stages[0].here.seconds
    assert f"{seconds[0] / 100:.2f}-{seconds[1] / 100:.2f}" in table
    assert "dollars" not in format_stages(stages, None)
    assert "T4" in table
    assert "A100-80GB" not in table  # as fast as the one of 40 GB, that was asked about
    assert "each time step of an LSTM's layer takes another 10 to 50 us (assumed)" in " ".join(describe_times(stages))
    assert max(map(len, table.splitlines())) <= 100


def test_a_filter_that_leaves_nothing_is_a_finding_about_the_data(pairs):
    facts = look(data=pairs, explicit=("min_affinity",), model={"stage": "1", "min_affinity": 20.0})
    assert [(one.name, one.level) for one in facts.problems] == [("data", "stops")]
    assert "--min_affinity 20 leaves 0 of 240 training rows" in facts.problems[0].text


def test_one_training_row_without_affinities_is_no_finding(tmp_path):
    make_demo_pairs(3).to_csv(str(tmp_path / "three.csv"))
    args = FastTrainingArguments(output_dir="never_made", speedups=["all"], report_to="none", **EACH_EPOCH)
    args.mark_explicit(frozenset())
    data_args = DataArguments(dataset_name=str(tmp_path / "three.csv"))
    doctor = DoctorArguments(device="a100", measure_seconds=0.0)
    facts = gather_generator(GeneratorArguments(**SMALL), data_args, args, doctor)
    assert facts.problems == []
    assert facts.stages[0].work.num_rows == 1

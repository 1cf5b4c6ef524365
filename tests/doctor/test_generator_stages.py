"""Stages of a generator: tokens, FLOPs and times against sums by hand, rows and plan against those of the run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from doctored import look as look_at
from doctored import main
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_ext.data.arguments import DataArguments
from hf_ext.data.demo import make_demo_encoders, make_demo_pairs
from hf_ext.doctor.estimates import measure_rate
from hf_ext.doctor.findings import find_problems
from hf_ext.doctor.page import format_page
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.building import Inputs, build_model
from hf_ext.generation.preparing import load_pairs, settle_columns
from hf_ext.generation.sketching import LSTM_STEP_SECONDS, PairLengths, count_pair_flops
from hf_ext.generation.stages import settle_stage
from hf_ext.hardware import describe_hardware, detect_hardware
from hf_ext.models.generation.configuration import GeneratorConfig
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.plan import make_plan

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


def look(device="a100", *, data=None, explicit=(), model=None, **arguments):
    data_args = DataArguments(dataset_name=data, **({} if data is None else {"label_column": "pKd"}))
    given = GeneratorArguments(**{**SMALL, **(model or {})})
    named = (*explicit, *(["label_column"] if data else []))
    return look_at(device, model=given, data=data_args, explicit=named, **{**EACH_EPOCH, **arguments})


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


def test_the_filter_keeps_larger_affinities_and_the_limit_takes_what_the_run_takes():
    assert len(ROWS.above(7.0)) == 2
    assert len(ROWS.above(None)) == 4
    chosen = np.sort(np.random.default_rng(3).permutation(4)[:2])
    assert ROWS.limited(2, seed=3).pair_tokens.tolist() == ROWS.pair_tokens[chosen].tolist()
    assert ROWS.limited(9, seed=3) is ROWS


def test_a_row_per_stage_has_the_rows_and_steps_that_it_would_take(pairs):
    facts = look(data=pairs, model={"stage": "auto"})
    assert facts.sketch.problems == []
    # 48 of 60 antigens train; of their 5 rows two are above 7. Steps of 32, of 64 and of 2 x 64.
    found = [(one.stage.title, one.stage.num_rows["train"], one.schedule.updates) for one in facts.stages]
    assert found == [("1 tiny", 96, 3 * 10), ("2 small", 96, 2 * 20), ("3 full", 240, 2 * 50)]
    assert facts.total_seconds == tuple(sum(one.times.total[i] for one in facts.stages) for i in range(2))
    assert facts.main is facts.stages[2]
    limited = look(data=pairs, explicit=("min_affinity",), model={"stage": "2", "min_affinity": 8.5})
    assert [one.stage.num_rows["train"] for one in limited.stages] == [48, 48, 48]
    assert limited.total_seconds == limited.stages[1].times.total


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
    for found, expected in zip(main(facts).plan.decisions, real.decisions, strict=True):
        assert (found.name, found.status, found.reason) == (expected.name, expected.status, expected.reason)
    assert facts.stages[0].stage.parts[0].num_parameters == sum(p.numel() for p in model.parameters())
    lengths = PairLengths.of_sequences(*(getattr(data.antibodies("train"), n) for n in ("antigens", "heavy", "light")))
    assert lengths.pair_tokens.sum() + lengths.antigen_tokens[lengths.antigen_index].sum() == sum(tokens["length"])


@pytest.mark.nightly
def test_a_frozen_encoder_is_timed_once_and_what_it_stores_is_counted(pairs, tmp_path):
    _, esm = make_demo_encoders(tmp_path / "encoders")
    facts = look(data=pairs, model={"architecture": "esm", "antigen_encoder": esm})
    _, encoder = main(facts).stage.parts
    num_tokens = sum(len(antigen) + 2 for antigen in set(make_demo_pairs(60)["antigen"]))
    assert (encoder.num_distinct, encoder.stored_bytes) == (60, num_tokens * 64 * 4)
    assert main(facts).embedding_bytes == encoder.stored_bytes
    assert main(facts).times.lines[0][0] == "encoding 60 distinct inputs once"
    trained = look(data=pairs, model={"architecture": "esm", "antigen_encoder": esm, "encoder_training": "full"})
    assert len(main(trained).stage.parts) == 1
    assert main(trained).embedding_bytes == 0
    assert main(trained).stage.parts[0].train_flops > main(facts).stage.parts[0].train_flops


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", ["lstm", "transformer", "light"])
def test_a_timed_step_has_all_rows_and_as_many_tokens_as_its_size(architecture, pairs):
    shape = {"d_model": 16, "d_ff": None if architecture == "lstm" else 32}
    (part,) = main(look(data=pairs, model={**shape, "architecture": architecture, "num_heads": None})).stage.parts
    small, large = part.make_step("cpu", 1), part.make_step("cpu", 2)
    assert (small.what, large.what) == tuple(f"32 rows of {n} tokens, forward and backward" for n in (8, 16))
    assert large.flops == pytest.approx(2 * small.flops)
    small.run()
    assert part.make_step("cpu", 1024) is None
    measured = measure_rate(part, detect_hardware("cpu"), "fp32", 0.05)
    assert 0 < measured.low < measured.high


def test_without_rows_the_stages_have_the_numbers_that_are_said_to_be_assumed():
    facts = look(model={"stage": "auto"})
    assert [one.stage.num_rows["train"] for one in facts.stages] == [1_000, 10_000, 127_000]
    assert "127,000 train, 16,000 validation rows, assumed" in facts.sketch.notes[1]
    assert find_problems(facts) == []
    flops = [one.stage.parts[0].train_flops for one in facts.stages]
    assert flops == sorted(flops)


@pytest.mark.nightly
def test_what_the_run_would_refuse_stops_it_here(pairs, tmp_path):
    (tmp_path / "bad.csv").write_text("antigen,heavy,light,pKd\nMKT,EVQ,DIQ,7\nMKV,EV1,DIQ,8\nMKL,EVQ,DIQ,9\n")
    found = [
        *look(data=str(tmp_path / "bad.csv")).sketch.problems,
        *look(data=pairs, explicit=("min_affinity",), model={"min_affinity": 9.5}).sketch.problems,
        *look(data=pairs, metric_for_best_model="rho").sketch.problems,
        *look(data=pairs, push_to_hub=True, hub_token="hf_x", model={"stage": "auto"}).sketch.problems,
        *look(data=pairs, use_peft=True).sketch.problems,
    ]
    said = ["row 3, column 'heavy'", "--min_affinity 9.5 leaves 0 of 240", "rho", "push the stage that you want"]
    assert [finding.level for finding in found] == ["stops"] * 5
    for finding, words in zip(found, [*said, "--encoder_training lora"], strict=True):
        assert words in finding.text


def test_the_table_has_a_price_where_one_was_given_and_an_lstm_waits_on_a_card():
    facts = look(model={"stage": "auto", "architecture": "lstm", "d_ff": None}, dollars_per_hour=36.0)
    page = format_page(facts, [])
    least = facts.stages[0].times.total[0]
    assert f"{least / 100:.2f} to " in page
    assert "dollars" in page
    assert "dollars" not in format_page(look(model={"stage": "auto"}), [])
    assert max(map(len, page.splitlines())) <= 100
    rows = 472 + 472, 232  # two directions of one layer over the antigen, one over the pair
    stage = facts.stages[0].stage
    assert stage.serial_seconds[0] == pytest.approx(
        sum(rows) * stage.model.config.num_decoder_layers * LSTM_STEP_SECONDS[0]
    )


def test_one_training_row_without_affinities_is_no_finding(tmp_path):
    make_demo_pairs(3).to_csv(str(tmp_path / "three.csv"))
    facts = look_at(
        model=GeneratorArguments(**SMALL), data=DataArguments(dataset_name=str(tmp_path / "three.csv")), **EACH_EPOCH
    )
    assert facts.sketch.problems == []
    assert main(facts).stage.num_rows["train"] == 1

"""Stages of a generator: rows, plan and FLOPs against those of the run."""

import pytest
import torch
from datasets import Dataset
from doctored import gather_facts, main
from inside import (
    GeneratorArguments,
    Inputs,
    build_generator,
    find_problems,
    format_page,
    load_pairs,
    resolve_columns,
    resolve_stage,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_ext.data import DataArguments, make_demo_encoders, make_demo_pairs
from hf_ext.generation.dry_run import count_flops, make_batch
from hf_ext.hardware import describe_hardware
from hf_ext.models import AntibodyGenerator, GeneratorConfig
from hf_ext.plan import make_plan

pytestmark = pytest.mark.internals
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


def gather_stages(device="a100", *, data=None, explicit=(), model=None, **arguments):
    data_args = DataArguments(dataset_name=data, **({} if data is None else {"label_column": "pKd"}))
    given = GeneratorArguments(**{**SMALL, **(model or {})})
    named = (*explicit, *(["label_column"] if data else []))
    return gather_facts(device, model=given, data=data_args, explicit=named, **{**EACH_EPOCH, **arguments})


@pytest.mark.parametrize("architecture", ["lstm", "transformer", "light"])
def test_flops_are_about_those_that_torch_counts(architecture):
    shape = {"d_model": 64, "d_ff": 128, "num_heads": 4, "hidden_size": 48, "dropout": 0.0}
    model = AntibodyGenerator(GeneratorConfig.of_size(architecture, "tiny", **shape)).eval()
    counter = FlopCounterMode(display=False)
    # Kernels that torch does not look into: LSTMs of oneDNN, and fused attention.
    with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH), torch.no_grad(), counter:
        model(**make_batch(model, 40, 64, 3, "cpu"))
    assert 3 * count_flops(model, 40, 64) == pytest.approx(counter.get_total_flops(), rel=0.3)


def test_a_row_per_stage_has_the_rows_and_steps_that_it_would_take(pairs):
    facts = gather_stages(data=pairs, model={"stage": "auto"})
    assert facts.dry_run.problems == []
    # 48 of 60 antigens train; of their 5 rows two are above 7. Steps of 32, of 64 and of 2 x 64.
    found = [(one.stage.title, one.stage.num_rows["train"], one.schedule.updates) for one in facts.stages]
    assert found == [("1 tiny", 96, 3 * 10), ("2 small", 96, 2 * 20), ("3 full", 240, 2 * 50)]
    assert facts.total_seconds == tuple(sum(one.times.total[i] for one in facts.stages) for i in range(2))
    assert facts.main is facts.stages[2]
    limited = gather_stages(data=pairs, explicit=("min_affinity",), model={"stage": "2", "min_affinity": 8.5})
    assert [one.stage.num_rows["train"] for one in limited.stages] == [48, 48, 48]
    assert limited.total_seconds == limited.stages[1].times.total


def test_the_plan_is_that_of_the_run(pairs, tmp_path):
    facts = gather_stages("t4", data=pairs)
    model_args, data_args = GeneratorArguments(**SMALL), DataArguments(dataset_name=pairs, label_column="pKd")
    resolve_columns(model_args, data_args, set())
    resolve_stage(1, model_args, data_args, facts.args, facts.args.explicit_fields)
    data = load_pairs(model_args, data_args, {"label_column"}, output_dir=tmp_path, seed=42)
    inputs = Inputs()
    tokens = inputs.tokenize(data.antibodies("train"), data.affinities("train"))
    model = build_generator(model_args, facts.args, data)
    real = make_plan(facts.args, model, tokens, inputs.collator, describe_hardware("t4"))
    for found, expected in zip(main(facts).plan.decisions, real.decisions, strict=True):
        assert (found.name, found.status, found.reason) == (expected.name, expected.status, expected.reason)
    assert facts.stages[0].stage.parts[0].num_parameters == sum(p.numel() for p in model.parameters())
    assert facts.stages[0].stage.num_tokens == sum(tokens["length"])


@pytest.mark.nightly
def test_a_frozen_encoder_is_timed_once_and_what_it_stores_is_counted(pairs, tmp_path):
    _, esm = make_demo_encoders(tmp_path / "encoders")
    facts = gather_stages(data=pairs, model={"architecture": "esm", "antigen_encoder": esm})
    _, encoder = main(facts).stage.parts
    num_tokens = sum(len(antigen) + 2 for antigen in set(make_demo_pairs(60)["antigen"]))
    assert encoder.num_distinct == 60
    assert encoder.stored_bytes == main(facts).embedding_bytes == pytest.approx(num_tokens * 64 * 4, rel=0.1)
    assert main(facts).times.lines[0][0] == "encoding 60 distinct inputs once"
    trained = gather_stages(
        data=pairs, model={"architecture": "esm", "antigen_encoder": esm, "encoder_training": "full"}
    )
    assert len(main(trained).stage.parts) == 1
    assert main(trained).embedding_bytes == 0
    assert main(trained).stage.parts[0].flops > main(facts).stage.parts[0].flops


def test_without_rows_the_demo_is_sized_up():
    facts = gather_stages(model={"stage": "auto"})
    assert facts.dry_run.subject == "generated pairs"
    assert [one.stage.num_rows["train"] for one in facts.stages] == [480, 480, 480]
    assert find_problems(facts) == []
    assert max(map(len, format_page(facts, []).splitlines())) <= 100


@pytest.mark.nightly
def test_what_the_run_would_refuse_stops_it_here(pairs, tmp_path):
    (tmp_path / "bad.csv").write_text("antigen,heavy,light,pKd\nMKT,EVQ,DIQ,7\nMKV,EV1,DIQ,8\nMKL,EVQ,DIQ,9\n")
    found = [
        *gather_stages(data=str(tmp_path / "bad.csv")).dry_run.problems,
        *gather_stages(data=pairs, explicit=("min_affinity",), model={"min_affinity": 9.5}).dry_run.problems,
        *gather_stages(data=pairs, metric_for_best_model="rho").dry_run.problems,
        *gather_stages(data=pairs, push_to_hub=True, hub_token="hf_x", model={"stage": "auto"}).dry_run.problems,
        *gather_stages(data=pairs, use_peft=True).dry_run.problems,
    ]
    said = ["row 3, column 'heavy'", "--min_affinity 9.5 leaves 0 of 240", "rho", "push the stage that you want"]
    assert [finding.level for finding in found] == ["stops"] * 5
    for finding, words in zip(found, [*said, "--encoder_training lora"], strict=True):
        assert words in finding.text


def test_one_training_row_without_affinities_is_no_finding(tmp_path):
    make_demo_pairs(3).to_csv(str(tmp_path / "three.csv"))
    facts = gather_facts(
        model=GeneratorArguments(**SMALL), data=DataArguments(dataset_name=str(tmp_path / "three.csv")), **EACH_EPOCH
    )
    assert facts.dry_run.problems == []
    assert main(facts).stage.num_rows["train"] == 1

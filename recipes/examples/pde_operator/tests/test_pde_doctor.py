"""The doctor of a task that hf_ext does not know: plan and FLOPs against those of the run, and what would stop it."""

from pathlib import Path

import doctor
import pytest
from doctored import gather_facts, main
from operators import make_samples
from pde_operator.arguments import OperatorArguments
from pde_operator.steps import build_collator, build_model, build_rows
from pde_operator.task import OperatorTask

from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan

GRID = {"resolution": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_queries": 64}


def look_at(device="a100", model=GRID, **arguments):
    given = {"remove_unused_columns": False, **arguments}
    return gather_facts(device, model=OperatorArguments(**model), task=OperatorTask(), **given)


@pytest.mark.nightly
@pytest.mark.parametrize("card", ["T4", "H100", "cpu"])
def test_the_plan_of_an_operator_is_that_of_the_real_model(card):
    few = {**GRID, "num_train_samples": 4}
    facts = look_at(card, model=few, speedups=["all", "muon"])
    assert facts.dry_run.problems == []
    args = OperatorArguments(**few)
    samples = {"train": make_samples(4)}
    model = build_model(args, samples["train"])
    real = make_plan(facts.args, model, build_rows(samples)["train"], build_collator(args, 0), describe_hardware(card))
    for found, expected in zip(main(facts).plan.decisions, real.decisions, strict=True):
        assert (found.name, found.status, found.reason) == (expected.name, expected.status, expected.reason)
    assert main(facts).stage.parts[0].num_parameters == sum(p.numel() for p in model.parameters())
    assert main(facts).memory.length == 2 * 16  # tokens of both tasks


def test_flops_of_an_operator_are_those_of_the_trunk_and_a_tenth_for_what_stands_around_it():
    shape = {"resolution": 64, "hidden_size": 256, "num_hidden_layers": 6, "num_queries": 4096}
    stage = main(look_at(model=shape)).stage
    trunk = 2 * 6 * (12 * 256**2 + 2 * 256 * 256)  # 2 L (12 d^2 + 2 T d) per token, of T = 256
    assert stage.num_tokens == 1600 * 2 * 256
    assert trunk < stage.parts[0].flops / (2 * 256) < 1.25 * trunk


def test_what_would_stop_an_operator_is_a_finding():
    (problem,) = look_at(model=GRID, metric_for_best_model="rmse").dry_run.problems
    assert (problem.name, problem.level) == ("arguments", "stops")


def test_the_script_prints_the_page_of_a_config(capsys):
    config = Path(doctor.__file__).parent / "configs" / "pde_conservative.yaml"
    assert doctor.main(["--config", str(config), "--device", "a100", "--measure_seconds", "0"]) == 0
    assert "10,000 samples of advection1d and darcy2d" in " ".join(capsys.readouterr().out.split())

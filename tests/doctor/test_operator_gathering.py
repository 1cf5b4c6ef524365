"""What the doctor says of an operator: its plan, what its steps compute and hold, and what would stop it."""

from __future__ import annotations

import pytest
from doctored import look, main
from operators import make_samples

from hf_ext.hardware import describe_hardware
from hf_ext.pde.arguments import OperatorArguments
from hf_ext.pde.steps import build_collator, build_model, build_rows
from hf_ext.plan import make_plan

SMALL = {"resolution": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_queries": 64}
PLAIN = {"inverse_loss_every": 0, "physics_every": 0}


def look_at(device="a100", model=SMALL, **arguments):
    return look(device, model=OperatorArguments(**model), **{"remove_unused_columns": False, **arguments})


def sketch(**given):
    """The only stage, of a run on an A100."""
    return main(look_at(model=given)).stage


@pytest.mark.nightly
@pytest.mark.parametrize("card", ["T4", *(pytest.param(c, marks=pytest.mark.nightly) for c in ("H100", "cpu"))])
def test_the_plan_is_that_of_the_real_model(card):
    few = {**SMALL, "num_train_samples": 4}
    facts = look_at(card, model=few, speedups=["all", "muon"])
    assert facts.sketch.problems == []
    args = OperatorArguments(**few)
    samples = {"train": make_samples(4)}
    model = build_model(args, samples["train"])
    rows = build_rows(samples)["train"]
    real = make_plan(facts.args, model, rows, build_collator(args, 0), describe_hardware(card))
    for found, expected in zip(main(facts).plan.decisions, real.decisions, strict=True):
        assert (found.name, found.status, found.reason) == (expected.name, expected.status, expected.reason)
    assert main(facts).stage.parts[0].num_parameters == sum(p.numel() for p in model.parameters())
    assert main(facts).memory.length == 2 * 16  # tokens of both tasks


def test_flops_are_those_of_the_trunk_and_a_tenth_for_what_stands_around_it():
    shape = {"resolution": 64, "hidden_size": 256, "num_hidden_layers": 6, "num_queries": 4096}
    stage = sketch(**shape, **PLAIN)
    (part,) = stage.parts
    trunk = 6 * 6 * (12 * 256**2 + 2 * 256 * 256)  # 6 L (12 d^2 + 2 T d) per token, of T = 256
    assert stage.num_tokens == 1600 * 2 * 256
    assert trunk < part.train_flops / stage.num_tokens < 1.25 * trunk
    assert part.eval_flops / 200 == pytest.approx(part.train_flops / 1600 / 3, rel=0.05)


@pytest.mark.nightly
def test_terms_of_the_loss_count_as_often_as_they_are_computed():
    def flops(**every: int) -> float:
        return sketch(**{**SMALL, **PLAIN, **every}).parts[0].train_flops

    plain, inverse, physics = flops(), flops(inverse_loss_every=1), flops(physics_every=1)
    assert plain < min(inverse, physics)
    mixed = flops(inverse_loss_every=4, physics_every=2)
    assert mixed == pytest.approx(plain + (inverse - plain) / 4 + (physics - plain) / 2)


@pytest.mark.nightly
def test_time_is_measured_here_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = look_at(None, measure_seconds=0.05, use_cpu=True)
    assert 0 < facts.total_seconds[0] < facts.total_seconds[1]
    assert "rows, forward and backward" in main(facts).times.basis
    assert list(tmp_path.iterdir()) == []


def test_what_would_stop_the_run_is_a_finding():
    problems = look_at(model=SMALL, metric_for_best_model="rmse").sketch.problems
    assert [(one.name, one.level) for one in problems] == [("arguments", "stops")]

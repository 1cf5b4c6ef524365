"""bf16 on a CPU is taken where it measures faster, and a run goes on as it began."""

import time

import pytest
import torch
from tiny_masked_lm import make_trainer

from hf_ext.speedups import half_rate

pytestmark = pytest.mark.usefixtures("bf16_cpu", "own_home")


def train_with(monkeypatch, folder, gain, **given):
    monkeypatch.setattr(half_rate, "measure_half_gain", lambda: gain)
    trainer = make_trainer(folder, speedups=["precision"], **given)
    trainer.plan.save(folder)
    return trainer


@pytest.mark.parametrize(("gain", "status"), [(0.55, "skipped"), (1.19, "skipped"), (1.2, "applied"), (8.0, "applied")])
def test_bf16_is_taken_where_it_measures_faster(tmp_path, monkeypatch, gain, status):
    trainer = train_with(monkeypatch, tmp_path, gain)
    decision = trainer.plan["precision"]
    assert (decision.status, decision.evidence["bf16_over_float32"]) == (status, gain)
    assert trainer.args.bf16 == (status == "applied")
    if status == "skipped":
        assert decision.reason == f"products in bf16 are {gain:.2f} times as fast as in float32 on this CPU"


def test_what_was_asked_for_is_not_measured(tmp_path, monkeypatch):
    trainer = train_with(monkeypatch, tmp_path, 0.1, bf16=True)
    assert trainer.args.bf16
    assert trainer.plan["precision"].evidence == {}


def test_a_run_goes_on_in_the_precision_that_it_began_in(tmp_path, monkeypatch):
    found = [train_with(monkeypatch, tmp_path / folder, gain).args.bf16 for folder, gain in (("a", 3), ("a", 0.5))]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [*found, train_with(monkeypatch, tmp_path / "b", 0.5).args.bf16] == [True, True, False]


def test_what_follows_from_float32_is_decided_again(tmp_path, monkeypatch):
    monkeypatch.setattr(half_rate, "measure_half_gain", lambda: 0.5)
    trainer = make_trainer(tmp_path, speedups=["all"], without=["cpu_matmul"])
    assert trainer.plan["attention"].evidence["kernel"] == "blocked"  # for half precision the two would be timed
    assert "blocked_over_grouped" not in trainer.plan["attention"].evidence


def test_the_ratio_is_of_processor_times(monkeypatch, request):
    monkeypatch.undo()
    exact = torch.mm

    def slow_in_float32(left, right):
        end = time.process_time() + (0.03 if left.dtype == torch.float32 else 0.01)
        while time.process_time() < end:
            pass
        return exact(left[:2], right[:, :2])

    monkeypatch.setattr(torch, "mm", slow_in_float32)
    assert 2 < half_rate.measure_half_gain() < 4

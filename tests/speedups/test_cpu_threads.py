"""One thread for each core, where nobody said how many."""

import pytest
import torch
from tiny_masked_lm import largest_weight_difference, make_args, make_trainer

from hf_ext.hardware import describe_hardware
from hf_ext.speedups import Context, cpu_threads


@pytest.fixture
def nobody_said(monkeypatch):
    for name in (*cpu_threads.VARIABLES, "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def decide(hardware="cpu", cores=4, world_size=1, **given):
    args = make_args(**{"speedups": ["all"], **given})
    return cpu_threads.decide(Context(describe_hardware(hardware), args, world_size=world_size, cpu_cores=cores))


def test_a_cpu_of_several_cores_gets_a_thread_for_each(nobody_said):
    assert (decide().status, decide().settings) == ("applied", {"threads": 4})
    assert decide(hardware="T4").reason == "T4 is not a CPU"
    assert decide(cores=1).reason == "one core"
    assert decide(world_size=2).reason == "2 processes share the cores: the launcher says how many each has"


@pytest.mark.parametrize("name", cpu_threads.VARIABLES)
def test_what_the_user_set_is_met(nobody_said, monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert (decide().status, decide().reason) == ("skipped", f"{name}=3 is set")
    monkeypatch.setenv(name, "")
    assert decide().status == "applied"


def test_the_1_of_accelerates_launcher_is_nobodys_word(nobody_said, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert decide().reason == "OMP_NUM_THREADS=1 is set"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert decide().status == "applied"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert decide().reason == "OMP_NUM_THREADS=2 is set"


def test_a_run_trains_on_a_thread_per_core_and_gives_them_back(nobody_said, monkeypatch, tmp_path):
    alone = make_trainer(tmp_path / "alone")
    monkeypatch.setattr("hf_ext.plan.count_cpu_cores", lambda: 2)
    trainer = make_trainer(tmp_path / "run", speedups=["cpu_threads"])
    assert torch.get_num_threads() == 2
    trainer.train()
    trainer.end()
    assert torch.get_num_threads() == 1
    alone.train()
    assert largest_weight_difference(trainer.model, alone.model) < 1e-6

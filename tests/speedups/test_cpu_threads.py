"""How many threads a CPU holds steadily: decided where nobody said, by the slowest quarter, kept with the run."""

import os
import subprocess
import sys

import pytest
import torch
from tiny_masked_lm import largest_weight_difference, make_args, make_trainer

from hf_ext.hardware import describe_hardware
from hf_ext.speedups import Context, cpu_threads

STEADY = {1: [400.0] * 12, 2: [760.0] * 12}
# Two threads as measured on a shared virtual machine: now far above one, now far below.
UNSTEADY = {1: [430.0] * 12, 2: [690.0, 10.0, 650.0, 20.0, 680.0, 15.0, 640.0, 12.0, 690.0, 600.0, 630.0, 690.0]}


@pytest.fixture
def nobody_said(monkeypatch, own_home):
    for name in (*cpu_threads.VARIABLES, "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def threads_of_the_tests():
    yield
    assert torch.get_num_threads() == 1


def decide(hardware="cpu", cores=4, world_size=1, **given):
    args = make_args(**{"speedups": ["all"], **given})
    return cpu_threads.decide(Context(describe_hardware(hardware), args, world_size=world_size, cpu_cores=cores))


# --- decisions -------------------------------------------------------------------------------------------------------


def test_a_cpu_of_several_cores_is_measured_where_nobody_said_how_many(nobody_said):
    decision = decide()
    assert (decision.status, decision.settings) == ("applied", {"most": 4})
    assert decide(speedups=[]).status == decide(without=["cpu_threads"]).status == "off"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"hardware": "T4"}, "T4 is not a CPU"),
        ({"world_size": 2}, "2 processes share the cores: the launcher says how many each has"),
        ({"cores": 1}, "one core"),
    ],
)
def test_elsewhere_it_is_skipped(nobody_said, given, reason):
    assert (decide(**given).status, decide(**given).reason) == ("skipped", reason)


@pytest.mark.parametrize("name", cpu_threads.VARIABLES)
def test_what_the_user_set_is_met(nobody_said, monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert (decide().status, decide().reason) == ("skipped", f"{name}=3 is set")
    monkeypatch.setenv(name, "")
    assert decide().status == "applied"


@pytest.mark.parametrize(
    ("launcher", "chosen"),
    [
        (b"HOME=/root\0OMP_NUM_THREADS=2\0", "OMP_NUM_THREADS"),
        (b"HOME=/root\0XOMP_NUM_THREADS=2\0OMP_NUM_THREADS=\0", None),
    ],
)
def test_what_the_launcher_set_by_itself_is_nobodys_word(nobody_said, monkeypatch, tmp_path, launcher, chosen):
    (tmp_path / "environ").write_bytes(launcher)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cpu_threads.chosen_by_user(tmp_path / "environ") == "OMP_NUM_THREADS"  # not started by accelerate
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert cpu_threads.chosen_by_user(tmp_path / "environ") == chosen
    assert cpu_threads.chosen_by_user(tmp_path / "no such file") == "OMP_NUM_THREADS"


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("said", [True, False])
def test_a_run_of_the_launcher_tells_the_two_apart(nobody_said, tmp_path, said):
    script = tmp_path / "script.py"
    script.write_text(
        "import os; from hf_ext.speedups.cpu_threads import chosen_by_user; "
        "print('found', os.environ['OMP_NUM_THREADS'], chosen_by_user())"
    )
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if said else {})}
    words = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1", str(script)]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert f"found 1 {'OMP_NUM_THREADS' if said else None}" in run.stdout


# --- the choice ------------------------------------------------------------------------------------------------------


def test_what_is_steady_is_taken_and_not_what_was_fastest_once():
    assert cpu_threads.choose(STEADY) == 2
    assert cpu_threads.choose(UNSTEADY) == 1
    assert max(UNSTEADY, key=lambda count: max(UNSTEADY[count])) == 2  # as one would choose by the best
    assert cpu_threads.choose({1: [100.0] * 4, 2: [119.0] * 4}) == 1
    assert cpu_threads.choose({1: [100.0] * 4, 2: [115.0] * 4, 4: [130.0] * 4, 8: [150.0] * 4}) == 4


def test_numbers_to_try_and_quarters_by_hand():
    assert [cpu_threads.counts_to_try(most) for most in (2, 6, 8)] == [[1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert cpu_threads.slowest_quarter([4.0, 1.0, 2.0, 3.0, 5.0]) == 2.0
    assert cpu_threads.describe([4.0, 1.0, 2.0, 3.0, 5.0]) == [2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_measured_in_turn_and_the_number_is_put_back(monkeypatch, dtype):
    used = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given: used.append(torch.get_num_threads()) or product(*given))
    rates = cpu_threads.measure_rates([1, 2], dtype)
    assert used == [1, 1, 2, 2] * (cpu_threads.ROUNDS + 1)
    assert {count: len(found) for count, found in rates.items()} == {1: 12, 2: 12}
    assert all(rate > 0.1 for found in rates.values() for rate in found)


def test_a_stall_is_said_with_its_rates_only_where_one_thread_is_faster(monkeypatch):
    monkeypatch.setattr(cpu_threads, "measure_rates", lambda counts, dtype: UNSTEADY)
    said = cpu_threads.find_stall(2, torch.float32)
    assert said == "2 threads multiply 19 GFLOP/s, one 430: something else has their cores"
    monkeypatch.setattr(cpu_threads, "measure_rates", lambda counts, dtype: STEADY)
    assert cpu_threads.find_stall(2, torch.float32) == ""


# --- runs ------------------------------------------------------------------------------------------------------------


def make_run(monkeypatch, folder, rates, **given):
    monkeypatch.setattr(cpu_threads, "measure_rates", lambda counts, dtype: {n: rates[n] for n in counts})
    monkeypatch.setattr("hf_ext.plan.count_cpu_cores", lambda: 2)
    trainer = make_trainer(folder, speedups=["cpu_threads"], **given)
    trainer.plan.save(folder)
    return trainer


@pytest.mark.usefixtures("nobody_said")
def test_a_run_trains_on_the_threads_that_were_chosen_and_gives_them_back(monkeypatch, tmp_path):
    alone = make_trainer(tmp_path / "alone")
    trainer = make_run(monkeypatch, tmp_path / "run", STEADY)
    evidence = {"threads": 2, "gflops_on_1": [400.0, 400.0], "gflops_on_2": [760.0, 760.0]}
    assert trainer.plan["cpu_threads"].evidence == evidence
    assert torch.get_num_threads() == 2
    trainer.train()
    trainer.end()
    assert torch.get_num_threads() == 1
    alone.train()
    assert largest_weight_difference(trainer.model, alone.model) < 1e-6


@pytest.mark.usefixtures("nobody_said")
def test_a_run_goes_on_with_the_number_that_it_began_with(monkeypatch, tmp_path):
    found = []
    for folder, rates in (("a", STEADY), ("a", UNSTEADY), ("b", UNSTEADY)):
        monkeypatch.setenv("HOME", str(tmp_path / folder))
        trainer = make_run(monkeypatch, tmp_path / folder, rates)
        found.append((torch.get_num_threads(), len(trainer.plan["cpu_threads"].evidence)))
        trainer.end()
    assert found == [(2, 3), (2, 1), (1, 3)]


@pytest.mark.usefixtures("nobody_said")
def test_a_run_that_was_begun_on_threads_somebody_chose_goes_on_with_those_of_the_process(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        first = make_run(patch, tmp_path, STEADY)
        assert first.plan["cpu_threads"].status == "skipped"
        first.end()
    trainer = make_run(monkeypatch, tmp_path, STEADY)
    assert trainer.plan["cpu_threads"].evidence == {"threads": 1}
    trainer.end()


@pytest.mark.usefixtures("nobody_said")
@pytest.mark.parametrize("written", ["0", "-3", "NaN", "Infinity", "null", '"two"', "[2]"])
def test_a_plan_that_says_no_number_of_threads_is_none_of_ours(monkeypatch, tmp_path, written):
    make_run(monkeypatch, tmp_path, STEADY).end()
    path = tmp_path / "plan.json"
    path.write_text(path.read_text().replace('"threads": 2', f'"threads": {written}'))
    trainer = make_run(monkeypatch, tmp_path, STEADY)
    assert trainer.plan["cpu_threads"].evidence == {"threads": 1}
    trainer.end()


def test_off_leaves_the_process_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_threads, "measure_rates", lambda *given: pytest.fail("measured"))
    for name, given in (("set", {"speedups": ["cpu_threads"]}), ("off", {})):  # tests set OMP_NUM_THREADS
        trainer = make_trainer(tmp_path / name, **given)
        assert trainer.plan["cpu_threads"].status == ("skipped" if given else "off")
        assert torch.get_num_threads() == 1
        trainer.end()

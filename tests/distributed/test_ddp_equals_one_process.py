"""DDP: 20 steps of 2 and 3 processes are those of one, killed runs go on as if nothing was, on 1 or 2 processes."""

import shutil
from pathlib import Path

import pytest
from closeness import largest
from equal_cases import NUM_STEPS, differences, load_numbers, write_encoders
from equal_on_ranks import ALL_CASES, SAVED, SAVING, train
from locations import HELPERS
from ranks import run_on_ranks

pytestmark = pytest.mark.nightly

SCRIPT = HELPERS / "equal_on_ranks.py"
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where one process trained every case from beginning to end."""
    folder = tmp_path_factory.mktemp("ddp")
    write_encoders(folder / "encoders")
    for case in ALL_CASES:
        train(case, folder / f"alone-{case}", folder / "encoders", f"alone-{case}", **SAVING)
    return folder


@pytest.fixture(scope="module")
def trained(folder) -> Path:
    """Where two processes did too."""
    run_on_ranks(SCRIPT, folder, "train", limit_s=900)
    return folder


@pytest.fixture(scope="module")
def resumed(folder) -> Path:
    """Where two processes were killed in each case and went on."""
    for case in ALL_CASES:
        run_on_ranks(SCRIPT, folder, f"kill:{case}", is_killed=True)
    run_on_ranks(SCRIPT, folder, "resume", limit_s=900)
    return folder


@pytest.mark.parametrize("case", ALL_CASES)
def test_two_processes_have_the_losses_and_weights_of_one(trained, case):
    found = differences(load_numbers(trained, f"two-{case}"), load_numbers(trained, f"alone-{case}"))
    assert largest(found) < CLOSE


@pytest.mark.parametrize("twin", ["louder", "per-rank"])
def test_louder_gradients_of_one_process_and_a_loss_averaged_per_process_are_seen(trained, twin):
    loss, weight = differences(load_numbers(trained, twin), load_numbers(trained, "alone-masked_lm"))
    assert loss > 10 * CLOSE
    assert weight > 10 * CLOSE


@pytest.mark.parametrize("case", ALL_CASES)
def test_a_killed_run_goes_on_to_the_very_weights_of_one_that_was_not(trained, resumed, case):
    ours, theirs = load_numbers(resumed, f"resumed-{case}"), load_numbers(trained, f"two-{case}")
    assert ours[0] == theirs[0]
    assert all(ours[1][name].equal(theirs[1][name]) for name in theirs[1])


@pytest.mark.parametrize("case", ALL_CASES)
def test_two_processes_go_on_where_one_was(resumed, case):
    loss, weight = differences(load_numbers(resumed, f"grown-{case}"), load_numbers(resumed, f"alone-{case}"))
    assert largest([loss, weight]) < CLOSE


@pytest.mark.parametrize("case", ALL_CASES)
def test_one_process_goes_on_where_two_were_killed(resumed, tmp_path, case):
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED}"
    shutil.copytree(resumed / f"killed-{case}" / f"checkpoint-{SAVED}", checkpoint)
    train(case, tmp_path / "run", resumed / "encoders", "shrunk", resume="auto")
    loss, weight = differences(load_numbers(tmp_path, "shrunk"), load_numbers(resumed, f"alone-{case}"))
    assert largest([loss, weight]) < CLOSE


def test_three_processes_with_workers_have_the_losses_and_weights_of_one(folder, tmp_path):
    run_on_ranks(SCRIPT, folder, "three", num_ranks=3)
    sizes = {"per_device_train_batch_size": 6, "effective_batch_size": 12}
    train("masked_lm", tmp_path / "run", folder / "encoders", "one", **sizes)
    loss, weight = differences(load_numbers(folder, "three"), load_numbers(tmp_path, "one"))
    assert largest([loss, weight]) < CLOSE
    assert len(load_numbers(tmp_path, "one")[0]) == NUM_STEPS

"""Two real processes that a launcher started without `use_cpu`: they find each other, train as one, leave no thread."""

import json
from pathlib import Path

import pytest
import torch
from locations import HELPERS
from ranks import run_on_ranks
from safetensors.torch import load_file
from train_on_ranks import BUDGET, NUM_ROWS, first_gradient, make_rows

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with what two processes wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(HELPERS / "leave_on_ranks.py", folder)
    return folder


@pytest.fixture(scope="module")
def reports(run) -> list[dict]:
    return [json.loads((run / f"report-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def left(run) -> list[dict]:
    """What was left of each process when it ended."""
    return [json.loads((run / f"leave-{rank}.json").read_text()) for rank in range(2)]


def distance(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == reference.keys()
    flat = [torch.cat([gradients[name].flatten() for name in sorted(gradients)]) for gradients in (ours, reference)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


def test_two_processes_have_the_gradient_of_one_and_under_stock_trainer_another(run, tmp_path):
    alone = first_gradient(tmp_path, 16, 1)
    for rank in range(2):
        assert distance(load_file(run / f"exact-{rank}.safetensors"), alone) < 1e-5
        assert distance(load_file(run / f"stock-{rank}.safetensors"), alone) > 0.05


def test_two_processes_see_every_row_once_an_epoch_in_equally_many_batches_within_the_budget(reports):
    lengths = make_rows(NUM_ROWS)["length"][:]
    per_epoch = reports[0]["per_epoch"]
    for epoch in range(2):
        batches = [report["whole"][epoch * per_epoch : (epoch + 1) * per_epoch] for report in reports]
        assert [len(own) for own in batches] == [per_epoch] * 2
        assert sorted(row for own in batches for batch in own for row in batch) == list(range(NUM_ROWS))
        assert max(len(batch) * max(lengths[row] for row in batch) for own in batches for batch in own) <= BUDGET
    assert reports[0]["whole"][:per_epoch] != reports[0]["whole"][per_epoch:]


def test_two_processes_resume_in_the_middle_of_the_second_epoch_with_what_was_left(reports):
    for report in reports:
        left = report["whole"][report["step"] :]
        assert len(left) == report["per_epoch"] - 2
        assert report["resumed"] == left
        assert report["same_weights"]
        assert report["lost"] != left  # when this fails, Accelerate hands the epoch on: drop our line


@pytest.mark.skipif(torch.accelerator.is_available(), reason="only without an accelerator do processes lose each other")
def test_processes_without_an_accelerator_train_together_where_stock_arguments_leave_each_alone(left):
    for report in left:
        assert (report["stock"], report["world"]) == (1, 2)
        assert (report["use_cpu"], report["explicit"]) == (True, [])


def test_fsdp_that_would_silently_be_ddp_is_refused(left):
    for report in left:
        assert "accelerate would run DDP and say nothing" in report["refused"]


def test_end_releases_every_wrapped_model_and_the_threads_of_the_process_group(left):
    for report in left:
        assert report["wrapped"] == [True, True]
        assert report["left"] == [False, False, False]
        assert report["threads"][0] > 0  # so that the next line can fail
        assert report["threads"][1] == 0


def test_a_callback_of_one_process_reads_whole_checkpoints_and_the_others_wait_with_it(left):
    assert [own["seen"] for own in left] == [None, [True] * 3]

"""Two processes that a launcher started without `use_cpu` find each other, and leave no thread behind."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("leave")
    run_on_ranks(Path(__file__).with_name("leave_on_ranks.py"), folder)
    return [json.loads((folder / f"leave-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="only without an accelerator do processes lose each other")
def test_processes_without_an_accelerator_train_together_where_stock_arguments_leave_each_alone(reports):
    for report in reports:
        assert (report["stock"], report["world"]) == (1, 2)
        assert (report["use_cpu"], report["explicit"]) == (True, [])


def test_fsdp_that_would_silently_be_ddp_is_refused(reports):
    for report in reports:
        assert "accelerate would run DDP and say nothing" in report["refused"]


def test_end_releases_every_wrapped_model_and_the_threads_of_the_process_group(reports):
    for report in reports:
        assert report["wrapped"] == [True, True]
        assert report["left"] == [False, False, False]
        assert report["threads"][0] > 0  # so that the next line can fail
        assert report["threads"][1] == 0

"""Where memory fails one of two processes: the finder takes what fits on both; a step that does not fit ends both."""

import json
from pathlib import Path

import pytest
from equal_cases import differences, load_numbers
from locations import HELPERS
from ranks import run_on_ranks

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    run_on_ranks(HELPERS / "memory_on_ranks.py", folder, limit_s=300)
    return folder


def reports(folder, name):
    return [json.loads((folder / f"report-{rank}.json").read_text())[name] for rank in range(2)]


def test_the_finder_takes_what_fits_on_every_process(folder):
    for rows, passes, tried in reports(folder, "found"):
        assert (rows, passes) == (2, 4)
        assert [(t["size"], t["fits"]) for t in tried] == [(1, True), (2, True), (4, False)]
    loss, weight = differences(load_numbers(folder, "found"), load_numbers(folder, "plain"), 3)
    assert loss < 1e-5
    assert weight < 1e-4


def test_a_step_that_does_not_fit_ends_the_run_and_names_the_flag_that_helps(folder):
    for said in reports(folder, "ended"):
        assert "Out of memory in step 1 (CUDA out of memory" in said
        assert "find_batch_size" in said

"""Two real processes go on in the second pass with what was left: tables in random and grouped order, and streams."""

import json
from pathlib import Path

import pytest
from ranks import run_on_ranks
from resume_on_ranks import KINDS, NUM_ROWS, SAVED, STEPS, train

from hf_ext.errors import CheckpointError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where two processes trained."""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(Path(__file__).with_name("resume_on_ranks.py"), folder)
    return folder


@pytest.fixture(scope="module")
def reports(folder) -> list[dict]:
    """What they wrote."""
    return [json.loads((folder / f"resume-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_resume_in_the_second_pass_with_what_was_left(reports, kind):
    found = [report[kind] for report in reports]
    for own in found:
        assert len(own["whole"]) == STEPS
        assert own["resumed"] == own["whole"][SAVED:]
        assert own["same_weights"]
        assert own["same_losses"]
    half = STEPS // 2
    for batches in ([own["whole"][:half] for own in found], [own["whole"][half:] for own in found]):
        assert sorted(row for rank in batches for batch in rank for row in batch) == list(range(NUM_ROWS))
    if kind != "stream":  # whose order may be the same again
        assert found[0]["whole"][:half] != found[0]["whole"][half:]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grouped"])  # whose order depends on the processes
def test_one_process_goes_on_where_two_were_with_the_rows_that_were_left(folder, reports, kind):
    alone = train(folder / kind, kind, resume=True, accumulation=2)
    seen = alone.data_collator.batches[: 2 * (STEPS - SAVED)]
    steps = [sorted(seen[i] + seen[i + 1]) for i in range(0, len(seen), 2)]
    left = [[row for report in reports for row in report[kind]["whole"][step]] for step in range(SAVED, STEPS)]
    assert steps == [sorted(rows) for rows in left]
    assert alone.state.global_step == STEPS


def test_one_process_with_half_the_rows_per_step_is_refused(folder, reports):
    with pytest.raises(CheckpointError, match="world_size"):
        train(folder / "random", "random", resume=True)


def test_a_sampler_that_is_not_told_the_epoch_resumes_in_the_order_of_the_first(reports):
    # When this fails, Accelerate hands the epoch on: drop our line.
    assert reports[0]["lost"] != reports[0]["grouped"]["whole"][SAVED:]

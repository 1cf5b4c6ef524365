"""Two real processes go on in the second pass with what was left, also where one process or two were before."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from closeness import largest
from locations import HELPERS
from ranks import run_on_ranks
from resume_on_ranks import KINDS, NUM_ROWS, SAVED, STEPS, losses, rows_of_steps, train
from safetensors.torch import load_file

from hf_ext.errors import CheckpointError

HALF = STEPS // 2


def batches_of_pass(kind: str, passes: int) -> int:
    """Batches of a process in a pass over the rows: two a step for one process, but for the one row left over."""
    return HALF * passes - (passes - 1 if NUM_ROWS[kind] % 2 else 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """Each kind in one process, from beginning to end; its checkpoint stays in the folder."""
    folder = tmp_path_factory.mktemp("ranks")
    return {"folder": folder, **{kind: train(folder / "alone" / kind, kind) for kind in KINDS}}


@pytest.fixture(scope="module")
def folder(alone) -> Path:
    """Where two processes trained."""
    run_on_ranks(HELPERS / "resume_on_ranks.py", alone["folder"])
    return alone["folder"]


@pytest.fixture(scope="module")
def reports(folder) -> list[dict]:
    """What they wrote."""
    return [json.loads((folder / f"resume-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_resume_in_the_second_pass_with_what_was_left(reports, kind):
    found = [report[kind] for report in reports]
    for own in found:
        assert len(own["whole"]) == STEPS
        assert own["resumed"] == own["whole"][SAVED:]
        assert own["same_weights"]
        assert own["same_losses"]
    for batches in ([own["whole"][:HALF] for own in found], [own["whole"][HALF:] for own in found]):
        seen = [row for rank in batches for batch in rank for row in batch]
        assert set(seen) == set(range(NUM_ROWS[kind]))
        assert len(seen) == NUM_ROWS[kind] + NUM_ROWS[kind] % 2  # of the row left over, one process has a copy
    if kind != "stream":  # whose order may be the same again
        assert found[0]["whole"][:HALF] != found[0]["whole"][HALF:]


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return largest((ours[name] - theirs[name]).abs().max() for name in ours)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_take_the_steps_of_one_to_the_same_weights(alone, folder, reports, kind):
    one = rows_of_steps([alone[kind].data_collator.batches], 2, batches_of_pass(kind, 2))[:STEPS]
    two = rows_of_steps([report[kind]["whole"] for report in reports], 1, HALF)
    assert two == one
    assert losses(alone[kind]) == pytest.approx(reports[0][kind]["losses"], abs=1e-5)
    weights = {name: tensor.detach() for name, tensor in alone[kind].model.named_parameters()}
    assert difference(load_file(folder / f"whole-{kind}.safetensors"), weights) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_where_one_was_with_the_rows_that_were_left(folder, reports, kind):
    left = rows_of_steps([report[kind]["whole"] for report in reports], 1, HALF)[SAVED:]
    assert [sorted({row for r in reports for row in r[kind]["grown"][i]}) for i in range(STEPS - SAVED)] == left
    ours, theirs = (load_file(folder / f"{name}-{kind}.safetensors") for name in ("grown", "whole"))
    assert difference(ours, theirs) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_where_two_were_with_the_rows_that_were_left(folder, reports, kind, tmp_path):
    shrunk = train(tmp_path, kind, folder / kind / f"checkpoint-{SAVED}")
    left = rows_of_steps([report[kind]["whole"] for report in reports], 1, HALF)[SAVED:]
    seen, last = shrunk.data_collator.batches, batches_of_pass(kind, 2) - 2 * (HALF - 1)
    ends = [0, 2, 4, 4 + last]  # three steps are left of the pass
    assert [sorted(row for batch in seen[a:b] for row in batch) for a, b in itertools.pairwise(ends)] == left
    assert shrunk.state.global_step == STEPS
    weights = {name: tensor.detach() for name, tensor in shrunk.model.named_parameters()}
    assert difference(load_file(folder / f"whole-{kind}.safetensors"), weights) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "flag"),
    [("random", "effective_batch_size 4"), ("tokens", "gradient_accumulation_steps times processes = 2")],
)
def test_one_process_with_half_of_each_step_is_refused_with_what_keeps_it(folder, reports, kind, flag, tmp_path):
    with pytest.raises(CheckpointError, match=rf"world_size: 2 .*, 1 now; .*--{flag}"):
        train(tmp_path, kind, folder / kind / f"checkpoint-{SAVED}", keeps_step=False)


@pytest.mark.nightly
def test_resume_auto_on_another_number_of_processes_says_what_changed_and_goes_on(folder, reports, tmp_path, caplog):
    shutil.copytree(folder / "random" / f"checkpoint-{SAVED}", tmp_path / f"checkpoint-{SAVED}")
    with caplog.at_level("INFO"):
        trainer = train(tmp_path, "random", "auto")
    assert trainer.state.global_step == STEPS
    assert "world_size: 2 in the checkpoint, 1 now (the same rows in every step)" in caplog.text


@pytest.mark.nightly
def test_a_sampler_that_is_not_told_the_epoch_resumes_in_the_order_of_the_first(reports):
    # When this fails, Accelerate hands the epoch on: drop our line.
    assert reports[0]["lost"] != reports[0]["grouped"]["whole"][SAVED:]

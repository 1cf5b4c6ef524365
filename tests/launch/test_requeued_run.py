"""Two processes stopped by the time limit and queued again on one and on four take the same rows to the same losses."""

import json
from pathlib import Path

import pytest
import torch
from closeness import largest
from launched_training import NUM_ROWS, ROWS_PER_BATCH, ROWS_PER_STEP, STEPS
from locations import HELPERS, ROOT
from resume_on_ranks import rows_of_steps
from safetensors.torch import load_file
from slurm_jobs import submit

pytestmark = pytest.mark.nightly

SCRIPT = str(ROOT / "launch" / "slurm.sbatch")
STOPPED = 75
CPU = "accelerate_configs/cpu.yaml"
AGAIN = {"one": "PROCESSES=1", "two": "PROCESSES=2", "four": "PROCESSES=4"}


def train(folder: Path, nodes: int = 1, again: str = "", step_s: float = 0.0) -> list[int]:
    """Runs the job; returns the statuses of its starts. With `again` its time is up in the fourth step."""
    given = {
        "TRAIN": str(HELPERS / "launched_training.py"),
        "ACCELERATE_CONFIG": f"{CPU} --multi_gpu",
        "OUTPUT_DIR": str(folder),
    }
    limit = {"FAKE_LIMIT": str(folder / "step-4"), "FAKE_START_1": again} if again else {}
    flags = ["--nodes", str(nodes), SCRIPT, "--step_s", str(step_s)]
    job = submit(folder / "slurm", *flags, limit_s=400, PROCESSES=str(2 // nodes), **given, **limit)
    return job.statuses


def seen(folder: Path, start: int) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"seen-{start}-*.json"))]


def steps_of(reports: list[dict], first: int = 0, last: int = STEPS) -> list[list[int]]:
    """Rows of each optimizer step from `first` on, of what the processes collated; loaders fetch ahead."""
    passes = ROWS_PER_STEP // (ROWS_PER_BATCH * len(reports))
    per_epoch = NUM_ROWS // ROWS_PER_STEP
    kept = [report["batches"] for report in reports]
    if first % per_epoch:  # what is left of the pass in which it was stopped, then whole ones
        left = passes * (per_epoch - first % per_epoch)
        begun = rows_of_steps([batches[:left] for batches in kept], passes, left)
        return begun + rows_of_steps([b[left:] for b in kept], passes, passes * per_epoch)[: last - first - len(begun)]
    return rows_of_steps(kept, passes, passes * per_epoch)[: last - first]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder) == [0]
    return folder


@pytest.mark.parametrize("again", AGAIN)
def test_the_requeued_run_has_the_rows_and_losses_of_the_whole_one(tmp_path, whole, again):
    assert train(tmp_path, again=AGAIN[again], step_s=0.3) == [STOPPED, 0]
    first, second, reference = seen(tmp_path, 0), seen(tmp_path, 1), seen(whole, 0)
    step = first[0]["step"]
    assert 4 <= step < STEPS
    assert [len(first), len(second)] == [2, {"one": 1, "two": 2, "four": 4}[again]]
    rows = steps_of(reference)
    assert [len(set(step)) for step in rows] == [ROWS_PER_STEP] * STEPS
    assert steps_of(first, 0, step) + steps_of(second, step) == rows
    assert second[0]["losses"] == pytest.approx(reference[0]["losses"], abs=1e-5)
    assert difference(tmp_path, whole) < 1e-6


def test_a_run_that_began_anew_would_be_told_from_one_that_went_on(tmp_path, whole):
    reference = seen(whole, 0)
    assert steps_of(reference, 4) != steps_of(reference)[4:]
    assert reference[0]["losses"][4:] != pytest.approx(reference[0]["losses"][:6], abs=1e-5)


def test_two_nodes_of_one_process_stop_and_go_on_as_one_node_of_two(tmp_path, whole):
    assert train(tmp_path, nodes=2, again="PROCESSES=1", step_s=0.3) == [STOPPED, 0]
    assert seen(tmp_path, 1)[0]["losses"] == pytest.approx(seen(whole, 0)[0]["losses"], abs=1e-5)
    assert difference(tmp_path, whole) < 1e-6


def difference(folder: Path, other: Path) -> float:
    ours, theirs = (load_file(place / "weights.safetensors") for place in (folder, other))
    assert ours.keys() == theirs.keys()
    return largest(torch.abs(ours[name] - theirs[name]).max() for name in ours)

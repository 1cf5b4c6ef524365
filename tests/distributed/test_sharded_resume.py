"""FSDP2 runs that are killed, continued by more or fewer processes, or short of disk; full weights, LoRA and Muon."""

from pathlib import Path

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from sharded_launch import differences, is_continued, launch, report, tensors

pytestmark = pytest.mark.nightly
KINDS = ("full", "lora", "muon")


def spec(folder: Path, kind: str = "full", **more) -> dict:
    return {"folder": str(folder), "name": "end", "kind": kind, **more}


def weights(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in named.items() if not name.startswith("optimizer.")}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Uninterrupted runs of two processes, and of four."""
    place = tmp_path_factory.mktemp("sharded")
    launch([spec(place / kind, kind) for kind in KINDS], place)
    launch([spec(place / f"{kind}-4", kind, given=rows(4), record=True) for kind in KINDS], place, 4)
    return place


def rows(processes: int) -> dict[str, int]:
    """Eight rows per step."""
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // processes}


@pytest.fixture(scope="module")
def killed(place) -> Path:
    """Runs that were killed in the save at step 4, and what the same command then did."""
    for kind in KINDS:
        launch([spec(place / "killed" / kind, kind, dies=True)], place, dies=True)
    launch([spec(place / "killed" / kind, kind, given={"resume": "auto"}) for kind in KINDS], place)
    return place / "killed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_continues_as_if_it_had_not_been(place, killed, kind):
    assert is_continued(killed / kind, place / kind)
    assert (
        report(killed / kind)["batches"][0] == report(place / kind)["batches"][2]
    )  # the whole checkpoint is of step 2


@pytest.fixture(scope="module")
def broken(place) -> Path:
    """Continued from checkpoints that are sound in themselves but not what was saved."""
    runs = []
    for kind in KINDS:
        saved = [str(place / kind / f"checkpoint-{step}") for step in (2, 4)]
        runs += [spec(place / f"{kind}-{harm}", kind, source=saved, harm=harm) for harm in ("stale",)]
    launch(runs, place)
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_fails_for_a_stale_optimizer(broken, kind):
    own, whole = broken / f"{kind}-stale", broken / kind
    assert report(own)["batches"][:2] == report(whole)["batches"][4:6]
    assert not is_continued(own, whole)
    assert differences(weights(tensors(own)), weights(tensors(whole)))


@pytest.fixture(scope="module")
def moved(place) -> Path:
    """Runs of four processes continued by two, and of two by four; and of two under DDP."""

    def go(name: str, processes: int, shards: bool = True, source: str = "") -> None:
        sources = {kind: [at(place / f"{kind}-{source}")] if source else [] for kind in KINDS}
        given = {"given": rows(processes), "record": True}
        runs = [spec(place / f"{kind}-{name}", kind, source=sources[kind], **given) for kind in KINDS]
        launch(runs, place, processes, shards)

    go("4to2", 2, source="4")
    go("2", 2)
    go("2to4", 4, source="2")
    go("ddp", 2, shards=False)
    return place


def at(folder: Path, step: int = 4) -> str:
    return str(folder / f"checkpoint-{step}")


MOVES = {"4to2": ("4", 4, 2), "2to4": ("2", 2, 4)}


def steps(folder: Path, processes: int, first: int, last: int) -> list[list[int]]:
    """Rows of each optimizer step, over all processes."""
    each = 8 // processes
    batches = [report(folder, rank)["batches"] for rank in range(processes)]
    return [
        sorted(row for own in batches for batch in own[step * each : (step + 1) * each] for row in batch)
        for step in range(first, last)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("move", MOVES)
def test_another_number_of_processes_goes_on_with_the_rows_that_were_left(moved, kind, move):
    before, there, here = MOVES[move]
    own, whole = moved / f"{kind}-{move}", moved / f"{kind}-{before}"
    assert report(own)["world"] == here
    assert steps(own, here, 0, 2) == steps(whole, there, 4, 6)
    assert len(report(own)["losses"]) == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("move", MOVES)
def test_another_number_of_processes_begins_with_the_same_weights_and_optimizer(moved, kind, move):
    before, *_ = MOVES[move]
    own, whole = moved / f"{kind}-{move}", moved / f"{kind}-{before}"
    assert not differences(tensors(own, "begin"), tensors(whole, "four"))
    assert differences(tensors(own), tensors(own, "begin"))
    near = [torch.allclose(a, b, atol=0.1) for a, b in zip(tensors(own).values(), tensors(whole).values())]
    assert all(near)  # dropout is drawn by others now


def test_a_checkpoint_of_ddp_is_refused_by_fsdp2_and_says_what_to_do(moved):
    source = [at(moved / "full-ddp")]
    launch([spec(moved / "full-refused", source=source)], moved)
    assert "are in the files of Trainer, this run reads those of FSDP2" in report(moved / "full-refused")["error"]


def test_a_full_disk_of_one_process_leaves_the_checkpoint_before_and_training_goes_on(place):
    folder = place / "full-disk"
    printed = launch([spec(folder, full="own")], place)
    assert "Checkpoint 4 was not written" in printed
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    assert not (folder / ".staging").exists()
    assert is_continued(folder, place / "full")


def test_the_best_weights_are_loaded_at_the_end_and_accelerate_merges_the_pieces(tmp_path):
    given = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    folder = tmp_path / "best"
    launch([spec(folder, given=given)], tmp_path)
    assert report(folder)["best"] == 2  # the loss falls
    merge_fsdp_weights(str(folder / "checkpoint-2" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged, trained = load_file(tmp_path / "merged" / "model.safetensors"), weights(tensors(folder))
    assert not differences({name: merged.get(name, torch.empty(0)) for name in trained}, trained)

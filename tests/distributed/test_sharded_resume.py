"""FSDP2 runs that are killed, continued by more or fewer processes, or short of disk; full weights, LoRA and Muon."""

import shutil
from pathlib import Path

import pytest
import torch
from hub_server import serve_hub
from huggingface_hub import HfApi
from sharded_launch import differences, is_continued, launch, report, tensors
from sharded_on_ranks import make_model
from transformers import EsmForTokenClassification

from hf_ext.checkpoints.inspect import DAMAGED, find_next, inspect_folder
from hf_ext.checkpoints.state.weights import load_weights

pytestmark = pytest.mark.nightly
TOKEN = "hf_" + "canary" * 5 + "bird"
KINDS = ("full", "lora", "muon")
KILLS = {"step": 4, "shards": 2, "commit": 2, "rename": 4}  # the checkpoint that is left to continue from


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
    """Runs that were killed, each at each place, and what the same command then did."""
    again = []
    for kind in KINDS:
        for kill in KILLS:
            folder = place / "killed" / f"{kind}-{kill}"
            launch([spec(folder, kind, kill=kill)], place, dies=True)
            shutil.copytree(folder, place / "found" / folder.name)
            again.append(spec(folder, kind, given={"resume": "auto"}))
    launch(again, place)
    return place / "killed"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kill", KILLS)
def test_a_run_that_was_killed_continues_as_if_it_had_not_been(place, killed, kind, kill):
    left = inspect_folder(place / "found" / f"{kind}-{kill}")
    step = find_next(left).step
    assert step == KILLS[kill] or kill == "step"
    assert not [found for found in left if found.kind == DAMAGED]
    assert is_continued(killed / f"{kind}-{kill}", place / kind)
    assert report(killed / f"{kind}-{kill}")["batches"][0] == report(place / kind)["batches"][step]


@pytest.fixture(scope="module")
def broken(place) -> Path:
    """Continued from checkpoints that are sound in themselves but not what was saved."""
    runs = []
    for kind in KINDS:
        saved = [str(place / kind / f"checkpoint-{step}") for step in (2, 4)]
        runs += [spec(place / f"{kind}-{harm}", kind, source=saved, harm=harm) for harm in ("swap", "stale")]
    launch(runs, place)
    return place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["swap", "stale"])
def test_the_comparison_fails_for_swapped_pieces_and_for_a_stale_optimizer(broken, kind, harm):
    own, whole = broken / f"{kind}-{harm}", broken / kind
    assert report(own)["batches"][:2] == report(whole)["batches"][4:6]
    assert not is_continued(own, whole)
    assert differences(weights(tensors(own)), weights(tensors(whole)))


@pytest.fixture(scope="module")
def moved(place) -> Path:
    """Runs of four processes continued by two and by one, of two by four, and of two under DDP by two under FSDP2."""

    def go(name: str, processes: int, shards: bool = True, source: str = "") -> None:
        sources = {kind: [at(place / f"{kind}-{source}")] if source else [] for kind in KINDS}
        given = {"given": rows(processes), "record": True}
        runs = [spec(place / f"{kind}-{name}", kind, source=sources[kind], **given) for kind in KINDS]
        launch(runs, place, processes, shards)

    go("4to2", 2, source="4")
    go("2", 2)
    go("2to4", 4, source="2")
    go("4to1", 1, shards=False, source="4")
    go("ddp", 2, shards=False)
    go("ddpto2", 2, source="ddp")
    return place


def at(folder: Path, step: int = 4) -> str:
    return str(folder / f"checkpoint-{step}")


MOVES = {"4to2": ("4", 4, 2), "2to4": ("2", 2, 4), "4to1": ("4", 4, 1), "ddpto2": ("ddp", 2, 2)}


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


@pytest.mark.parametrize("full", ["own", "shards"])
def test_a_full_disk_of_one_process_leaves_the_checkpoint_before_and_training_goes_on(place, full):
    folder = place / f"full-disk-{full}"
    printed = launch([spec(folder, full=full)], place)
    assert "Checkpoint 4 was not written" in printed
    assert [found.step for found in inspect_folder(folder)] == [2, 6]
    assert not list(folder.glob(".staging*"))
    assert is_continued(folder, place / "full")


def test_the_best_weights_are_loaded_at_the_end(tmp_path):
    given = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    folder = tmp_path / "best"
    launch([spec(folder, given=given)], tmp_path)
    assert report(folder)["best"] == 2  # the loss falls
    model = make_model("full")
    load_weights(model, folder / "checkpoint-2")
    assert not differences(dict(model.named_parameters()), weights(tensors(folder)))


def test_checkpoints_in_pieces_are_pushed_with_the_whole_model_and_load_elsewhere(tmp_path, monkeypatch):
    given = {"push_to_hub": True, "hub_model_id": "me/x", "hub_strategy": "checkpoint", "save_steps": 3}
    pushed, elsewhere = tmp_path / "pushed", tmp_path / "elsewhere"
    with serve_hub(monkeypatch, TOKEN) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        launch([spec(pushed, given=given)], tmp_path)
        files = set(hub.repositories["me/x"].files)
        HfApi(hub.url, token=TOKEN).snapshot_download("me/x", local_dir=elsewhere)
    checkpoint = elsewhere / "last-checkpoint"
    assert {"model.safetensors", "last-checkpoint/manifest.json", "last-checkpoint/sharded.json"} < files
    assert not {name for name in files if name.endswith((".bin", ".pt", ".pth", ".distcp"))}
    model = EsmForTokenClassification.from_pretrained(elsewhere)
    assert not differences(dict(model.named_parameters()), weights(tensors(pushed)))
    launch([spec(tmp_path / "again", given={"resume": str(checkpoint), "max_steps": 6}, record=True)], tmp_path)
    assert not differences(tensors(tmp_path / "again", "begin"), tensors(pushed))

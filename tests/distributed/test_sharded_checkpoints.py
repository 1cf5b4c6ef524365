"""Two processes under FSDP2 save in pieces and go on from them; what is wrong with a piece is named."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from sharded_launch import differences, is_continued, report, tensors
from sharded_on_ranks import make_model

from hf_ext.checkpoints.inspect import DAMAGED, WHOLE, find_next, inspect_folder
from hf_ext.checkpoints.state.weights import load_weights

pytestmark = pytest.mark.nightly

PIECES = ["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"]


@pytest.mark.nightly
def test_a_resumed_run_ends_as_the_uninterrupted_one_to_the_bit(place):
    assert "FSDP" in report(place / "whole")["kind"]
    assert is_continued(place / "resumed", place / "whole")
    for rank in range(2):
        assert report(place / "resumed", rank)["batches"][:2] == report(place / "whole", rank)["batches"][4:6]


def test_each_process_writes_its_part_and_none_a_pickle(place):
    checkpoint = place / "whole" / "checkpoint-6"
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert {f"{part}/{name}" for part in ("sharded_weights", "sharded_optimizer") for name in PIECES} < names
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}
    one, other = (load_file(checkpoint / "sharded_weights" / name) for name in PIECES)
    matrix = "esm.encoder.layer.0.intermediate.dense.weight"  # (32, 16)
    assert one[matrix].shape == other[matrix].shape == (16, 16)
    assert sum(t.nbytes for part in (one, other) for t in part.values()) == sum(
        t.nbytes for t in make_model("full").state_dict().values()
    )


def test_a_lost_piece_is_named_and_all_processes_go_on_from_the_checkpoint_before(place):
    assert is_continued(place / "lost", place / "whole")
    for rank in range(2):
        assert report(place / "lost", rank)["batches"][:4] == report(place / "whole", rank)["batches"][2:6]
    (damaged,) = inspect_folder(place / "lost" / "damaged-checkpoint-4")
    assert damaged.problems[0].startswith(f"sharded_weights/{PIECES[1]}: expected ")


def test_one_process_loads_the_pieces_of_two(place):
    model = make_model("full")
    load_weights(model, place / "whole" / "checkpoint-6")
    gathered = {n: t for n, t in tensors(place / "whole").items() if not n.startswith("optimizer.")}
    assert not differences(dict(model.named_parameters()), gathered)


def test_a_piece_that_was_put_there_later_is_refused(place, tmp_path):
    copy = Path(shutil.copytree(place / "whole" / "checkpoint-6", tmp_path / "checkpoint-6"))
    shutil.copy(copy / "sharded_weights" / PIECES[0], copy / "sharded_weights" / "shard-00009.safetensors")
    (found,) = inspect_folder(copy)
    assert found.kind == DAMAGED
    assert "shard-00009.safetensors: not in its manifest" in found.problems[0]


def test_inspection_takes_a_sharded_checkpoint_for_one_to_continue_from(place):
    found = find_next(inspect_folder(place / "whole"))
    assert (found.name, found.kind) == ("checkpoint-6", WHOLE)

"""Saving without a Trainer: what a checkpoint holds, when it is in place, and what becomes of a failure."""

import errno
import threading

import pytest
import torch
from small_parts import Parts

from hf_ext.checkpoints.format.stored import verify
from hf_ext.checkpoints.format.trees import load_tree
from hf_ext.errors import CheckpointError, DiskFailure, NotFiniteError
from hf_ext.training.stopper import StopCause, StopReason


@pytest.fixture
def parts(tmp_path) -> Parts:
    made = Parts(tmp_path)
    made.find("no")
    made.step()
    return made


def refuse(*given):
    raise OSError(errno.ENOSPC, "full")


def test_a_checkpoint_holds_every_part_under_its_name(parts):
    parts.positions[0].value, parts.positions[1].value = True, {"row": 8}
    parts.save()
    assert parts.finish() == 1
    folder = parts.places.store.path(1)
    stored, problems = verify(folder, 1)
    assert problems == []
    assert stored.manifest.facts == parts.facts
    assert load_tree(folder, "early_stopping") == {"rule": None}
    own = load_tree(folder, "rank_0")
    assert own.keys() == {"rng", "unlogged_loss", "row_order"}
    assert (own["unlogged_loss"], own["row_order"]) == (1.0, {"began": None})
    progress = parts.progress(1)
    assert (progress["evaluation_pending"], progress["data_position"]) == (True, {"row": 8})
    assert (progress["logged_loss"], progress["last_logged_step"]) == (2.5, 0)
    assert (progress["begun_loaders"], progress["only_model"], progress["best_saved_step"]) == (["train"], False, None)
    assert {"optimizer.safetensors", "scheduler.json", "model.safetensors"} <= stored.manifest.files.keys()


def test_weights_alone_leave_out_what_only_a_run_needs(tmp_path):
    parts = Parts(tmp_path, save_only_model=True).saved(1)
    files = parts.places.store.checkpoints()[0].manifest.files
    assert not [name for name in files if name.startswith(("optimizer", "scheduler", "early_stopping"))]


def test_a_part_without_state_writes_no_file(parts):
    parts.tree.value = None
    parts.save()
    parts.finish()
    assert not (parts.places.store.path(1) / "early_stopping.json").exists()


def test_a_checkpoint_is_of_the_moment_that_is_held(parts):
    parts.state.num_input_tokens_seen = 40
    moment = parts.checkpointer.moment(torch.tensor(0.25), parts.state)
    parts.checkpointer.hold(moment)
    torch.rand(3)
    parts.state.num_input_tokens_seen, parts.begun.value = 50, ["eval", "train"]
    parts.save()
    parts.finish()
    own = load_tree(parts.places.store.path(1), "rank_0")
    assert torch.equal(own["rng"]["torch"], moment.rng["torch"])
    assert own["unlogged_loss"] == 0.25
    assert parts.progress(1)["begun_loaders"] == ["train"]
    assert parts.state.num_input_tokens_seen == 50
    parts.checkpointer.let_go()
    parts.step()
    parts.save()
    parts.finish()
    assert parts.progress(2)["begun_loaders"] == ["eval", "train"]


def test_the_moment_of_a_step_is_held_under_accumulation_alone(tmp_path):
    for number, expected in ((1, 1.0), (2, 0.5)):
        parts = Parts(tmp_path / str(number), gradient_accumulation_steps=number)
        parts.find("no")
        parts.step()
        parts.checkpointer.begin_epoch()
        parts.checkpointer.begin_step(torch.tensor(0.5), parts.state)
        parts.save()
        parts.finish()
        assert load_tree(parts.places.store.path(1), "rank_0")["unlogged_loss"] == expected


def test_a_save_is_on_its_way_until_it_is_waited_for(parts):
    may_go, sync = threading.Event(), parts.places.store._publish
    parts.places.store._publish = lambda *given: may_go.wait(20) and sync(*given)
    parts.save()
    assert parts.committer.has(1)
    assert parts.committer.saved_step is None
    assert parts.places.path(1) is None
    may_go.set()
    assert parts.finish() == 1
    assert parts.finish() is None  # said once
    assert parts.committer.last_good() == "checkpoint-1 is the last good one"


def test_what_reads_a_checkpoint_at_once_finds_it_and_may_add_to_it(parts):
    parts.save(is_read_at_once=True)
    folder = parts.places.path(1)
    assert parts.committer.has_placed
    (folder / "notes.txt").write_text("mine")
    assert parts.finish() == 1
    assert "notes.txt" in parts.places.store.checkpoints()[0].manifest.files


def test_a_save_that_fails_leaves_the_one_before_and_too_many_end_the_run(tmp_path):
    parts = Parts(tmp_path).saved(1)
    parts.write_model = refuse
    parts.step()
    parts.save()
    assert not parts.committer.has(2)
    assert parts.committer.saved_step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
    parts.step()
    parts.save()
    parts.step()
    with pytest.raises(DiskFailure, match=r"3 checkpoint\(s\) in a row were not written.*bytes are needed"):
        parts.save()


def test_a_save_that_fails_while_training_stops_is_one_too_many(parts):
    parts.write_model = refuse
    parts.stopper.reason = StopReason(StopCause.SIGNAL, "received SIGTERM")
    with pytest.raises(DiskFailure):
        parts.save()


def test_leaving_waits_for_a_commit_and_says_what_became_of_it(parts, caplog):
    parts.places.store._publish = refuse
    parts.save()
    parts.committer.leave()
    assert "Checkpoint 1 was not written" in caplog.text
    assert not parts.places.store.staging_path(1).exists()
    assert parts.committer.last_good() == "no checkpoint was saved"


def test_weights_that_are_not_finite_are_named_with_what_is_left(parts):
    parts.checkpointer.check_finite(parts.now(), lambda: "unused", with_optimizer=True)
    weight = parts.model.classifier.out_proj.bias
    parts.optimizer.state[weight]["exp_avg"][0] = torch.inf
    parts.checkpointer.check_finite(parts.now(), lambda: "unused")
    with pytest.raises(NotFiniteError, match="exp_avg"):
        parts.checkpointer.check_finite(parts.now(), lambda: "", with_optimizer=True)
    with torch.no_grad():
        weight[0] = torch.nan
    with pytest.raises(NotFiniteError, match=r"first: classifier\.out_proj\.bias\); none was left\."):
        parts.checkpointer.check_finite(parts.now(), lambda: "none was left")


def test_state_that_no_checkpoint_can_hold_is_refused_after_the_first_step(parts):
    parts.optimizer.state[parts.model.classifier.out_proj.bias]["memory"] = object()
    parts.checkpointer.begin_training()
    with pytest.raises(CheckpointError, match="No checkpoint can hold the state of"):
        parts.checkpointer.end_step(parts.now())
    parts.checkpointer.end_step(parts.now())  # looked at once
    parts.args.save_only_model = True
    parts.checkpointer.check_storable(parts.now())

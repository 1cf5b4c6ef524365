"""Resuming without a Trainer: which checkpoint, whether it fits, and what is taken from it."""

import pytest
import torch
from small_parts import Parts
from weight_models import bits

from hf_ext.checkpoints.state.rng import capture_rng
from hf_ext.errors import CheckpointError


def describe(error: Exception) -> str:
    return str(error)


@pytest.fixture
def saved(tmp_path) -> Parts:
    return Parts(tmp_path).saved(1, 2)


def test_auto_finds_the_newest_and_takes_over_its_run(saved, tmp_path):
    parts = Parts(tmp_path)
    assert parts.find("auto") == str(tmp_path / "checkpoint-2")
    resumed = parts.resumer.resumed
    assert (resumed.stored.step, resumed.own_step, resumed.allowed) == (2, 2, frozenset())
    assert (resumed.position, resumed.pending, resumed.best) == (None, False, None)
    assert parts.places.store.run_id == saved.places.store.run_id
    assert parts.committer.has(2)


def test_without_a_checkpoint_auto_begins_and_true_refuses(tmp_path):
    parts = Parts(tmp_path)
    assert parts.find("auto") is None
    assert parts.resumer.resumed is None
    with pytest.raises(CheckpointError, match="no checkpoint there that could be continued"):
        parts.find(True)


def test_no_begins_anew_and_sets_aside_what_was_there(saved, tmp_path):
    parts = Parts(tmp_path)
    assert parts.find("no") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["previous-checkpoint-1", "previous-checkpoint-2"]


def test_the_arguments_decide_where_nothing_is_asked(saved, tmp_path):
    assert Parts(tmp_path, resume="auto").find(None) == str(tmp_path / "checkpoint-2")


def test_an_older_checkpoint_that_is_named_makes_a_branch(saved, tmp_path):
    parts = Parts(tmp_path)
    assert parts.find(str(tmp_path / "checkpoint-1")) == str(tmp_path / "checkpoint-1")
    assert parts.places.path(2) is None


def test_a_checkpoint_of_elsewhere_is_continued_as_another_run(saved, tmp_path):
    parts = Parts(tmp_path / "new")
    parts.find(str(tmp_path / "checkpoint-2"))
    resumed = parts.resumer.resumed
    assert (resumed.is_own, resumed.own_step, resumed.best) == (False, None, None)
    assert parts.places.store.run_id != saved.places.store.run_id


def test_a_run_that_differs_is_refused_unless_it_may(saved, tmp_path):
    with pytest.raises(CheckpointError, match="learning_rate"):
        Parts(tmp_path, learning_rate=1e-3).find("auto")
    parts = Parts(tmp_path, learning_rate=1e-3, allow_changed=["learning_rate"])
    parts.find("auto")
    assert parts.resumer.resumed.allowed == {"learning_rate"}


def test_a_damaged_checkpoint_that_is_named_is_refused(saved, tmp_path):
    (tmp_path / "checkpoint-2" / "progress.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"progress\.json"):
        Parts(tmp_path).find(str(tmp_path / "checkpoint-2"))


def test_weights_optimizer_and_schedule_come_back_to_the_bit(saved, tmp_path):
    parts = Parts(tmp_path)
    folder = parts.find("auto")
    assert bits(parts.model) != bits(saved.model)
    parts.restorer.load_model(parts.model, folder, describe)
    assert parts.restorer.reads_steppers(folder)
    parts.restorer.load_steppers(parts.optimizer, parts.schedule, describe)
    assert bits(parts.model) == bits(saved.model)
    assert parts.schedule.state_dict() == saved.schedule.state_dict()
    for one, other in zip(parts.optimizer.state.values(), saved.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_losses_and_the_state_of_parts_come_back(saved, tmp_path):
    parts = Parts(tmp_path)
    parts.find("auto")
    sums = parts.restorer.load_losses(global_step=2)
    assert (sums.unlogged, sums.logged, sums.last_logged_step) == (1.0, 2.5, 1)
    assert parts.restorer.whole_loss(2.5, 2) == 1.25
    parts.positions[1].value = "another"
    parts.restorer.load_parts(parts.positions)
    assert parts.positions[1].value is None


def test_a_run_that_begins_knows_its_losses_and_one_of_stock_trainer_does_not(tmp_path):
    parts = Parts(tmp_path)
    parts.find("no")
    assert parts.restorer.load_losses(global_step=0) is None
    assert parts.restorer.knows_whole_loss
    assert parts.restorer.load_losses(global_step=3) is None
    assert parts.restorer.whole_loss(2.5, 2) is None


def test_an_evaluation_that_was_interrupted_is_made_up_from_the_random_state_it_began_with(tmp_path):
    saved = Parts(tmp_path)
    saved.find("no")
    saved.step()
    saved.positions[0].value = True
    torch.manual_seed(7)
    saved.save()
    saved.finish()
    drawn = []
    parts = Parts(tmp_path)
    parts.find("auto")
    torch.manual_seed(8)
    parts.restorer.make_up_evaluation(lambda: drawn.append(torch.rand(2)))
    after = capture_rng()
    torch.manual_seed(9)
    parts.restorer.load_rng()
    assert torch.equal(capture_rng()["torch"], after["torch"])  # not that of before the evaluation
    torch.manual_seed(7)
    assert torch.equal(drawn[0], torch.rand(2))


def test_without_an_interrupted_evaluation_none_is_made_up(saved, tmp_path):
    parts = Parts(tmp_path)
    parts.find("auto")
    parts.restorer.make_up_evaluation(pytest.fail)


def test_another_metric_forgets_the_best(tmp_path):
    Parts(tmp_path, metric_for_best_model="loss", greater_is_better=False).saved(1)
    given = {"metric_for_best_model": "spearman", "greater_is_better": True}
    parts = Parts(tmp_path, allow_changed=[*given], **given)
    parts.find("auto")
    parts.space.begin_run(1)
    parts.state.best_metric = parts.state.best_global_step = 1
    parts.restorer.correct_state(parts.state, max_steps=10)
    assert parts.state.best_global_step is None
    assert parts.space.best_saved_step(parts.state) is None


def test_trainer_ends_with_the_best_checkpoint_named_and_no_limit(saved, tmp_path):
    saved.args.save_total_limit, saved.state.best_global_step = 1, 1
    with saved.restorer.finalizing(saved.state):
        assert saved.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
        assert saved.args.save_total_limit is None
    assert saved.args.save_total_limit == 1


def test_the_best_checkpoint_is_loaded_or_handed_to_the_users_own_loader(saved, tmp_path):
    saved.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    last, asked = bits(saved.model), []
    assert saved.restorer.load_best(saved.now(), describe, asked.append)
    assert (asked, bits(saved.model)) == ([str(tmp_path / "checkpoint-1")], last)
    assert saved.restorer.load_best(saved.now(), describe, None)
    assert bits(saved.model) != last

"""A run that is out of memory goes on with less at a time, and learns what the run learns that began there."""

import json

import pytest
import torch
from miniature_esm import make_wide_esm
from small_memory import Room
from tiny_masked_lm import make_args, make_rows, make_trainer
from token_rows import pad_rows

from hf_ext.errors import MemoryExhausted
from hf_ext.trainer import FastTrainer
from hf_ext.training import oom_policy as oom_policy_module

LADDER = {"oom_policy": "step_down", "optim": "adamw_torch_fused", "learning_rate": 1e-2}


def weights_of(trainer):
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same(ours, theirs):
    return all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def run(folder, room=None, model=None, **given):
    model = make_wide_esm() if model is None else model
    if room is not None:
        room.watch(model.esm.encoder.layer[1])
    trainer = make_trainer(folder, model, **{**LADDER, **given})
    trainer.train()
    return trainer


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("rows", "given"), [(4, (4, 2)), (1, (1, 8))])
def test_a_step_that_does_not_fit_equals_that_of_smaller_batches(tmp_path, where, rows, given):
    room = Room(rows, where)
    stepped = run(tmp_path / "a", room, per_device_train_batch_size=8)
    begun = run(tmp_path / "b", per_device_train_batch_size=given[0], gradient_accumulation_steps=given[1])
    assert room.num_failed == (1 if rows == 4 else 3)  # 8, and then 4 and 2
    assert stepped.plan["oom_ladder"].evidence["taken"][-1]["rung"].startswith(f"{rows} row")
    assert losses_of(stepped) == losses_of(begun)
    assert same(weights_of(stepped), weights_of(begun))


@pytest.mark.nightly
def test_with_dropout_random_numbers_are_those_of_the_run_that_began_there(tmp_path, monkeypatch):
    shape = {"hidden_dropout_prob": 0.2}
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    stepped = run(tmp_path / "a", Room(None, "backward", (2,)), make_wide_esm(**shape), **given)
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 3}
    begun = run(tmp_path / "b", None, make_wide_esm(**shape), **given)
    assert same(weights_of(stepped), weights_of(begun))

    monkeypatch.setattr(oom_policy_module, "restore_rng", lambda tree: None)  # the broken twin
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    broken = run(tmp_path / "c", Room(None, "backward", (2,)), make_wide_esm(**shape), **given)
    assert not same(weights_of(broken), weights_of(begun))


def test_without_the_policy_the_run_ends_as_trainers(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, Room(2), oom_policy="stop", per_device_train_batch_size=4)


def test_where_nothing_is_left_the_error_says_what_would_help(tmp_path):
    words = r"step 1 \(CUDA.*1 row at a time: nothing is left.*adamw_8bit"
    with pytest.raises(MemoryExhausted, match=words) as ended:
        run(tmp_path, Room(0), per_device_train_batch_size=4)
    assert ended.value.exit_code == 69


def room_for(room):
    model = make_wide_esm()
    room.watch(model.esm.encoder.layer[1])
    return model


def test_counts_of_a_repeated_step_are_those_of_its_rows(tmp_path):
    run(tmp_path / "b", per_device_train_batch_size=8)
    run(tmp_path / "a", Room(2), per_device_train_batch_size=8)
    tokens = [json.loads((tmp_path / name / "throughput.json").read_text())["totals"]["tokens"] for name in "ab"]
    assert tokens[0] == tokens[1] > 0


def test_the_last_short_batch_is_cut_as_a_loader_cuts_it(tmp_path):
    """24 rows in batches of 10: 10, 10, 4; in parts of 5: 5, 5 | 5, 5 | 4."""
    stepped = run(tmp_path / "a", Room(5), per_device_train_batch_size=10, max_steps=3)
    begun = run(tmp_path / "b", None, per_device_train_batch_size=5, gradient_accumulation_steps=2, max_steps=3)
    assert same(weights_of(stepped), weights_of(begun))


class MeanOfBatch(FastTrainer):
    """A loss of the user's: the mean of a batch, which parts of it would not add up to."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_batches_of_a_loss_of_the_users_own_are_not_cut(tmp_path):
    trainer = MeanOfBatch(room_for(Room(None, calls=(1,))), make_args(tmp_path, **LADDER), pad_rows, make_rows())
    with pytest.raises(MemoryExhausted, match="with whole batches: nothing is left"):
        trainer.train()


def normalising_model(room=None):
    """A head whose rows depend on each other."""
    model = make_wide_esm()
    model.lm_head.layer_norm = torch.nn.Sequential(Swap(), torch.nn.BatchNorm1d(model.config.hidden_size), Swap())
    return model if room is None else (room.watch(model.esm.encoder.layer[1]), model)[1]


class Swap(torch.nn.Module):
    def forward(self, states):
        return states.transpose(1, 2)


def test_of_a_model_that_normalises_over_batches_nothing_is_made_again(tmp_path):
    """Parts have other statistics, and a batch computed again counts twice: the run ends, and says what would help."""
    with pytest.raises(MemoryExhausted, match="with whole batches: nothing is left"):
        run(tmp_path / "a", None, normalising_model(Room(None, "backward", (2,))))


def test_a_step_of_the_users_own_loop_is_trainers(tmp_path):
    trainer = make_trainer(tmp_path, **LADDER)
    batch = pad_rows([trainer.train_dataset[i] for i in range(4)])
    assert trainer.training_step(trainer.model, batch) > 0
    Room(2).watch(trainer.model.esm.encoder.layer[0])
    with pytest.raises(torch.OutOfMemoryError):
        trainer.training_step(trainer.model, batch)

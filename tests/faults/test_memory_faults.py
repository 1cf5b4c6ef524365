"""Out of memory in a pass never loses a step: the run ends with the weights of the run that had room."""

import pytest
import torch
from faulty_runs import messages
from miniature_esm import make_wide_esm
from small_memory import Room
from tiny_masked_lm import make_args, make_rows
from token_rows import pad_rows

from hf_ext.trainer import FastTrainer

POINTS = [(where, call) for where in ("forward", "backward") for call in (1, 2, 3, 5, 8)]


def train(folder, room=None):
    """Four steps of two micro-batches in float64, where parts of a batch differ by 1e-15; evaluated and saved twice."""
    model = make_wide_esm().double()
    if room is not None:
        room.watch(model.esm.encoder.layer[1])
    given = {"gradient_accumulation_steps": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    given |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "learning_rate": 0.1}
    args = make_args(folder, oom_policy="step_down", **given)
    trainer = FastTrainer(model, args, pad_rows, make_rows(), make_rows(11, 1))
    trainer.train()
    return trainer


def numbers(trainer):
    logged = [e.get("loss", e.get("eval_loss")) for e in trainer.state.log_history if "loss" in e or "eval_loss" in e]
    weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
    return logged, weights


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return numbers(train(tmp_path_factory.mktemp("plain")))


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("where", "call"), POINTS)
def test_a_run_that_is_out_of_memory_once_is_the_run_that_is_not(tmp_path, plain, where, call):
    with messages() as said:
        room = Room(None, where, (call,))
        logged, weights = numbers(train(tmp_path, room))
        assert room.num_failed == 1
    assert any("Out of memory" in line for line in said)
    assert logged == pytest.approx(plain[0], abs=1e-6)
    assert (weights - plain[1]).abs().max() < 1e-12
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_a_lost_step_is_seen(tmp_path, plain):
    lost = FastTrainer.training_step

    def lose(self, model, inputs, *args, **kwargs):
        return torch.zeros((), dtype=torch.float64)

    FastTrainer.training_step = lose
    try:
        _, weights = numbers(train(tmp_path))
    finally:
        FastTrainer.training_step = lost
    assert (weights - plain[1]).abs().max() > 1e-3

"""Evaluations by epochs beside saves by steps, or the reverse: the best model is there at the end."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_evaluations import Scripted, make_rows, make_trainer

from hf_ext.property import TASK

BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 3}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "epoch"}


@pytest.mark.parametrize(
    ("given", "best", "kept"),
    [
        (BY_EPOCH, 8, {"checkpoint-8", "checkpoint-16"}),  # evaluated at 4, 8, 12, 16
        (BY_STEPS, 6, {"checkpoint-6", "checkpoint-16"}),  # evaluated at 3, 6, 9, 12, 15
    ],
)
def test_the_best_model_is_saved_where_evaluations_and_saves_meet_nowhere(given, best, kept, tmp_path):
    given = {**given, "load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    scores = Scripted(of_9=[1.0, 3.0, 2.0, 0.5, 0.0])
    trainer = make_trainer(
        tmp_path, make_rows(9), compute_metrics=scores, num_train_epochs=4, save_total_limit=2, **given
    )
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (best, 3.0)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == kept
    stored = load_file(Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors")
    weights = trainer.model.state_dict()
    assert stored.keys() <= weights.keys()
    assert all(weights[name].equal(tensor) for name, tensor in stored.items())


def test_affinity_runs_may_save_every_500_steps():
    args = TASK.parse(["--save_strategy", "steps", "--save_steps", "500"]).args
    assert (args.load_best_model_at_end, str(args.eval_strategy.value), args.save_steps) == (True, "epoch", 500)

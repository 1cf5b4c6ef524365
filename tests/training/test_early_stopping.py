"""Early stopping in a run: what is decided and logged, that a resumed run decides the same, and what is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from resuming_runs import Case, Runs
from transformers import EarlyStoppingCallback
from watched_runs import LABELS, NOISE, Kill, Terminate, make_script, make_trainer, model_of

from hf_ext.errors import ArgumentError, TrainingStopped
from hf_ext.trainer import FastTrainer

# Improves, gets worse, wavers, and settles where it is not certainly worse than the best: patience 2 stops at step 7.
RUN = [model_of(e, i) for i, e in enumerate([1.5, 0.5, 1.0, 0.5])]
RUN += [model_of(0.5, 3) + 1e-4 * NOISE[10 + i] for i in range(4)]
WORSE = [model_of(0.3), *(model_of(1.0, i) for i in range(6))]
SAVING = {"save_strategy": "steps", "save_steps": 1}


def verdicts(trainer: FastTrainer) -> list[str]:
    return [decision["verdict"] for decision in trainer.stopping_decisions]


def evaluations(trainer: FastTrainer) -> list[dict[str, float]]:
    """What was logged of each evaluation, without times."""
    logs = [entry for entry in trainer.state.log_history if "eval_loss" in entry or "eval_a_loss" in entry]
    return [{k: v for k, v in entry.items() if not k.endswith(("_runtime", "_per_second"))} for entry in logs]


def test_a_run_whose_predictions_get_worse_stops_at_exactly_patience_evaluations_and_says_why(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_ext")
    trainer = make_trainer(tmp_path, make_script(*WORSE), early_stopping_patience=3)
    trainer.train()
    assert verdicts(trainer) == ["improved", "no improvement", "no improvement", "no improvement"]
    assert trainer.state.global_step == 4
    assert [d["should_stop"] for d in trainer.stopping_decisions] == [False, False, False, True]
    (reason,) = [record.message for record in caplog.records if "Training stops" in record.message]
    assert reason.startswith("Early stopping, step 4: spearman -0.")
    assert "3 evaluations in a row" in reason


def test_the_interval_against_the_best_is_logged_and_the_scores_compared_are_those_of_the_metric(tmp_path):
    trainer = make_trainer(tmp_path, make_script(*RUN), early_stopping_patience=5, max_steps=6)
    trainer.train()
    assert "eval_improvement" not in evaluations(trainer)[0]
    assert len(evaluations(trainer)) == len(trainer.stopping_decisions) == 6
    for log, decision in zip(evaluations(trainer)[1:], trainer.stopping_decisions[1:]):
        compared = decision["against_best"]
        assert log["eval_spearman"] == pytest.approx(compared["after"])
        names = ("improvement", "improvement_low", "improvement_high")
        assert [log[f"eval_{name}"] for name in names] == [compared[key] for key in ("improvement", "low", "high")]


def test_a_score_that_wavers_ends_a_run_with_stock_early_stopping_and_not_with_ours(tmp_path):
    wavering = [model_of(1.0, i) for i in range(10)]
    stock = make_trainer(tmp_path / "stock", make_script(*wavering), EarlyStoppingCallback(3), **SAVING)
    ours = make_trainer(tmp_path / "ours", make_script(*wavering), early_stopping_patience=3)
    stock.train()
    ours.train()
    assert stock.state.global_step < 10
    assert ours.state.global_step == 10
    assert "improved" not in verdicts(ours)[1:]


def test_stock_early_stopping_beside_ours_still_stops(tmp_path):
    trainer = make_trainer(tmp_path, make_script(*WORSE), EarlyStoppingCallback(2), early_stopping_patience=4)
    trainer.train()
    assert trainer.state.global_step == 3


def test_evaluations_within_the_warm_up_do_not_stop_a_run(tmp_path):
    trainer = make_trainer(tmp_path, make_script(*WORSE), early_stopping_patience=2, warmup_steps=4)
    trainer.train()
    assert [d["is_warmup"] for d in trainer.stopping_decisions[:6]] == [True] * 4 + [False] * 2
    assert [d["num_without_improvement"] for d in trainer.stopping_decisions] == [0] * 4 + [1, 2]


def test_of_a_subset_the_same_rows_are_compared_and_a_stop_ends_with_all_rows(tmp_path):
    trainer = make_trainer(tmp_path, make_script(*WORSE), early_stopping_patience=2, eval_subset=80)
    trainer.train()
    assert trainer.state.global_step == 3
    assert [d["against_best"]["n"] for d in trainer.stopping_decisions[1:]] == [80, 80]
    assert [log["step"] for log in evaluations(trainer)] == [1, 2, 3]
    assert any("eval_full_spearman" in log for log in trainer.state.log_history if log["step"] == 3)


def test_without_patience_nothing_is_decided_logged_or_saved(tmp_path):
    trainer = make_trainer(tmp_path, make_script(*WORSE), max_steps=3, **SAVING)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.stopping_decisions == []
    assert not any("improvement" in name for log in trainer.state.log_history for name in log)
    assert not list(tmp_path.rglob("early_stopping*"))


def test_what_evaluate_returns_stays_as_in_trainer(tmp_path):
    seen: list[set[str]] = []

    class Look(FastTrainer):  # which Trainer sums into the objective of a search
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            seen.append(set(metrics))
            return metrics

    make_trainer(tmp_path, make_script(*WORSE), kind=Look, early_stopping_patience=3, max_steps=2).train()
    assert len(seen) == 2
    assert not any("improvement" in name or "spread" in name for names in seen for name in names)


# --- resuming ------------------------------------------------------------------------------------------------------


class Forgetful(FastTrainer):
    """Resumes without what early stopping compares with: the broken twin."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        load = self._ext_parts.early_stopping.load
        self._ext_parts.early_stopping.load = lambda tree: load(tree and {**tree, "rule": None})


def resumed_at(folder: Path, step: int, **given: Any) -> FastTrainer:
    """A run that is killed after the checkpoint of `step`, and its continuation."""
    settings = {"early_stopping_patience": 2, "save_strategy": "steps", "save_steps": step}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(folder, make_script(*RUN), Kill(step), **settings).train()
    trainer = make_trainer(folder, make_script(*RUN), resume="auto", **{**settings, **given})
    trainer.train()
    return trainer


def test_a_killed_run_continues_to_the_same_decisions_and_the_check_notices_lost_state(tmp_path):
    whole = make_trainer(tmp_path / "whole", make_script(*RUN), early_stopping_patience=2)
    whole.train()
    assert set(verdicts(whole)) == {"improved", "undecided", "no improvement"}
    assert whole.state.global_step == 7
    for step in (3, 6):
        resumed = resumed_at(tmp_path / str(step), step)
        assert resumed.stopping_decisions == whole.stopping_decisions
        assert evaluations(resumed) == evaluations(whole)
    assert resumed_at(tmp_path / "lost", 6, kind=Forgetful).stopping_decisions != whole.stopping_decisions


@pytest.mark.nightly
def test_a_checkpoint_between_resuming_and_the_next_evaluation_keeps_the_state(tmp_path):
    sparse = {"early_stopping_patience": 3, "eval_steps": 4, "max_steps": 8, **SAVING}
    whole = make_trainer(tmp_path / "whole", make_script(*RUN), **sparse)
    whole.train()
    for step in (5, 6):
        with pytest.raises(KeyboardInterrupt):
            make_trainer(tmp_path / "run", make_script(*RUN), Kill(step), resume="auto", **sparse).train()
    resumed = make_trainer(tmp_path / "run", make_script(*RUN), resume="auto", **sparse)
    resumed.train()
    assert len(whole.stopping_decisions) == 2
    assert resumed.stopping_decisions == whole.stopping_decisions


@pytest.mark.nightly
def test_an_evaluation_that_is_given_up_in_its_second_set_is_not_counted_twice(tmp_path):
    sets = {"a": make_script(*RUN), "b": make_script(*RUN[::-1])}
    settings = {"early_stopping_patience": 2, "metric_for_best_model": "a_spearman", "save_strategy": "epoch"}
    whole = make_trainer(tmp_path / "whole", sets, **settings)
    whole.train()
    assert "eval_a_improvement" in evaluations(whole)[2]
    stopped = make_trainer(tmp_path / "run", sets, Terminate(12), **settings)
    with pytest.raises(TrainingStopped):
        stopped.train()
    assert [decision["step"] for decision in stopped.stopping_decisions] == [1, 2, 3, 4, 5]
    assert evaluations(stopped) == [log for log in evaluations(whole) if log["step"] < 6]
    resumed = make_trainer(tmp_path / "run", sets, resume="auto", **settings)
    resumed.train()
    assert [decision["step"] for decision in resumed.stopping_decisions][:6] == [1, 2, 3, 4, 5, 7]


def test_other_rows_after_resuming_are_said_and_counted_anew(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, make_script(*WORSE), Kill(3), early_stopping_patience=3, **settings).train()
    other = make_script(*(column[::-1] for column in WORSE), labels=LABELS[::-1])
    settings = {**settings, "resume": "auto", "allow_changed": ["all"]}
    resumed = make_trainer(tmp_path, other, early_stopping_patience=3, **settings)
    resumed.train()
    assert "Early stopping counts anew. Early-stopping state was made on other rows" in caplog.text
    counts = [d["num_without_improvement"] for d in resumed.stopping_decisions]
    assert counts[:4] == [0, 1, 2, 0]
    assert resumed.stopping_decisions[3]["against_best"] is None


def test_a_run_that_has_stopped_trains_on_only_with_another_patience(tmp_path):
    settings = {"early_stopping_patience": 2, "save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path, make_script(*WORSE), **settings).train()
    again = make_trainer(tmp_path, make_script(*WORSE), resume="auto", **settings)
    again.train()
    assert again.state.global_step == 3
    longer = make_trainer(tmp_path, make_script(*WORSE), resume="auto", **{**settings, "early_stopping_patience": 4})
    longer.train()
    assert longer.state.global_step == 5


def test_the_disk_bound_covers_the_state(tmp_path):
    trainer = make_trainer(tmp_path, make_script(*RUN), early_stopping_patience=3, max_steps=4, **SAVING)
    bounds = trainer.checkpoint_sizes()
    trainer.train()
    stored = json.loads((tmp_path / "checkpoint-4" / "progress.json").read_text())["early_stopping"]["rule"]
    trainer.args.early_stopping_patience = 7  # four evaluations more
    assert 0 < len(json.dumps(stored)) <= trainer.checkpoint_sizes().other - bounds.other + 1000


# --- other metrics, and what is refused ----------------------------------------------------------------------------


def test_masked_models_are_compared_by_the_loss_over_all_masked_residues(tmp_path, make_affinity, demo_rows):
    given = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "token_loss"}
    case = replace(Case("table"), given=tuple({**given, "early_stopping_patience": 2, "max_steps": 8}.items()))
    trainer = Runs(tmp_path, make_affinity, demo_rows).make(case)
    trainer.train()
    losses = [log["eval_token_loss"] for log in trainer.state.log_history if "eval_token_loss" in log]
    assert len(losses) == len(trainer.stopping_decisions) > 1
    for loss, decision in zip(losses[1:], trainer.stopping_decisions[1:]):
        assert decision["against_best"]["after"] == pytest.approx(loss)


def test_predictions_that_are_no_sums_per_row_are_refused(tmp_path):
    trainer = make_trainer(
        tmp_path,
        make_script(*RUN),
        metric_for_best_model="accuracy",
        early_stopping_patience=3,
        metrics=lambda prediction: {"accuracy": 0.5},
    )
    with pytest.raises(ArgumentError, match=r"number of right predictions.*shape \(200,\)"):
        trainer.train()


SETS = {"a": make_script(*RUN), "ab": make_script(*RUN)}


@pytest.mark.parametrize(
    ("given", "rows", "message"),
    [
        ({"metric_for_best_model": "loss", "greater_is_better": False}, None, "rmse orders models as a mean squared"),
        ({"metric_for_best_model": None}, None, "metric_for_best_model=None: models are compared row by row"),
        ({"metric_for_best_model": "recall"}, None, "'recall'.*EarlyStoppingCallback, which takes any metric"),
        (
            {"metric_for_best_model": "rmse", "greater_is_better": True},
            None,
            "the worst model would be kept.*--greater_is_better False",
        ),
        ({"greater_is_better": False}, None, "--greater_is_better True"),
        ({}, SETS, "whose name comes first, such as a_spearman"),
        ({"eval_strategy": "no"}, None, "needs an evaluation set and an --eval_strategy"),
        ({"metrics": None}, None, "needs predictions: compute_metrics"),
        ({"prediction_loss_only": True}, None, "needs predictions"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_training_with_the_remedy(tmp_path, given, rows, message):
    make = partial(make_trainer, tmp_path, rows or make_script(*RUN))
    make(**given)
    with pytest.raises(ArgumentError, match=message):
        make(early_stopping_patience=3, **given)


def test_of_several_sets_the_longest_matching_name_is_watched(tmp_path):
    trainer = make_trainer(
        tmp_path, SETS, early_stopping_patience=3, metric_for_best_model="eval_ab_spearman", max_steps=2
    )
    trainer.train()
    assert len(trainer.stopping_decisions) == 2
    assert "eval_ab_improvement" in trainer.state.log_history[-2]
    assert not any("eval_a_improvement" in log for log in trainer.state.log_history)

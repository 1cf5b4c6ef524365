"""Early stopping, alarms of collapse, metrics of binders and groups: what evaluations decide, log and refuse."""

import logging
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from resuming_runs import Case, Runs
from transformers import EarlyStoppingCallback, TrainerCallback
from watched_runs import LABELS, NOISE, NUM_ROWS, Kill, make_script, make_trainer, model_of

from hf_ext.errors import ArgumentError, CheckpointError, DataError
from hf_ext.evaluation import RowMetrics, choose_rows, score_predictions
from hf_ext.labels import make_kind
from hf_ext.trainer import FastTrainer

# Improves, gets worse, wavers, and settles where it is not certainly worse than the best: patience 2 stops at step 7.
RUN = [model_of(e, i) for i, e in enumerate([1.5, 0.5, 1.0, 0.5])]
RUN += [model_of(0.5, 3) + 1e-4 * NOISE[10 + i] for i in range(4)]
WORSE = [model_of(0.3), *(model_of(1.0, i) for i in range(6))]
SAVING = {"save_strategy": "steps", "save_steps": 1}


def verdicts(trainer) -> list[str]:
    return [decision["verdict"] for decision in trainer.stopping_decisions]


def evaluations(trainer) -> list[dict[str, float]]:
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


class Forgetful(FastTrainer):
    """Resumes without what early stopping compares with: the broken twin."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        load = self._ext_parts.early_stopping.load
        self._ext_parts.early_stopping.load = lambda tree: load(tree and {**tree, "rule": None})


def resumed_at(folder, step, **given) -> FastTrainer:
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


def test_a_run_that_has_stopped_trains_on_only_with_another_patience(tmp_path):
    settings = {"early_stopping_patience": 2, "save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path, make_script(*WORSE), **settings).train()
    again = make_trainer(tmp_path, make_script(*WORSE), resume="auto", **settings)
    again.train()
    assert again.state.global_step == 3
    longer = make_trainer(tmp_path, make_script(*WORSE), resume="auto", **{**settings, "early_stopping_patience": 4})
    longer.train()
    assert longer.state.global_step == 5


def test_masked_models_are_compared_by_the_loss_over_all_masked_residues(tmp_path, make_affinity, demo_rows):
    given = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "token_loss"}
    case = replace(Case("table"), given=tuple({**given, "early_stopping_patience": 2, "max_steps": 8}.items()))
    trainer = Runs(tmp_path, make_affinity, demo_rows).make(case)
    trainer.train()
    losses = [log["eval_token_loss"] for log in trainer.state.log_history if "eval_token_loss" in log]
    assert len(losses) == len(trainer.stopping_decisions) > 1
    for loss, decision in zip(losses[1:], trainer.stopping_decisions[1:]):
        assert decision["against_best"]["after"] == pytest.approx(loss)


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


GOOD = model_of(0.3)
FLAT = 8 + (GOOD - 8) / 50  # in order, but close to a constant
ROUNDED = torch.tensor(GOOD).bfloat16().double().numpy()


def train(folder, *predictions, **given) -> FastTrainer:
    trainer = make_trainer(folder, make_script(*predictions), **{"max_steps": len(predictions), **given})
    trainer.train()
    return trainer


def said(trainer) -> list[tuple[int, str]]:
    """Step and first words of every alarm."""
    entries = [(entry["step"], alarm) for entry in trainer.collapse_alarms for alarm in entry["alarms"]]
    return [(step, " ".join(alarm.split()[:4])) for step, alarm in entries]


def test_predictions_that_learn_raise_no_alarm_and_their_spread_is_logged(tmp_path, caplog):
    trainer = train(tmp_path, GOOD, GOOD)
    assert trainer.collapse_alarms == []
    assert "ALARM" not in caplog.text
    log = next(log for log in trainer.state.log_history if "eval_spread_ratio" in log)
    assert log["eval_spread_ratio"] == pytest.approx(np.std(GOOD) / np.std(LABELS))
    assert log["eval_num_distinct"] == NUM_ROWS


def test_an_alarm_is_said_once_until_it_goes_away(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_ext")
    trainer = train(tmp_path, GOOD, FLAT, FLAT * 1.001, GOOD, FLAT, FLAT)
    assert said(trainer) == [(2, "The predictions spread 0.020"), (5, "The predictions spread 0.020")]
    assert [record.levelname for record in caplog.records if "ALARM" in record.message] == ["WARNING"] * 2


def test_predictions_rounded_to_bfloat16_are_detected_at_the_first_evaluation(tmp_path):
    assert said(train(tmp_path, ROUNDED, GOOD, max_steps=10)) == [(1, "Every prediction is a")]


def test_a_fresh_head_may_be_constant_in_warm_up_and_not_after_it(tmp_path):
    early = train(tmp_path / "early", *[FLAT] * 3, *[GOOD] * 7, warmup_steps=3, lr_scheduler_type="constant")
    assert said(early) == []
    late = train(tmp_path / "late", *[FLAT] * 4, *[GOOD] * 6, warmup_steps=3)
    assert said(late) == [(4, "The predictions spread 0.020")]


CONSTANT = np.full(NUM_ROWS, 8.0)


def test_classes_are_no_regression(tmp_path):
    labels = (LABELS > 8).astype(float)
    trainer = make_trainer(tmp_path, make_script(CONSTANT, labels=labels), metrics=lambda p: {"spearman": 0.0})
    trainer.train()
    assert trainer.collapse_alarms == []
    assert not any("eval_spread_ratio" in log for log in trainer.state.log_history)


def test_a_resumed_run_neither_repeats_nor_forgets_an_alarm(tmp_path):
    script = make_script(GOOD, FLAT, FLAT, FLAT, ROUNDED)
    whole = make_trainer(tmp_path / "whole", script, max_steps=6)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "run", script, Kill(3), max_steps=6, **SAVING).train()
    resumed = make_trainer(tmp_path / "run", script, resume="auto", max_steps=6)
    resumed.train()
    assert [step for step, _ in said(whole)] == [2, 5]
    assert resumed.collapse_alarms == whole.collapse_alarms


def test_classes_stop_in_their_log_loss_and_their_collapse_is_alarming(tmp_path):
    kind = make_kind("classification", ("y",), ("low", "high"))
    labels = (LABELS > 8).astype(np.int64)
    good, flat = (np.stack([np.zeros(NUM_ROWS), size * (LABELS - 8)], axis=1) for size in (2.0, 0.01))
    given = {"metrics": RowMetrics(kind=kind), "metric_for_best_model": "log_loss", "early_stopping_patience": 2}
    trainer = make_trainer(tmp_path, make_script(good, *[flat] * 9, labels=labels), **given)
    trainer.train()
    assert verdicts(trainer) == ["improved", "no improvement", "no improvement"]
    assert trainer.stopping_decisions[1]["against_best"]["before"] == evaluations(trainer)[0]["eval_log_loss"]
    assert [(one["step"], one["alarms"][0][:26]) for one in trainer.collapse_alarms] == [
        (2, "The probabilities spread 0")
    ]
    with pytest.raises(ArgumentError, match="compared row by row, in log_loss, accuracy"):
        make_trainer(tmp_path / "mcc", make_script(good, labels=labels), **given | {"metric_for_best_model": "mcc"})


METRICS = RowMetrics(9.0)
KEEPING_BEST = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}


def make(folder, *predictions, **given) -> FastTrainer:
    """A run whose evaluations_of_rows, in batches of 64, make these predictions after 1, 2, 3, ... steps."""
    rows = make_script(*predictions)
    given = {"metrics": METRICS, "per_device_eval_batch_size": 64, "max_steps": len(predictions), **given}
    return make_trainer(folder, rows, **given)


def evaluations_of_rows(trainer) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "eval_loss" in log]


def says(log, prefix, predicted, rows=slice(None)) -> bool:
    """Whether an evaluation logged what the final scores say of these rows."""
    scores = score_predictions(predicted[rows], LABELS[rows], num_resamples=0)
    return {name: log[f"{prefix}{name}"] for name in scores} == pytest.approx(
        {name: score["value"] for name, score in scores.items()}, abs=1e-5
    )


def test_evaluations_of_all_rows_of_a_subset_and_after_training_say_what_the_final_scores_do(tmp_path):
    models = [model_of(1.0), model_of(0.5), model_of(0.7)]
    part = make(tmp_path / "part", *models, eval_subset=120)
    part.train()
    rows = choose_rows(part.eval_dataset, size=120).rows
    assert len(rows) == 120
    logs = evaluations_of_rows(part)
    assert [says(log, "eval_", model, rows) for log, model in zip(logs, models, strict=True)] == [True] * 3
    assert says(logs[-1], "eval_full_", models[-1])
    assert not says(logs[-1], "eval_", models[-1])  # the broken twin
    assert says(part.evaluate(), "eval_", models[-1])
    assert says(part.evaluate(make_script(*models).select(range(150))), "eval_", models[-1], slice(150))


# Recall is highest at step 1, precision at 3 and undefined at 2, the order of all rows best at 4.
HIGH, NOTHING = model_of(1.0) + 2.0, np.minimum(model_of(1.5), 8.9)
CAREFUL, ORDERED = np.where(LABELS > 10, 9.5, model_of(1.5, 3).clip(max=8.9)), model_of(0.3) - 0.1
MODELS = [HIGH, NOTHING, CAREFUL, ORDERED]


def best_step(folder, metric, **given) -> int | None:
    trainer = make(folder, *MODELS, metric_for_best_model=metric, **KEEPING_BEST, **given)
    assert trainer.args.greater_is_better
    trainer.train()
    return trainer.state.best_global_step


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("metric", "step", "num_rows"), [("recall", 1, 150), ("precision", 3, 150), ("average_precision", 4, None)]
)
def test_each_metric_chooses_its_own_best_model_on_all_rows_and_beside_a_subset(tmp_path, metric, step, num_rows):
    assert best_step(tmp_path, metric, eval_subset=num_rows) == step


def test_a_metric_without_a_value_never_makes_a_model_the_best_and_that_is_said(tmp_path, caplog):
    trainer = make(tmp_path, NOTHING, NOTHING, CAREFUL, metric_for_best_model="precision", **KEEPING_BEST)
    trainer.train()
    assert [math.isnan(log["eval_precision"]) for log in evaluations_of_rows(trainer)] == [True, True, False]
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (3, 1.0)
    said = [record.message for record in caplog.records if "never the best" in record.message]
    assert said == [f"eval_precision is nan at step {step}: never the best." for step in (1, 2)]


def test_a_run_goes_on_with_the_threshold_that_chose_its_best_model_or_chooses_anew(tmp_path):
    given = {"metric_for_best_model": "recall", "resume": "auto", **KEEPING_BEST}
    make(tmp_path, *MODELS, **{**given, "max_steps": 2}).train()
    more = {**given, "max_steps": 4, "allow_changed": ["max_steps"]}
    with pytest.raises(CheckpointError, match="metric_for_best_model: recall at 9 in the checkpoint, recall at 8 now"):
        make(tmp_path, *MODELS, metrics=RowMetrics(8.0), **more).train()
    more["allow_changed"] = ["max_steps", "metric_for_best_model"]
    other = make(tmp_path, *MODELS, metrics=RowMetrics(8.0), **more)
    other.train()
    values = {log["step"]: log["eval_recall"] for log in evaluations_of_rows(other)}
    assert values[1] > values[3] < values[4]  # at 9 and at 8: step 1 would have stayed the best
    assert other.state.best_global_step == 4


def test_a_finished_run_keeps_its_best_model_though_another_metric_is_allowed(tmp_path):
    given = {"metric_for_best_model": "recall", "resume": "auto", "max_steps": 4, **KEEPING_BEST}
    first = make(tmp_path, *MODELS, **given)
    first.train()
    more = {**given, "allow_changed": ["metric_for_best_model"]}
    again = make(tmp_path, *MODELS, metrics=RowMetrics(8.0), **more)
    again.train()
    assert again.state.best_global_step == first.state.best_global_step < 4
    assert (tmp_path / f"checkpoint-{first.state.best_global_step}").is_dir()


WORSENING = [model_of(0.2), *(model_of(1.5, i) - 1.0 for i in range(1, 6))]


@pytest.mark.parametrize("metric", ["recall", "average_precision"])
def test_a_run_that_gets_worse_in_a_metric_stops_by_it_at_its_threshold(tmp_path, metric):
    trainer = make(tmp_path, *WORSENING, metric_for_best_model=metric, early_stopping_patience=2)
    trainer.train()
    assert trainer.state.global_step == 3
    for log, decision in zip(evaluations_of_rows(trainer)[1:], trainer.stopping_decisions[1:], strict=True):
        assert decision["against_best"]["after"] == pytest.approx(log[f"eval_{metric}"], abs=1e-6)
        assert log["eval_improvement_high"] < 0


class CountSteps(TrainerCallback):
    """Of a run in which there may be none."""

    num_steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.num_steps += 1


def test_what_no_prediction_could_give_a_value_is_refused_before_the_first_step(tmp_path):
    given = {"metrics": RowMetrics(99.0), "metric_for_best_model": "recall"}
    trainer, steps = make(tmp_path, *WORSENING, **given), CountSteps()
    trainer.add_callback(steps)
    with pytest.raises(DataError, match=r"recall'.*threshold 99. Take another metric"):
        trainer.train()
    assert steps.num_steps == 0

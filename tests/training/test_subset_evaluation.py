"""Evaluations while training look at few rows, the same ones; what is decided is decided on all."""

import json

import pytest
from datasets import IterableDataset
from inside import compute_metrics
from small_evaluations import Scripted, count, evaluated_epochs, evaluations, make_rows, make_trainer
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from hf_ext.errors import ArgumentError
from hf_ext.evaluation import RowMetrics
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

STEPS = {"eval_strategy": "steps", "eval_steps": 1}  # four a run
BEST = {"metric_for_best_model": "score", "greater_is_better": True}


class SeenRows(TrainerCallback):
    """The rows of each evaluation, as its batches were collated."""

    def __init__(self):
        self.passes, self.before, self.trainer = [], 0, None

    def on_step_end(self, args, state, control, **kwargs):
        self.before = len(self.trainer.data_collator.rows)

    def on_evaluate(self, args, state, control, **kwargs):
        batches = self.trainer.data_collator.rows[self.before :]
        self.passes.append([row for batch in batches for row in batch if row < 1000])


def train_seeing_rows(tmp_path, **given):
    """Trains on rows numbered from 1000; returns the trainer and the rows of each evaluation."""
    seen = SeenRows()
    trainer = make_trainer(tmp_path, make_rows(37), callbacks=[seen], compute_metrics=count, **given)
    seen.trainer = trainer
    trainer.train_dataset = trainer.train_dataset.map(lambda row: {"row": row["row"] + 1000})
    trainer.train()
    return trainer, seen.passes


def is_subset_then_all(passes: list[list[int]], size: int, num_rows: int) -> bool:
    """The same rows in all evaluations; in the last, each row follows in its order."""
    *cheap, last = passes
    same = all(rows == cheap[0] for rows in cheap) and len(set(cheap[0])) == len(cheap[0]) == size
    return same and last[:size] == cheap[0] and last[size:] == list(range(num_rows))


def rows_of_last_subset(trainer, size: int, num_rows: int) -> list[int]:
    """What a run that has just ended looked at before all rows."""
    seen = [row for batch in trainer.data_collator.rows for row in batch][-size - num_rows :]
    assert seen[size:] == list(range(num_rows))
    return seen[:size]


def test_every_evaluation_looks_at_the_same_rows_and_the_last_at_all_after_them(tmp_path):
    trainer, passes = train_seeing_rows(tmp_path, **STEPS, eval_subset=5)
    assert len(passes) == 4
    assert is_subset_then_all(passes, 5, 37)
    assert not is_subset_then_all([*passes[:-1], [*passes[-1], 0]], 5, 37)
    assert not is_subset_then_all([passes[1], sorted(passes[0])[::-1], passes[-1]], 5, 37)
    assert [log["eval_rows"] for log in evaluations(trainer)] == [5.0] * 4
    assert [log.get("eval_full_rows") for log in evaluations(trainer)] == [None, None, None, 37.0]


def test_a_share_is_taken_of_each_set(tmp_path):
    evals = {"near": make_rows(40), "far": make_rows(20, seed=2)}
    trainer = make_trainer(tmp_path, evals, compute_metrics=count, **STEPS, eval_subset=0.1)
    trainer.train()
    logs = evaluations(trainer)
    assert [log["eval_near_rows"] for log in logs if "eval_near_rows" in log] == [4.0] * 4
    assert [log["eval_far_rows"] for log in logs if "eval_far_rows" in log] == [2.0] * 4
    assert logs[-2]["eval_full_near_rows"] == 40.0
    assert logs[-1]["eval_full_far_rows"] == 20.0


def test_groups_keep_their_shares(tmp_path):
    trainer = make_trainer(tmp_path, make_rows(60), eval_subset=6, compute_metrics=RowMetrics(group_column="group"))
    trainer.train()
    assert sorted(row % 3 for row in rows_of_last_subset(trainer, 6, 60)) == [0, 0, 1, 1, 2, 2]


def test_every_fifth_evaluation_is_of_all_rows(tmp_path):
    trainer = make_trainer(tmp_path, make_rows(37), **STEPS, eval_subset=5, num_train_epochs=3)
    trainer.train()
    assert [log["step"] for log in evaluations(trainer, full=True)] == [5, 10, 12]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_number_of_rows_is_exact_where_workers_live_on_in_stock_trainer_which_gets_it_wrong(tmp_path, workers):
    given = {"dataloader_num_workers": workers, "dataloader_persistent_workers": workers > 0}
    trainer = make_trainer(tmp_path, make_rows(37), compute_metrics=count, **STEPS, eval_subset=5, **given)
    trainer.train()
    assert [log["eval_rows"] for log in evaluations(trainer)] == [5.0] * 4
    assert evaluations(trainer)[-1]["eval_full_rows"] == 37.0
    others = make_rows(11, seed=5)
    assert [trainer.evaluate(rows)["eval_rows"] for rows in (None, others, None)] == [37.0, 11.0, 37.0]
    trainer.eval_dataset = others
    assert trainer.evaluate()["eval_rows"] == 11.0
    stock = make_trainer(
        tmp_path, make_rows(37), compute_metrics=count, trainer_cls=Trainer, args_cls=TrainingArguments, **given
    )
    wrong = [stock.evaluate(rows)["eval_rows"] for rows in (None, others)]
    trainer.end()
    for loader in stock.accelerator._dataloaders:  # torch waits 5 s for workers left to garbage collection
        loader.base_dataloader._iterator = None
    assert wrong == ([37.0, 37.0] if workers else [37.0, 11.0])  # once it is 11 with workers, drop our line


def agree(ours: dict[str, float], reference: dict[str, float], prefix: str = "eval_full_") -> bool:
    """Whether the metrics of a reference evaluation stand among ours under another prefix."""
    keys = [
        key for key in reference if key.startswith("eval_") and key.split("_")[1] in ("loss", "rows", "error", "order")
    ]
    return len(keys) == 4 and all(
        ours[prefix + key.removeprefix("eval_")] == pytest.approx(reference[key], rel=1e-6) for key in keys
    )


@pytest.mark.parametrize("task", ["regression", "masked"])
def test_what_is_logged_are_the_metrics_of_the_subset_and_of_all_rows(tmp_path, task):
    rows = make_rows(37, task)
    trainer = make_trainer(tmp_path, rows, task, compute_metrics=count, eval_subset=5)
    trainer.train()
    chosen = rows_of_last_subset(trainer, 5, 37)
    (log,) = evaluations(trainer)
    whole = trainer.evaluate()  # the same weights
    assert agree(log, whole)
    assert not agree(log, trainer.evaluate(rows.select(range(36, -1, -1))))  # the order of the rows counts
    assert agree(log, trainer.evaluate(rows.select(chosen)), "eval_")


@pytest.mark.parametrize("task", ["regression", "masked"])
def test_metrics_do_not_depend_on_the_eval_batch_size_and_stock_trainers_loss_does(tmp_path, task):
    def evaluate(batch, **given):
        trainer = make_trainer(
            tmp_path, make_rows(37, task), task, compute_metrics=count, per_device_eval_batch_size=batch, **given
        )
        return trainer.evaluate()

    whole = evaluate(37)
    for batch in (1, 4):
        assert agree(evaluate(batch), whole, "eval_")
    if task == "masked":  # the mean of batch means, where rows have 1 to 20 masked tokens
        stock = {"trainer_cls": Trainer, "args_cls": TrainingArguments}
        assert abs(evaluate(4, **stock)["eval_loss"] - whole["eval_loss"]) > 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", ["mse", "tobit"])
def test_cached_embeddings_are_looked_at_in_two_parts_from_one_table(tmp_path, make_affinity, demo_rows, loss):
    def build(batch, **given):
        model, collator = make_affinity(loss=loss)
        fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_steps": 2}
        args = FastTrainingArguments(
            output_dir=str(tmp_path),
            per_device_eval_batch_size=batch,
            speedups=["embedding_cache"],
            embedding_cache_dir=str(tmp_path / "cache"),
            **{**fixed, **given},
        )
        rows = demo_rows.select(range(16)), demo_rows.select(range(16, 53))
        return FastTrainer(model, args, collator, *rows, compute_metrics=compute_metrics)

    trainer = build(4, eval_strategy="steps", eval_steps=2, eval_subset=5)
    trainer.train()
    (log,) = evaluations(trainer)
    whole = trainer.evaluate()
    for name in ("loss", "spearman", "rmse"):
        assert log[f"eval_full_{name}"] == pytest.approx(whole[f"eval_{name}"], rel=1e-6)
    assert log["eval_rmse"] != pytest.approx(log["eval_full_rmse"], rel=1e-3)
    losses = [build(batch).evaluate()["eval_loss"] for batch in (1, 4, 37)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_only_a_full_evaluation_makes_a_new_best(tmp_path):
    #           promising, refuted; promising, and better; the subset is below its best: not looked at; the last
    scores = Scripted(of_5=[0.5, 0.6, 0.55, 0.58], of_37=[0.50, 0.40, 0.52, 0.3])
    trainer = make_trainer(tmp_path, make_rows(37), compute_metrics=scores, **STEPS, **BEST, eval_subset=5)
    trainer.train()
    assert [log.get("eval_full_score") for log in evaluations(trainer)] == [0.5, 0.4, 0.52, 0.3]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.52, None)
    # 0.55 beat the 0.5 of the best model's subset, not the 0.6 of one that was refuted


def test_the_set_that_decides_is_the_one_that_is_confirmed(tmp_path):
    evals = {"a": make_rows(37), "b": make_rows(41, seed=2)}
    scores = Scripted(of_5=[0.1, 0.5, 0.9, 0.4, 0.9, 0.3, 0.1, 0.1], of_37=[0.0], of_41=[0.7, 0.6])
    given = {"metric_for_best_model": "b_score", "greater_is_better": True, "eval_subset": 5}
    trainer = make_trainer(tmp_path, evals, compute_metrics=scores, **STEPS, **given)
    trainer.train()
    assert scores.num_rows == [5, 5, 41, 5, 5, 5, 5, 5, 37, 5, 41]
    assert trainer.state.best_metric == 0.7


def test_a_save_of_the_best_waits_for_all_rows(tmp_path):
    scores = Scripted(of_5=[0.5, 0.6, 0.2, 0.1], of_37=[0.5, 0.4, 0.1])
    given = {"save_strategy": "best", "eval_subset": 5}
    trainer = make_trainer(tmp_path, make_rows(37), compute_metrics=scores, **STEPS, **BEST, **given)
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_run_that_a_callback_ends_ends_in_a_full_evaluation(tmp_path):
    class StopAt(TrainerCallback):
        def __init__(self, event, step):
            self.event, self.step = event, step

        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop |= self.event == "evaluate" and state.global_step == self.step

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= self.event == "step" and state.global_step == self.step

    for event in ("evaluate", "step"):
        trainer = make_trainer(
            tmp_path / event,
            make_rows(37),
            compute_metrics=count,
            callbacks=[StopAt(event, 3)],
            eval_strategy="steps",
            eval_steps=3 if event == "evaluate" else 2,
            eval_subset=5,
        )
        trainer.train()
        assert trainer.state.global_step == 3
        (last,) = evaluations(trainer, full=True)
        assert (last["step"], last["eval_full_rows"]) == (3, 37.0)
        assert agree(last, trainer.evaluate())


@pytest.mark.parametrize("ended_by", ["steps", "callback"])
def test_a_hyperparameter_search_gets_the_metrics_of_all_rows_or_the_best_so_far(tmp_path, monkeypatch, ended_by):
    class StopAt3(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == 3

    #       of all rows because the first is a best; of the subset; of all rows again because it is the last
    scores = Scripted(of_5=[0.5, 0.4, 0.3], of_37=[0.1, 0.05])
    given = {**STEPS, **BEST, "compute_metrics": scores, "eval_subset": 5}
    given |= {"callbacks": [StopAt3()]} if ended_by == "callback" else {"max_steps": 3}
    trainer, seen = make_trainer(tmp_path, make_rows(37), **given), []
    monkeypatch.setattr(Trainer, "_report_to_hp_search", lambda self, trial, step, metrics: seen.append(metrics))
    trainer.train()
    assert [metrics["eval_score"] for metrics in seen] == [0.1, 0.1, 0.05]
    assert not any("full" in key for metrics in seen for key in metrics)


@pytest.mark.parametrize(("every", "epochs"), [(1, [1.0, 2.0, 3.0]), (2, [2.0, 3.0]), (3, [3.0]), (9, [3.0])])
def test_epochs_between_are_passed_over_but_never_the_last(tmp_path, every, epochs):
    trainer = make_trainer(tmp_path, make_rows(7), eval_every_epochs=every, num_train_epochs=3)
    trainer.train()
    assert evaluated_epochs(trainer) == epochs


def make_stream(rows) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(list(rows)))


def test_a_stream_is_looked_at_like_the_rows_it_gives(tmp_path):
    rows = make_rows(37)
    logs = []
    for name, evals in (("rows", rows), ("stream", make_stream(rows))):
        trainer = make_trainer(tmp_path / name, evals, compute_metrics=count, **STEPS, eval_subset=5)
        trainer.train()
        logs.append(evaluations(trainer))
    keys = ("eval_rows", "eval_order", "eval_full_rows", "eval_full_order", "step")
    assert [[log.get(key) for key in keys] for log in logs[0]] == [[log.get(key) for key in keys] for log in logs[1]]
    assert logs[1][-1]["eval_full_loss"] == pytest.approx(logs[0][-1]["eval_full_loss"], rel=1e-6)


class Crash(TrainerCallback):
    """Ends the run without a word at a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.nightly
def test_a_resumed_run_remembers_what_a_new_best_must_beat_and_what_was_counted(tmp_path):
    given = {**STEPS, **BEST, "eval_subset": 5, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    script = {"of_5": [0.5, 0.4, 0.3, 0.45, 0.6, 0.1, 0.2, 0.3], "of_37": [0.5, 0.7, 0.2]}

    def run(folder, callbacks=(), resume=None, used=(0, 0)):
        scores = Scripted(of_5=script["of_5"][used[0] :], of_37=script["of_37"][used[1] :])
        trainer = make_trainer(folder, make_rows(37), compute_metrics=scores, callbacks=list(callbacks), **given)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except KeyboardInterrupt:
            return None
        return trainer

    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", [Crash(4)])
    resumed = run(tmp_path / "cut", resume="auto", used=(2, 1))
    shown = [
        [(log["step"], log.get("eval_full_score")) for log in evaluations(trainer)] for trainer in (whole, resumed)
    ]
    assert shown[0] == [(1, 0.5), (2, None), (3, None), (4, None), (5, 0.7), (6, None), (7, None), (8, 0.2)]
    assert shown[1] == shown[0]
    stored = json.loads((tmp_path / "cut" / "checkpoint-2" / "progress.json").read_text())
    assert stored["evaluations"]["best"] == 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_subset": 5, "eval_strategy": "no"}, "eval_subset=5: does nothing without an evaluation set"),
        ({"eval_every_epochs": 2, **STEPS}, "eval_every_epochs=2: does nothing without --eval_strategy epoch"),
        ({"eval_subset": 5, "dataloader_drop_last": True}, "dataloader_drop_last=True"),
    ],
)
def test_what_would_do_nothing_or_wrong_is_refused(tmp_path, given, message):
    with pytest.raises(ArgumentError, match=message):
        make_trainer(tmp_path, make_rows(9), **given)


def test_stopping_that_would_compare_other_rows_is_refused_before_the_first_step(tmp_path):
    given = {"load_best_model_at_end": True, "save_strategy": "epoch", "metric_for_best_model": "loss"}
    trainer = make_trainer(tmp_path, make_rows(9), callbacks=[EarlyStoppingCallback(1)], eval_subset=5, **given)
    with pytest.raises(ArgumentError, match="--early_stopping_patience"):
        trainer.train()
    assert trainer.state.global_step == 0

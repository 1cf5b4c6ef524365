"""The bar shows what a person watches, notebooks take our metrics, and what is logged fits TensorBoard."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from watched_runs import Kill, make_script, make_trainer, model_of

from hf_ext.reporting.progress import LiveProgress, describe_metrics, describe_training

ROWS = make_script(*(model_of(error, i) for i, error in enumerate((1.5, 1.0, 0.5, 0.3))))


def test_the_bar_replaces_that_of_trainer_in_its_place(tmp_path):
    (bar,) = [c for c in make_trainer(tmp_path, ROWS, disable_tqdm=False).callback_handler.callbacks if is_bar(c)]
    assert type(bar) is LiveProgress


def is_bar(callback: Any) -> bool:
    return isinstance(callback, ProgressCallback | PrinterCallback)


def test_without_tqdm_the_logs_are_printed_as_in_trainer(tmp_path, capsys):
    trainer = make_trainer(tmp_path, ROWS, max_steps=2, disable_tqdm=True)
    assert [type(c) for c in trainer.callback_handler.callbacks if is_bar(c)] == [PrinterCallback]
    trainer.train()
    printed, bar = capsys.readouterr()
    assert "'loss': " in printed
    assert "| 2/2 [" not in bar


def test_the_bar_shows_loss_rate_and_best_and_a_line_each_evaluation(tmp_path, capsys):
    trainer = make_trainer(tmp_path, ROWS, max_steps=4, disable_tqdm=False, early_stopping_patience=3)
    trainer.train()
    lines, bar = capsys.readouterr()
    last = bar.replace("\r", "\n").rstrip().splitlines()[-1]
    assert "4/4 [" in last
    assert ", loss -3, lr 1, best spearman 0." in last
    evaluations = [line for line in lines.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in evaluations] == ["step 1", "step 2", "step 3", "step 4"]
    assert "spearman 0." in evaluations[3]
    assert "improvement_low 0." in evaluations[3]
    assert "{" not in lines
    assert "per_second" not in lines


@pytest.mark.parametrize("is_broken", [False, True])
def test_messages_stand_on_lines_of_their_own_above_the_bars(tmp_path, monkeypatch, is_broken):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler, logger = logging.StreamHandler(terminal), logging.getLogger("hf_ext")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    if is_broken:
        monkeypatch.setattr("hf_ext.reporting.progress.logging_redirect_tqdm", lambda _: contextlib.nullcontext())
    trainer = make_trainer(tmp_path, ROWS, max_steps=2, disable_tqdm=False, early_stopping_patience=3)
    trainer.train()
    assert logger.handlers == [handler]
    text = terminal.getvalue()
    assert text.count("Early stopping, step") == 2
    on_clear_lines = re.findall(r"[\r\n](?:\x1b\[A)*Early stopping, step", text)  # the cursor may go up, past a bar
    assert len(on_clear_lines) == (0 if is_broken else 2)


def test_the_pass_over_all_rows_gets_a_bar_of_its_own(tmp_path, capsys):
    settings = {"disable_tqdm": False, "per_device_eval_batch_size": 20, "max_steps": 1}
    make_trainer(tmp_path, ROWS, eval_subset=80, **settings).train()
    bars = capsys.readouterr().err.replace("\r", "\n")
    assert "0/4 [" in bars  # 80 rows
    assert "0/10 [" in bars  # all 200
    assert "5/4" not in bars


def test_no_bar_is_left_open_where_rows_are_looked_at_after_an_evaluation_that_ends_the_run(tmp_path):
    class StopHere(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    trainer = make_trainer(tmp_path, ROWS, StopHere(), eval_subset=80, disable_tqdm=False)
    trainer.train()
    (bar,) = [c for c in trainer.callback_handler.callbacks if is_bar(c)]
    assert trainer.state.global_step == 1
    assert bar.prediction_bar is None


def test_a_resumed_bar_begins_where_the_run_is(tmp_path, capsys):
    settings = {"disable_tqdm": False, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, ROWS, Kill(3), **settings).train()
    capsys.readouterr()
    make_trainer(tmp_path, ROWS, resume="auto", **settings).train()
    bars = capsys.readouterr().err.replace("\r", "\n")
    assert "| 3/10 [00:00" in bars
    assert "| 0/10 [" not in bars


def test_what_stands_behind_the_bar_in_words() -> None:
    numbers = {"loss": 0.31234, "learning_rate": 2.5e-4, "residues_per_s": 15_432.1, "hours_left": 1.25}
    state, args = SimpleNamespace(best_metric=0.4821), SimpleNamespace(metric_for_best_model="eval_spearman")
    text = describe_training(numbers, args, state)
    assert text == "loss 0.3123, lr 0.00025, 15.43k residues/s, best spearman 0.4821, 1.2 h left"
    assert describe_training({"tokens_per_s": 812.4, "hours_left": 0.5}, args, state).startswith("812 tokens/s")
    assert describe_training({"hours_left": 0.5}, args, SimpleNamespace(best_metric=float("-inf"))) == "30 min left"
    assert describe_training({"hours_left": 0.005}, args, SimpleNamespace(best_metric=None)) == "18 s left"
    assert describe_training({}, args, SimpleNamespace(best_metric=None)) == ""


def test_a_metric_without_a_value_reads_undefined() -> None:
    metrics = {"eval_loss": 0.5, "eval_spearman": float("nan"), "eval_runtime": 2.0, "eval_a_samples_per_second": 3.0}
    assert describe_metrics(metrics) == "loss 0.5, spearman undefined"


@pytest.mark.parametrize("eval_subset", [None, 100])
def test_the_table_of_notebooks_takes_every_metric_of_a_run(tmp_path, monkeypatch, eval_subset):
    """As transformers shows it in Jupyter and Colab; what it displays needs IPython, which tests do without."""
    shown: list[str] = []
    notebook = load_notebook(monkeypatch, shown)
    settings = {"early_stopping_patience": 3, "eval_subset": eval_subset}
    sets = {"a": ROWS, "b": ROWS}
    trainer = make_trainer(tmp_path, sets, metric_for_best_model="a_spearman", max_steps=4, **settings)
    trainer.add_callback(notebook.NotebookProgressCallback())
    trainer.train()
    assert "Validation Loss" in shown[-1]
    assert "A Spearman" in shown[-1]


def load_notebook(monkeypatch, shown: list[str]) -> Any:
    """`transformers.utils.notebook`, whose HTML goes into `shown`."""
    display = ModuleType("IPython.display")
    output = SimpleNamespace(update=lambda html: shown.append(html))
    display.HTML = lambda html: html  # type: ignore[attr-defined]
    display.display = lambda html, **_: shown.append(html) or output  # type: ignore[attr-defined]
    package = ModuleType("IPython")
    package.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)
    import transformers.utils.notebook as notebook

    monkeypatch.delitem(sys.modules, "transformers.utils.notebook")
    return notebook


def test_every_logged_value_is_a_number_that_tensorboard_takes(tmp_path):
    constant = make_script(np.full(200, 8.0), *(model_of(0.5, i) for i in range(3)))
    trainer = make_trainer(tmp_path, constant, max_steps=4, early_stopping_patience=3)
    trainer.train()
    wrong = [(k, v) for log in trainer.state.log_history for k, v in log.items() if not isinstance(v, int | float)]
    assert wrong == []


def test_tensorboard_gets_clear_names(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    caplog.set_level(logging.WARNING)
    trainer = make_trainer(tmp_path / "run", ROWS, max_steps=4, early_stopping_patience=3, report_to="tensorboard")
    trainer.train()
    (events,) = list(Path(tmp_path).rglob("events.out.tfevents*"))
    reader = EventAccumulator(str(events)).Reload()
    tags = set(reader.Tags()["scalars"])
    assert {"train/loss", "train/sequences_per_s", "eval/spearman", "eval/spread_ratio", "eval/improvement_low"} <= tags
    assert len(reader.Scalars("eval/improvement")) == 3
    assert "incorrect so we dropped" not in caplog.text

"""What a person watches: bar, speed, notebook, TensorBoard, and a profile of a few steps."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import make_trainer as make_profiled_trainer
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from watched_runs import Kill, make_script, make_trainer, model_of

from hf_ext.reporting.operations import STEP
from hf_ext.training.profiling import TRACE

ROWS = make_script(*(model_of(error, i) for i, error in enumerate((1.5, 1.0, 0.5, 0.3))))


def is_bar(callback) -> bool:
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


def test_a_resumed_bar_begins_where_the_run_is(tmp_path, capsys):
    settings = {"disable_tqdm": False, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, ROWS, Kill(3), **settings).train()
    capsys.readouterr()
    make_trainer(tmp_path, ROWS, resume="auto", **settings).train()
    bars = capsys.readouterr().err.replace("\r", "\n")
    assert "| 3/10 [00:00" in bars
    assert "| 0/10 [" not in bars


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


def load_notebook(monkeypatch, shown) -> Any:
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


# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog) -> Any:
    """What was logged on speed so far."""
    caplog.set_level(logging.INFO, logger="hf_ext")
    return lambda: [m.removeprefix("Speed: ") for m in caplog.messages if m.startswith("Speed: ")]


def test_without_a_bar_it_is_a_line_of_its_own_and_a_continued_run_shows_its_own_rates(tmp_path, lines):
    settings = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, ROWS, Kill(6), **settings).train()
    (first,) = lines()
    assert " batches/s, " in first

    class Slow(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            clock.now += 100.0

    clock = type("Clock", (), {"now": 0.0, "__call__": lambda self: self.now})()
    trainer = make_trainer(tmp_path, ROWS, Slow(), resume="auto", **settings)
    trainer.throughput._clock = clock
    trainer.train()
    assert lines()[1].startswith("0.01 batches/s, ")  # its fourth step is the run's tenth
    assert lines()[1].endswith(", 0 s left")


# --- a profile --------------------------------------------------------------------------------------------------------


QUIET = {"eval_strategy": "no", "save_strategy": "no", "metric_for_best_model": None, "greater_is_better": None}


def make(folder, warmup=1, **given):
    """Without other words, steps 1 and 2 come before the window: the second warms the profiler up."""
    trainer = make_profiled_trainer(folder, **given)
    trainer.throughput.warmup_steps = warmup
    return trainer


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def calls(profile, name):
    return {row["name"]: row["calls"] for row in profile["operations"]}.get(name)


def rate_steps(folder):
    return json.loads((folder / "throughput.json").read_text())["measured_steps"]


def trace_steps(folder):
    with gzip.open(folder / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("name") == STEP and event.get("ph") == "X" for event in events)


@pytest.mark.nightly
def test_a_profile_changes_no_number_and_is_in_no_rate(tmp_path):
    plain, profiled = (
        make(tmp_path / str(asked), **QUIET, speedups=["tf32"], torch_profiler=asked, logging_steps=1)
        for asked in (None, 2)
    )
    for trainer in (plain, profiled):
        torch.manual_seed(0)
        trainer.train()
    assert torch.equal(weights(plain), weights(profiled))
    assert [log.get("loss") for log in plain.state.log_history] == [
        log.get("loss") for log in profiled.state.log_history
    ]
    assert (rate_steps(tmp_path / "None"), rate_steps(tmp_path / "2")) == (5, 2)  # 6 but for 1; and for 3 to 4, and 2
    assert plain.profile is None
    assert not (tmp_path / "None" / TRACE).exists()
    assert profiled.profile["steps"] == [3, 4]
    assert len(profiled.profile["seconds"]) == trace_steps(tmp_path / "2") == 2
    rows = profiled.profile["operations"]
    assert len(rows) == 10
    assert [row["share"] for row in rows] == sorted((row["share"] for row in rows), reverse=True)
    assert 0 < sum(row["share"] for row in rows) <= 1.001
    assert calls(profiled.profile, "aten::addmm") % 2 == 0  # as many in each step


def test_a_budget_of_disk_space_has_no_room_for_a_trace(tmp_path):
    trainer = make(tmp_path, **QUIET, torch_profiler=1, save_total_size_gb=1.0)
    trainer.train()
    assert (trainer.profile["trace"], len(trainer.profile["operations"])) == (None, 10)
    assert not (tmp_path / TRACE).exists()

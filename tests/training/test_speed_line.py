"""The line on speed: hand-computed on a fake clock, where it is shown, and where it must not be."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parts_alone import make_args
from test_progress import load_notebook
from transformers import TrainerCallback, TrainerState
from watched_runs import Kill, Scripted, make_script, make_trainer, model_of

from hf_ext.hardware import describe_hardware
from hf_ext.reporting.progress import LiveProgress
from hf_ext.reporting.throughput import ThroughputCallback
from hf_ext.training.progress import SpeedLine

ROWS = make_script(*(model_of(error, i) for i, error in enumerate((1.5, 1.0, 0.5, 0.3))))


class Loop:
    """Steps of 8 rows on a fake clock, with the events of Trainer for the two parts alone; one step warms up."""

    def __init__(
        self, folder: Path, bars: tuple[Any, ...] = (), first_step: int = 0, is_main: bool = True, **given: Any
    ):
        self.now = 1000.0
        args = make_args(folder, **given)
        model = Scripted()
        self.args, self.model = args, model
        self.throughput = ThroughputCallback(warmup_steps=1, clock=self.clock)
        handler = SimpleNamespace(callbacks=bars)
        trainer = SimpleNamespace(args=args, throughput=self.throughput, callback_handler=handler)
        self.line = SpeedLine(trainer, self.clock)
        self.state = TrainerState(max_steps=100, global_step=first_step, is_world_process_zero=is_main)
        self.tell("train_begin")

    def clock(self) -> float:
        return self.now

    def tell(self, event: str, **kwargs: Any) -> None:
        for part in (self.throughput, self.line):
            getattr(part, f"on_{event}")(self.args, self.state, None, model=self.model, **kwargs)

    def steps(self, count: int, wait: float, compute: float) -> Loop:
        for _ in range(count):
            self.now += wait
            self.tell("step_begin")
            self.model(script=torch.zeros(8, 1), labels=torch.zeros(8))
            self.now += compute
            self.state.global_step += 1
            self.tell("step_end")
        return self

    def log(self) -> Loop:
        logs = {"loss": 1.0}
        self.throughput.extend_logs(logs, self.args, self.state)
        self.tell("log", logs=logs)
        return self


@pytest.fixture
def lines(caplog) -> Any:
    """What was logged on speed so far."""
    caplog.set_level(logging.INFO, logger="hf_ext")
    return lambda: [m.removeprefix("Speed: ") for m in caplog.messages if m.startswith("Speed: ")]


@pytest.mark.parametrize(("passes", "line"), [(1, "0.25 batches/s"), (4, "1 batches/s")])
def test_the_line_is_that_of_the_hand_computed_steps(tmp_path, lines, passes, line) -> None:
    # 4 s a step; 98 of them are left. Batches are passes.
    Loop(tmp_path, gradient_accumulation_steps=passes).steps(1, 0, 60).steps(2, 0.4, 3.6).log()
    assert lines() == [f"{line}, 7 min left"]


def test_nothing_is_said_in_the_warmup_and_evaluations_are_in_no_rate(tmp_path, lines) -> None:
    loop = Loop(tmp_path).steps(1, 0, 50).log()
    assert lines() == []
    loop.steps(1, 0, 2)
    loop.now += 500
    loop.tell("evaluate", metrics={})
    loop.steps(1, 0, 2)
    # 98 steps of 2 s; then 97 of (2 + 500 + 2) / 2.
    assert lines() == ["0.5 batches/s, 3 min left", "0.5 batches/s, 6.8 h left"]


def test_now_is_the_last_half_minute_or_many_short_steps_and_needs_no_log(tmp_path) -> None:
    def live(loop: Loop) -> dict[str, float]:
        return loop.throughput.live(loop.args, loop.state)

    assert live(Loop(tmp_path).steps(41, 0, 1).log().steps(20, 0, 3))["batches_per_s"] == pytest.approx(1 / 3)
    assert live(Loop(tmp_path).steps(1, 0, 1).steps(300, 0, 1 / 64).steps(200, 0, 1 / 32))["batches_per_s"] == 32.0
    loop = Loop(tmp_path).steps(2, 0, 1)
    assert live(loop)["sequences_per_s"] == 8.0
    assert live(loop.steps(5, 0, 4))["sequences_per_s"] == pytest.approx(48 / 21)


def test_looking_changes_no_number_of_the_run(tmp_path) -> None:
    def look(loop: Loop) -> None:
        loop.throughput.live(loop.args, loop.state)

    def take(loop: Loop) -> None:
        loop.throughput.begin_again()  # forgets what was counted

    results = []
    for do in (lambda loop: None, look, take):
        loop = Loop(tmp_path)
        for _ in range(15):
            loop.now += 0.5
            loop.tell("step_begin")
            loop.model(script=torch.zeros(8, 1), labels=torch.zeros(8))
            do(loop)
            loop.now += 1.5
            loop.tell("step_end")
        found = loop.log().throughput.summarize([])
        results.append([found[name] for name in ("rates", "totals", "measured_steps", "warmup_seconds")])
        results[-1][1].pop("cpu_seconds")  # of the clock of the processor
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_a_resumed_run_counts_its_own_steps_only_and_other_processes_say_nothing(tmp_path, lines) -> None:
    Loop(tmp_path, first_step=90, is_main=False).steps(3, 0, 2).log()
    assert lines() == []
    Loop(tmp_path, first_step=90).steps(3, 0, 2).log()
    assert lines() == ["0.5 batches/s, 14 s left"]  # not 93 steps in 4 s, and 7 to go


def test_it_is_said_again_after_seconds_not_after_steps(tmp_path, lines) -> None:
    class Bar(LiveProgress):
        shown = 0

        def show_speed(self, *given: Any) -> None:
            self.shown += 1

    loop = Loop(tmp_path).steps(11, 0, 0.01).log()
    assert len(loop.steps(640, 0, 1 / 64) and lines()) == 1  # 10 s
    assert len(loop.steps(61, 0, 1) and lines()) == 2
    bar = Bar()
    Loop(tmp_path, (bar,)).steps(11, 0, 0.01).log().steps(640, 0, 1 / 64)
    assert (bar.shown, len(lines())) == (3, 2)  # at once, after 5 s, and after 10 s


def test_what_is_slow_is_said_after_ten_steps_and_on_a_cpu_without_a_claim(tmp_path, lines) -> None:
    loop = Loop(tmp_path).steps(10, 30, 30)
    assert ";" not in lines()[-1]
    loop.steps(2, 30, 30)
    assert lines()[-1].partition("; ")[2] == "it waits for data 50% of the time"


def test_a_card_falls_short_of_what_it_should_reach(tmp_path, lines, monkeypatch) -> None:
    monkeypatch.setattr("hf_ext.reporting.throughput.detect_hardware", lambda device: describe_hardware("T4"))
    bar = LiveProgress()
    Loop(tmp_path, (bar,)).steps(20, 6, 6)
    (said,) = lines()  # once: a bar has no room for the sentence
    assert said.endswith(
        "; below what this T4 should reach, because it waits for data 50% of the time (more --dataloader_num_workers)"
    )


# --- in a Trainer -----------------------------------------------------------------------------------------------------


def test_the_bar_shows_it_and_nothing_is_printed_beside(tmp_path, capsys, lines) -> None:
    make_trainer(tmp_path, ROWS, max_steps=5, disable_tqdm=False).train()
    last = capsys.readouterr().err.replace("\r", "\n").rstrip().splitlines()[-1]
    assert " batches/s, " in last
    assert lines() == []


def test_without_a_bar_it_is_a_line_of_its_own_and_a_continued_run_shows_its_own_rates(tmp_path, lines) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, ROWS, Kill(6), **settings).train()
    (first,) = lines()
    assert " batches/s, " in first

    class Slow(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.now += 100.0

    clock = type("Clock", (), {"now": 0.0, "__call__": lambda self: self.now})()
    trainer = make_trainer(tmp_path, ROWS, Slow(), resume="auto", **settings)
    trainer.throughput._clock = clock
    trainer.train()
    assert lines()[1].startswith("0.01 batches/s, ")  # its fourth step is the run's tenth
    assert lines()[1].endswith(", 0 s left")


def test_the_table_of_a_notebook_shows_it_above(tmp_path, monkeypatch, lines) -> None:
    shown: list[str] = []
    notebook = load_notebook(monkeypatch, shown)
    trainer = make_trainer(tmp_path, ROWS, max_steps=6)
    trainer.add_callback(notebook.NotebookProgressCallback())
    trainer.train()
    assert " batches/s, " in shown[-1]
    assert " left<br>" in shown[-1]
    assert lines() == []

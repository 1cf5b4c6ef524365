"""What a person watches: a bar on a terminal, lines elsewhere, why a run is slow; and that logs fit other callbacks."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from parts_alone import make_args
from tiny_masked_lm import make_trainer as make_masked_lm
from transformers import PrinterCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ProgressCallback
from watched_runs import Kill, Scripted, make_script, make_trainer, model_of

from hf_ext.errors import ArgumentError
from hf_ext.hardware import Device, describe_hardware
from hf_ext.optional import import_problem
from hf_ext.reporting import SpeedLine, ThroughputCallback
from hf_ext.text import LiveProgress, describe_training, find_shortfall
from hf_ext.text.progress import describe_metrics

ROWS = make_script(*(model_of(error, i) for i, error in enumerate((1.5, 1.0, 0.5, 0.3))))


def open_terminal(monkeypatch) -> io.StringIO:
    """Both streams in one place, which says that it is a terminal; hf_ext's messages go there."""
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    logger = logging.getLogger("hf_ext")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(stream)])
    monkeypatch.setattr(logger, "level", logging.INFO)
    return stream


@pytest.fixture
def lines(caplog) -> Any:
    """What was logged on the training so far."""
    caplog.set_level(logging.INFO, logger="hf_ext")
    return lambda: [message for message in caplog.messages if re.match(r"Step [\d,]+ of|Slow:", message)]


def shown(stream: io.StringIO) -> list[str]:
    return stream.getvalue().replace("\r", "\n").rstrip().splitlines()


def test_on_a_terminal_the_bar_shows_loss_rate_and_best_and_messages_stand_above_it(tmp_path, monkeypatch) -> None:
    terminal = open_terminal(monkeypatch)
    make_trainer(tmp_path, ROWS, max_steps=5, disable_tqdm=False, early_stopping_patience=3).train()
    last = shown(terminal)[-1]
    assert re.search(r"5/5 \[.*, loss -4, lr 1, .* batches/s, best spearman 0\.\d+, [\d.]+ s left\]", last)
    text = terminal.getvalue()
    evaluations = re.findall(r"[\r\n](?:\x1b\[A)*Step (\d) of 5, validation: spearman 0\.\d+, loss ", text)
    assert evaluations == ["1", "2", "3", "4", "5"]
    assert len(re.findall(r"[\r\n](?:\x1b\[A)*Early stopping, step", text)) == 5  # the cursor may go up, past a bar


def test_in_a_file_there_are_lines_and_no_bar(tmp_path, capsys, lines) -> None:
    make_trainer(tmp_path, ROWS, max_steps=5, disable_tqdm=False).train()
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "it/s" not in out + err
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("Step")] == [
        f"Step {step} of 5, validation" for step in range(1, 6)
    ]
    assert re.fullmatch(r"Step 4 of 5: loss -3, lr 1, .* batches/s, best spearman 0\.\d+, [\d.]+ s left", lines()[0])


def test_without_tqdm_the_logs_are_printed_as_in_trainer(tmp_path, capsys) -> None:
    trainer = make_trainer(tmp_path, ROWS, max_steps=2, disable_tqdm=True)
    callbacks = trainer.callback_handler.callbacks
    assert [type(c) for c in callbacks if isinstance(c, ProgressCallback | PrinterCallback)] == [PrinterCallback]
    trainer.train()
    assert "'loss': " in capsys.readouterr().out


def test_the_pass_over_all_rows_gets_a_bar_of_its_own_and_none_stays_open(tmp_path, monkeypatch) -> None:
    terminal = open_terminal(monkeypatch)

    class StopHere(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    settings = {"disable_tqdm": False, "per_device_eval_batch_size": 20}
    trainer = make_trainer(tmp_path, ROWS, StopHere(), eval_subset=80, **settings)
    trainer.train()
    text = terminal.getvalue()
    assert "0/4 [" in text  # 80 rows
    assert "0/10 [" in text  # all 200
    (bar,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, LiveProgress)]
    assert (trainer.state.global_step, bar.prediction_bar) == (1, None)


def test_a_resumed_bar_begins_where_the_run_is_and_shows_its_own_rates(tmp_path, monkeypatch) -> None:
    terminal = open_terminal(monkeypatch)
    settings = {"disable_tqdm": False, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, ROWS, Kill(3), **settings).train()
    before = len(terminal.getvalue())

    class Slow(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.now += 100.0

    clock = type("Clock", (), {"now": 0.0, "__call__": lambda self: self.now})()
    trainer = make_trainer(tmp_path, ROWS, Slow(), resume="auto", **settings)
    trainer.throughput._clock = clock
    trainer.train()
    text = terminal.getvalue()[before:]
    assert "| 3/10 [00:00" in text
    assert "| 0/10 [" not in text
    assert "0.01 batches/s" in text


def test_how_training_goes_in_words() -> None:
    numbers = {"loss": 0.31234, "learning_rate": 2.5e-4, "residues_per_s": 15_432.1, "hours_left": 1.25}
    state, args = SimpleNamespace(best_metric=0.4821), SimpleNamespace(metric_for_best_model="eval_spearman")
    text = describe_training(numbers, args, state)
    assert text == "loss 0.3123, lr 0.00025, 15,432 residues/s, best spearman 0.4821, 75 min left"
    assert describe_training({"tokens_per_s": 812.4, "hours_left": 0.5}, args, state).startswith("812 tokens/s")
    assert describe_training({"hours_left": 0.5}, args, SimpleNamespace(best_metric=float("-inf"))) == "30 min left"
    assert describe_training({"hours_left": 0.005}, args, SimpleNamespace(best_metric=None)) == "18 s left"
    assert describe_training({}, args, SimpleNamespace(best_metric=None)) == ""


def test_an_evaluation_is_a_line_that_begins_with_what_chooses_the_best_model() -> None:
    logged = {"loss": 0.5, "spearman": float("nan"), "runtime": 2.0, "a_samples_per_second": 3.0, "num_tokens": 7}
    metrics = {f"eval_{name}": value for name, value in {**logged, "rmse": 1.0, "mae": 2.0, "r2": 3.0}.items()}
    assert describe_metrics(metrics, "eval_rmse") == "rmse 1, loss 0.5, spearman undefined, mae 2, r2 3"
    assert describe_metrics({**metrics, "eval_f1": 0.1}) == "loss 0.5, spearman undefined, rmse 1, mae 2, r2 3"


def test_waiting_for_data_is_said_where_it_is_much() -> None:
    assert find_shortfall({"data_wait_share": 0.45}) == "it waits for data 45% of the time (--dataloader_num_workers)"
    assert find_shortfall({"data_wait_share": 0.1}) == find_shortfall({}) == ""


class Loop:
    """Steps of 8 rows on a fake clock, with the events of Trainer for the two parts alone; one step warms up."""

    def __init__(self, folder: Path, bars: tuple[Any, ...] = (), is_main: bool = True, **given: Any):
        self.now = 1000.0
        self.args, self.model = make_args(folder, **given), Scripted()
        self.throughput = ThroughputCallback(warmup_steps=1, clock=self.clock)
        self.line = SpeedLine(self.throughput, lambda: bars, self.clock)
        self.state = TrainerState(max_steps=100, is_world_process_zero=is_main)
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


def test_the_line_is_that_of_the_hand_computed_steps(tmp_path, lines) -> None:
    for passes, rate in ((1, "0.25"), (4, "1")):
        # 4 s a step; 98 of them are left. Batches are passes.
        Loop(tmp_path, gradient_accumulation_steps=passes).steps(1, 0, 60).log().steps(2, 0.4, 3.6)
        assert lines()[-1] == f"Step 2 of 100: loss 1, {rate} batches/s, 7 min left"
    before = len(lines())
    Loop(tmp_path).steps(1, 0, 50).log()  # still in the warm-up
    Loop(tmp_path, is_main=False).steps(3, 0, 2).log()
    assert len(lines()) == before


def test_evaluations_are_in_no_rate_but_in_the_time_left_and_lines_come_each_minute(tmp_path, lines) -> None:
    loop = Loop(tmp_path).steps(2, 0, 2).log()
    loop.now += 500
    loop.tell("evaluate", metrics={})
    loop.steps(1, 0, 2)
    # 98 steps of 2 s; then 97 of (2 + 500 + 2) / 2.
    assert [line.split(": ")[1] for line in lines()] == [
        "loss 1, 0.5 batches/s, 3 min left",
        "loss 1, 0.5 batches/s, 6.8 h left",
    ]
    loop.steps(29, 0, 2)
    assert len(lines()) == 2
    loop.steps(1, 0, 2)
    assert len(lines()) == 3


def test_why_a_run_is_slow_is_said_once_above_a_bar(tmp_path, lines) -> None:
    bar = LiveProgress()
    bar.training_bar = SimpleNamespace(disable=False, set_postfix_str=lambda text: None)
    loop = Loop(tmp_path, (bar,)).steps(10, 6, 6).log()
    assert lines() == []  # too early
    loop.steps(20, 6, 6).log()
    (said,) = lines()
    assert said.startswith("Slow: it waits for data 50% of the time")
    loop.steps(60, 9, 6).log()
    assert lines() == [said]  # though it is another share now


@pytest.fixture
def busy(monkeypatch) -> Iterator[list[int]]:
    """How busy a driver says that two cards are, in percent: torch's own code asks it through a module of its name."""
    shares: list[Any] = [10, 90]
    error = type("NVMLError", (Exception,), {})

    def ask(index: int) -> SimpleNamespace:
        if shares[index] is None:
            raise error("not supported")
        return SimpleNamespace(gpu=shares[index])

    module = SimpleNamespace(NVMLError=error, NVMLError_DriverNotLoaded=error, nvmlInit=lambda: None)
    vars(module).update(nvmlDeviceGetHandleByIndex=int, nvmlDeviceGetUtilizationRates=ask)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "pynvml", module, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    import_problem.cache_clear()
    yield shares
    import_problem.cache_clear()


CARD = Device(describe_hardware("T4"), "fp32", 1, index=1)


def test_how_busy_the_gpu_is_stands_in_line_logs_and_metrics(tmp_path, lines, busy) -> None:
    loop = Loop(tmp_path).steps(1, 0, 60)
    loop.throughput.device = CARD
    loop.steps(1, 0, 4)
    assert lines() == ["Step 2 of 100: 0.25 batches/s, GPU 90% busy, 7 min left"]
    busy[1] = 70
    loop.steps(1, 0, 1)
    assert loop.throughput.extend_logs({"loss": 1.0}, loop.args, loop.state)["gpu_utilization"] == 0.8  # of 90 and 70
    busy[1] = 50
    loop.steps(1, 0, 1)
    loop.throughput.extend_logs(metrics := {"train_loss": 1.0}, loop.args, loop.state)
    assert metrics["train_gpu_utilization"] == 0.7


def test_a_gpu_that_cannot_be_asked_has_no_share(busy, monkeypatch) -> None:
    assert (CARD.utilization(), replace(CARD, index=0).utilization()) == (0.9, 0.1)
    busy[1] = None  # a slice of a card
    assert (CARD.utilization(), replace(CARD, index=None).utilization()) == (None, None)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    import_problem.cache_clear()
    assert replace(CARD, index=0).utilization() is None


def test_an_idle_gpu_is_said_with_the_cause_that_was_measured(tmp_path, lines, busy) -> None:
    small = "steps are small, and memory has room: a larger --per_device_train_batch_size"
    host = "the host cannot keep up: --speedups all compiles, --profile true shows what takes the time"
    data = "it waits for data 16% of the time (--dataloader_num_workers)"
    for rates, said in (
        ({"gpu_utilization": 0.79, "memory_share": 0.4}, f"the GPU is busy 79% of the time ({small})"),
        ({"gpu_utilization": 0.79, "memory_share": 0.6}, f"the GPU is busy 79% of the time ({host})"),
        ({"gpu_utilization": 0.7, "memory_share": 0.4, "data_wait_share": 0.16}, data),
        ({"gpu_utilization": 0.81, "memory_share": 0.4, "data_wait_share": 0.16}, ""),
    ):
        assert find_shortfall(rates) == said
    busy[1] = 60
    for memory_gib, cause in ((10_000, small), (0.001, host)):  # of which this process has some
        loop = Loop(tmp_path)
        loop.throughput.device = replace(CARD, hardware=replace(CARD.hardware, memory_gib=memory_gib))
        loop.steps(30, 0, 6)
        assert lines()[-1].endswith(f"left; the GPU is busy 60% of the time ({cause})")


def test_after_500_batches_the_log_says_the_factor_over_a_baseline(tmp_path, lines, caplog) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "throughput.json").write_text('{"device": "T4", "rates": {"sequences_per_s": 8}}')
    # Steps of 2 passes and 8 rows in 4 s: 0.5 batches a second, and 2 rows; the first step warms up.
    for given, said in (
        ("0.25", "2.00x the baseline's 0.25 batches/s"),
        (str(tmp_path / "old"), "0.25x the baseline's 8 rows/s"),
    ):
        loop = Loop(tmp_path, baseline_rate=given, gradient_accumulation_steps=2).steps(250, 0, 4).log()
        assert "baseline" not in caplog.text  # 498 of them
        loop.steps(1, 0, 4).log().steps(1, 0, 4).log()
        assert [one for one in caplog.messages if " batches of " in one] == [f"500 batches of 4 rows: {said}."]
        loop.steps(60, 0, 4)
        assert f" batches/s, {float(said[:4]):g}x the baseline, " in lines()[-1]
        caplog.clear()


def test_what_is_no_baseline_is_refused_before_anything_begins(tmp_path) -> None:
    for given in ("0", "-1", "nan", "fast", str(tmp_path)):
        with pytest.raises(ArgumentError, match=f"--baseline_rate {given}: give batches per second, such as 1.59, or"):
            make_args(tmp_path, baseline_rate=given)
    (tmp_path / "throughput.json").write_text('{"device": "cpu", "warmup_steps": 3}')
    with pytest.raises(ArgumentError, match="of a run that measured steps after its warm-up"):
        make_args(tmp_path, baseline_rate=str(tmp_path))


def test_a_continued_run_has_the_speed_of_all_its_sessions_without_their_warm_ups(tmp_path) -> None:
    loop = Loop(tmp_path, baseline_rate="0.1").steps(1, 0, 60).steps(3, 0, 2)
    state = json.loads(json.dumps(loop.line.state()))
    again = Loop(tmp_path, baseline_rate="0.1")
    again.line.load(state)
    logs = {"train_loss": 1.0}
    again.steps(1, 0, 900).steps(1, 0, 4)
    again.throughput.extend_logs(logs, again.args, again.state)
    again.tell("log", logs=logs)
    # 3 batches of 2 s and one of 4 s, 8 rows each.
    found = {name: logs[f"train_{name}"] for name in ("batches_per_s", "rows_per_s", "speed_vs_baseline")}
    assert found == {"batches_per_s": 0.4, "rows_per_s": 3.2, "speed_vs_baseline": pytest.approx(4)}
    assert logs["train_sequences_per_s"] == 2.0  # of this session alone


def test_a_run_that_is_ended_and_continued_counts_on_and_one_that_was_over_keeps_its_speed(tmp_path) -> None:
    given = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    trainer = make_masked_lm(tmp_path, **given)
    trainer.train()
    for step in (4, 8):
        progress = json.loads((tmp_path / f"checkpoint-{step}" / "progress.json").read_text())
        batches, rows, seconds = progress["speed"]["measured"]
        assert (batches, rows) == (step - 3, 4 * (step - 3))  # 3 steps warm up
        metrics = (
            make_masked_lm(tmp_path / str(step), resume=str(tmp_path / f"checkpoint-{step}"), **given).train().metrics
        )
        if step == 4:
            assert metrics["train_batches_per_s"] != pytest.approx(batches / seconds)  # with a fifth step's
            assert metrics["train_rows_per_s"] / metrics["train_batches_per_s"] == pytest.approx(4)
        else:
            assert metrics["train_batches_per_s"] == pytest.approx(batches / seconds)


@pytest.mark.parametrize("eval_subset", [None, 100])
def test_the_table_of_notebooks_takes_every_metric_and_shows_the_line_above(tmp_path, monkeypatch, eval_subset) -> None:
    """As transformers shows it in Jupyter and Colab; what it displays needs IPython, which tests do without."""
    shown: list[str] = []
    notebook = load_notebook(monkeypatch, shown)
    settings = {"early_stopping_patience": 3, "eval_subset": eval_subset}
    sets = {"a": ROWS, "b": ROWS}
    trainer = make_trainer(tmp_path, sets, metric_for_best_model="a_spearman", max_steps=6, **settings)
    trainer.add_callback(notebook.NotebookProgressCallback())
    trainer.train()
    for part in ("Validation Loss", "A Spearman", " batches/s, ", " left<br>"):
        assert part in shown[-1]


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


def test_every_logged_value_is_a_number_and_tensorboard_gets_clear_names(tmp_path, caplog) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    caplog.set_level(logging.WARNING)
    trainer = make_trainer(tmp_path / "run", ROWS, max_steps=4, early_stopping_patience=3, report_to="tensorboard")
    trainer.train()
    assert all(isinstance(value, int | float) for log in trainer.state.log_history for value in log.values())
    (events,) = list(Path(tmp_path).rglob("events.out.tfevents*"))
    reader = EventAccumulator(str(events)).Reload()
    tags = set(reader.Tags()["scalars"])
    assert {"train/loss", "train/sequences_per_s", "eval/spearman", "eval/spread_ratio", "eval/improvement_low"} <= tags
    assert len(reader.Scalars("eval/improvement")) == 3
    assert "incorrect so we dropped" not in caplog.text

"""Seconds of the clock and of the processor: what waits takes the one, what computes both."""

from __future__ import annotations

import time

import pytest
import torch

from hf_ext.reporting.step_timer import StepTimer


def test_a_step_that_sleeps_takes_no_processor_and_one_that_computes_does():
    ticks = iter(range(100))
    timer = StepTimer(torch.device("cpu"), clock=lambda: float(next(ticks)))  # 0: free
    timer.begin()  # 1
    time.sleep(0.2)
    timer.end()  # 2
    timer.begin()  # 3
    _compute(0.2)
    timer.end()  # 4
    (asleep, busy) = timer.read()
    assert (asleep[:2], busy[:2]) == ((2.0, 1.0), (2.0, 1.0))
    assert asleep[2] < 0.1
    assert busy[2] == pytest.approx(0.2, abs=0.1)
    assert timer.read() == []


def test_what_evaluation_computes_belongs_to_no_step():
    timer = StepTimer(torch.device("cpu"))
    _compute(0.2)
    timer.resume()
    timer.begin()
    timer.end()
    assert timer.read()[0][2] < 0.1


def _compute(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass

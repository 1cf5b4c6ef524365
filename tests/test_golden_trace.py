"""What runs do, in order, is what it was before: seams, events, checkpoint operations and log keys, line by line.

A change that is meant is written down by `HF_EXT_WRITE_TRACE=1 pytest tests/test_golden_trace.py`, and read as a diff.
"""

import os
from pathlib import Path

import pytest
from event_trace import fold, traced
from resuming_runs import Case, Runs
from watched_runs import Terminate, make_script, make_trainer, model_of

from hf_ext.checkpoints.state.rng import capture_rng, restore_rng
from hf_ext.errors import TrainingStopped
from hf_ext.trainer import FastTrainer

GOLDEN = Path(__file__).parent / "golden_traces"


def check(name: str, trace: list[str]) -> None:
    """Compares a trace with the one that is written down."""
    path, text = GOLDEN / f"{name}.txt", "\n".join(fold(trace)) + "\n"
    if "HF_EXT_WRITE_TRACE" in os.environ:
        path.write_text(text)
    assert text == path.read_text()


def scripted(folder: Path, *callbacks, **given):
    """A run of at most 12 steps in 3 epochs that gets no better after its third evaluation."""
    rows = make_script(*(model_of(error) for error in (0.9, 0.6, 0.3)), *(model_of(0.3, n) for n in range(1, 10)))
    settings = {"max_steps": 12, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"save_total_limit": 2, "load_best_model_at_end": True, "eval_subset": 100}
    settings |= {"per_device_train_batch_size": 25, "early_stopping_patience": 3, "early_stopping_min_delta": 0.1}
    return make_trainer(folder, rows, *callbacks, **settings, **given)


def test_a_run_stopped_in_an_evaluation_and_one_that_continues_it_until_it_stops_early(tmp_path):
    first = scripted(tmp_path, Terminate(5))
    with traced() as trace, pytest.raises(TrainingStopped):
        first.train()
    first.close()
    check("stopped", trace)
    second = scripted(tmp_path, resume="auto")
    with traced() as trace:
        second.train()
        second.save_model()
    second.end()
    assert second.stopping_decisions[-1]["should_stop"]
    check("continued", trace)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("cached", Case("cached", "affinity", accumulation=2, given=(("nan_policy", "skip"), ("max_grad_norm", 1.0)))),
        ("stream", Case("stream", accumulation=2)),
        ("lora", Case("grouped", "lora", given=(("eval_strategy", "epoch"), ("disk_policy", "degrade")))),
        ("token budget", Case("token budget", given=(("eval_strategy", "steps"), ("eval_steps", 3)))),
    ],
)
def test_a_killed_run_and_one_that_continues_it(name, case, tmp_path, make_affinity, demo_rows):
    runs = Runs(tmp_path, make_affinity, demo_rows)
    with traced() as trace:
        killed = runs.interrupt(case)
        runs.resume(case, killed)
    check(name, trace)


class AlsoRestores(FastTrainer):
    """Does one thing more than it should."""

    def _finalize_training(self, *args):
        restore_rng(capture_rng())
        return super()._finalize_training(*args)


def test_one_operation_too_many_is_seen(tmp_path):
    traces = []
    for kind in (FastTrainer, AlsoRestores):
        trainer = scripted(tmp_path / kind.__name__, kind=kind)
        with traced() as trace:
            trainer.train()
        trainer.end()
        traces.append(trace)
    own, broken = traces
    assert [line for line in broken if line != "restore_rng"] == own
    assert broken.count("restore_rng") == 1

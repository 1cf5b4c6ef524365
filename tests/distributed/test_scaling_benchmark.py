"""The measurement of two processes: its sums by hand, its result as the formulas have it, and that it runs."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import scaling

import hf_ext

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "scaling_two_processes.py"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("scaling_two_processes_cpu*.json"))


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("scaling_two_processes")


def measured(**changes):
    """A million parameters: 4 MB in one message, of which 1 ms is overhead and 4 ms are bytes."""
    seconds = {
        "one": [0.010] * 3,
        "two_apart": [0.012] * 3,
        "two_ddp_silent": [0.016] * 3,
        "two_ddp": [0.020] * 3,
        "backward": [0.002] * 3,
    }
    shape = {"num_parameters": 10**6, "num_trainable": 10**6, "num_layers": 10}
    known = {"all_reduce": [0.005], "small_message": [0.001], "loopback_bytes": [4.1e6], "bucket_bytes": 4e6}
    return {"seconds": {**seconds, **changes}, "shape": shape, **known}


def test_predictions_are_those_worked_out_by_hand(benchmark_module):
    found = benchmark_module.compare(measured())
    assert found["bytes_per_step"]["formula"] == 4e6  # 2 x 1/2 x 4
    assert found["bandwidth_gb_per_second"] == pytest.approx(1.0)
    assert found["predicted_from_one_process"]["no_overlap_s"] == pytest.approx(0.015)
    predicted = found["predicted_from_two_that_send_nothing"]
    assert predicted["no_overlap_s"] == pytest.approx(0.021)
    assert predicted["full_overlap_s"] == pytest.approx(0.019)  # 2 ms of the 5 run beside backward
    assert found["measured_over_predicted_no_overlap"]["median"] == pytest.approx(20 / 21)
    assert found["slower_by_sharing_the_cpu"] == pytest.approx(1.2)
    assert found["slower_by_communication"] == pytest.approx(1.25)
    assert found["efficiency_measured"] == pytest.approx(0.5)


def test_a_slower_ddp_shows_in_the_ratio(benchmark_module):
    found = benchmark_module.compare(measured(two_ddp=[0.042] * 3))
    assert found["measured_over_predicted_no_overlap"]["median"] == pytest.approx(2.0)


def test_there_are_two_results():
    assert [path.stem for path in RESULTS] == ["scaling_two_processes_cpu", "scaling_two_processes_cpu_small_batch"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_what_was_sent_is_what_the_formula_says_within_two_percent(path):
    result = json.loads(path.read_text())
    sent = result["bytes_per_step"]
    parts = scaling.transfers(scaling.Layout("DDP", 2, 2, half=False), scaling.Shape(**result["shape"]))
    assert sent["formula"] == sent["ddp_buckets"] == scaling.sent_bytes(parts)
    assert sent["loopback"]["median"] == pytest.approx(sent["formula"], rel=0.02)


@pytest.mark.nightly
def test_the_measurement_runs(tmp_path):
    path = tmp_path / "result.json"
    words = ["--output_json", str(path), "--rounds", "1", "--steps", "1", "--layers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_ext.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(path.read_text())
    assert result["bytes_per_step"]["ddp_buckets"] == result["bytes_per_step"]["formula"]
    assert result["measured_s"] > 0

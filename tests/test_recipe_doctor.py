"""recipes/doctor.py as users call it: the page, the JSON, the exit status, and that it leaves nothing behind."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ext.errors import ArgumentError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Calls the recipe in an empty folder; returns exit status and page."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.chdir(tmp_path)
    recipe = importlib.import_module("doctor")

    def call(*words: str) -> tuple[int, str]:
        status = recipe.main([*words, "--measure_seconds", "0"])
        return status, capsys.readouterr().out

    return call


def section(page: str, start: str) -> str:
    """From the line that begins with `start` to the next empty line."""
    return page[page.index(start) :].split("\n\n")[0]


def test_the_demo_on_this_machine_exits_with_0_and_writes_nothing(tmp_path):
    command = [sys.executable, str(ROOT / "recipes" / "doctor.py"), "--measure_seconds", "0.1"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("This command would run.")
    assert len(done.stdout.splitlines()) < 70
    assert list(tmp_path.iterdir()) == []


def test_a_t4_is_described_with_its_plan_estimate_and_price(doctor):
    status, page = doctor("--device", "t4", "--dollars_per_hour", "0.35", "--tower_training", "full")
    assert status == 0
    machine = section(page, "Machine: T4, 16 GiB (described;")
    assert "  trains in fp16 with loss scaling: no native bf16; published peaks: fp32 8.1, fp16 65 TFLOP/s" in machine
    assert "  bf16: no (native from 8.0, T4 has compute capability 7.5; torch would emulate it)" in machine
    assert "applied  T4 has fp16 but no native bf16" in section(page, "Plan for T4, preset max_speed")
    estimate = section(page, "Estimate, no measurement of this run")
    assert "3% to 20% of T4's 65 TFLOP/s in fp16 (published; the share is assumed)" in estimate.replace("\n    ", " ")
    assert " dollars" in estimate


def test_versions_say_what_is_wanted_and_the_command_for_what_is_absent(doctor):
    table = section(doctor("--device", "h100")[1], "package ")
    assert "transformers   5." in table
    assert '>=0.18        not installed  --optim adamw_torch_8bit and _4bit             pip install "torchao' in table


def test_what_would_be_refused_exits_with_1_and_says_so_as_json_too(doctor, tmp_path):
    status, page = doctor("--device", "t4", "--bf16", "true", "--tower_training", "full", "--json", "page.json")
    assert status == 1
    assert "STOPS plan: precision: bf16 is not native on T4" in page
    assert "    -> use --fp16" in page
    assert page.rstrip().endswith("This command would not run to its end.")
    written = json.loads((tmp_path / "page.json").read_text())
    assert written["would_run"] is False
    assert written["abilities"]["bf16"]["able"] is False
    assert [finding["remedy"] for finding in written["findings"] if finding["level"] == "stops"] == ["use --fp16"]
    assert [path.name for path in tmp_path.iterdir()] == ["page.json"]


def test_an_argument_of_mlm_asks_about_mlm(doctor):
    status, page = doctor("--device", "h100", "--model_size", "esm2_650M", "--max_steps", "10")
    assert status == 0
    assert "masked_lm_head     identical  applied" in page
    assert "weights 2.43 GiB" in page  # 651,043,254 parameters of 4 bytes
    assert "masked_lm_head     identical  skipped" in doctor("--device", "h100")[1]


def test_arguments_of_both_recipes_are_refused(doctor):
    with pytest.raises(ArgumentError, match="unknown argument '--pooling'"):
        doctor("--model_size", "esm2_8M", "--pooling", "mean")


def test_every_config_is_examined(doctor):
    examined = [path.name for path in CONFIGS if path.name != "mlm_stock_best.yaml"]  # one side of a comparison
    assert len(examined) == 11
    for name in examined:
        status, page = doctor("--config", str(ROOT / "recipes" / "configs" / name), "--device", "a100-80gb")
        assert status == 1  # their data lie nowhere here
        assert "STOPS data: data/" in page
        assert "Machine: A100-80GB, 80 GiB" in page


def test_a_mistake_is_named_with_the_nearest_flag(doctor):
    with pytest.raises(ArgumentError, match="'--learning_rate'"):
        doctor("--learning_rat", "1")
    with pytest.raises(ArgumentError, match="Unknown hardware 't44'"):
        doctor("--device", "t44")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is there")
def test_deepspeed_that_is_asked_for_and_missing_is_named_with_the_command(doctor):
    with pytest.raises(ArgumentError, match='pip install "deepspeed'):
        doctor("--deepspeed", "zero2.json")

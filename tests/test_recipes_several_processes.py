"""Recipes started in several processes: what one process does alone is refused, the rest is done once."""

import subprocess
from importlib import import_module

import pandas as pd
import pytest
import torch
from launches import ONE_CPU, RECIPES, TWO_CPUS, clean_environment, run_recipe

from hf_ext.cli import COMMANDS
from hf_ext.data import make_demo_table
from hf_ext.errors import ArgumentError

ALONE = {
    "resume": ["outputs/affinity"],
    "compare": ["--baseline", "baseline", "--optimized", "max_speed", "--", "--max_steps", "2"],
}


def test_what_one_process_does_alone_is_refused_in_several(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command, words in ALONE.items():
        main = import_module(COMMANDS[command][0]).main
        with pytest.raises(ArgumentError, match=f"2 processes were launched .* Start it as hf-ext {command}"):
            main(words)
    assert list(tmp_path.iterdir()) == []


def run(command: list[str], folder) -> str:
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
def test_two_processes_predict_each_row_once_as_one_does_and_the_doctor_prints_one_page(tmp_path):
    run_recipe(TWO_CPUS, tmp_path, "max_speed.py", "--max_steps", "2", "--embedding_cache_dir", str(tmp_path / "cache"))
    rows = make_demo_table(31).remove_columns("pKd")
    rows.to_csv(tmp_path / "new.csv")
    for launch, name in ((TWO_CPUS, "two"), (ONE_CPU, "one")):
        words = ["--model", "output", "--dataset_name", "new.csv", "--output", f"{name}.csv"]
        (command,) = launch.commands([str(RECIPES / "predict.py"), *words, "--embedding_cache_dir", f"{name}-cache"])
        run(command, tmp_path)
    two, one = (pd.read_csv(tmp_path / f"{name}.csv").to_dict("list") for name in ("two", "one"))
    # Each launch times which matrix product pays; they differ by rounding.
    assert two.pop("prediction") == pytest.approx(one.pop("prediction"), abs=1e-4)
    assert two == one
    assert len(two["antigen"]) == 31
    (command,) = TWO_CPUS.commands(["-m", "hf_ext", "doctor"])
    assert run(command, tmp_path).count("This command would run on ") == 1

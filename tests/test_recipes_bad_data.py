"""The recipes on a file that would never end: an error of ours with its name, before a model is built."""

import importlib
import os
from pathlib import Path

import pytest

from hf_ext.errors import ArgumentError, DataError

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("recipe", ["max_speed", "mlm"])
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_named_pipe_ends_a_recipe_with_an_error_of_ours(tmp_path, monkeypatch, recipe, streaming):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    path = tmp_path / "a.csv"
    os.mkfifo(path)
    shape = "--model_size demo" if recipe == "mlm" else ""
    words = f"--dataset_name {path} --output_dir {tmp_path / 'out'} --preset baseline --use_cpu true {shape}"
    with pytest.raises((DataError, ArgumentError)) as error:
        importlib.import_module(recipe).main([*words.split(), "--streaming", streaming, "--max_steps", "2"])
    assert f"{path}: is a named pipe" in str(error.value)

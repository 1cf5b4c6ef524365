"""The recipes on files that hold no usable rows: an error of ours with the file's name, before a model is built."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from hf_ext.errors import ArgumentError, DataError

ROOT = Path(__file__).resolve().parent.parent


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "a.csv")
    return folder / "a.csv"


def joined_rows(folder: Path) -> Path:
    path = folder / "a.csv"
    path.write_text('note,sequence,label\nx,MKTVL,1\n"y,MKTAA,2\nz,MKTCC,3\nx",MKTDD,4\nx,MKTEE,5\n')
    return path


CASES = {
    fifo: "is a named pipe",
    joined_rows: "rows 3 to 5: two quotes make one record",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("recipe", ["max_speed", "mlm"])
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_bad_data_ends_a_recipe_with_an_error_of_ours(tmp_path, monkeypatch, recipe, make, streaming):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    path = make(tmp_path)
    shape = "--model_size demo" if recipe == "mlm" else ""
    words = f"--dataset_name {path} --output_dir {tmp_path / 'out'} --preset baseline --use_cpu true {shape}"
    with pytest.raises((DataError, ArgumentError)) as error:
        importlib.import_module(recipe).main([*words.split(), "--streaming", streaming, "--max_steps", "2"])
    assert f"{path}" in str(error.value)
    assert CASES[make] in str(error.value)

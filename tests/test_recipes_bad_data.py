"""The recipes on files that hold no usable rows: an error of ours with the file's name, before a model is built."""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_ext.errors import ArgumentError, DataError

ROOT = Path(__file__).resolve().parent.parent


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "a.csv")
    return folder / "a.csv"


def damaged_parquet(folder: Path) -> Path:
    rng = random.Random(0)
    sequences = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=50)) for _ in range(100)]
    path = folder / "a.parquet"
    table = pa.table({"sequence": sequences, "label": [float(i) for i in range(100)]})
    pq.write_table(table, path, compression="snappy", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    return path


def joined_rows(folder: Path) -> Path:
    path = folder / "a.csv"
    path.write_text('note,sequence,label\nx,MKTVL,1\n"y,MKTAA,2\nz,MKTCC,3\nx",MKTDD,4\nx,MKTEE,5\n')
    return path


def half_character(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"sequence": "MK\\udc00TVL", "label": 1}\n')
    return folder / "a.jsonl"


CASES = {
    fifo: "is a named pipe",
    damaged_parquet: "row group 1: not a readable Parquet file",
    joined_rows: "rows 3 to 5: two quotes make one record",
    half_character: "row 1, column 'sequence'",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("recipe", ["max_speed", "mlm"])
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_bad_data_ends_a_recipe_with_an_error_of_ours(tmp_path, monkeypatch, recipe, make, streaming):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    path = make(tmp_path)
    shape = "--num_hidden_layers 1 --hidden_size 8 --num_attention_heads 2" if recipe == "mlm" else ""
    words = f"--dataset_name {path} --output_dir {tmp_path / 'out'} --preset baseline --use_cpu true {shape}"
    with pytest.raises((DataError, ArgumentError)) as error:
        importlib.import_module(recipe).main([*words.split(), "--streaming", streaming, "--max_steps", "2"])
    assert f"{path}" in str(error.value)
    assert CASES[make] in str(error.value)

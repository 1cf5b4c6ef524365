"""What predict.py refuses about its output before it looks for a model, and what it leaves as it was."""

import os
import runpy
from pathlib import Path

import pytest

from hf_ext.errors import ArgumentError, FolderError, HfExtError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "predict.py"
ROWS = "sequence,pKd\nMKTVL,1\nMKTAA,2\n"
NO_MODEL = "no/such/model': no folder here"  # what comes after the output was found fit
ENDS = "note,source_row,prediction,prediction_low,prediction_high,prediction_std\n"
STREAM = "prediction,prediction_low,prediction_high\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "in.csv").write_text(ROWS)
    return tmp_path


def predict(*given: str) -> None:
    runpy.run_path(str(RECIPE))["main"](["--model", "no/such/model", *given])


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def link(make):
    def prepare(folder: Path) -> None:
        make(folder / "in.csv", folder / "out.csv")

    return prepare


@pytest.mark.parametrize("name", ["in.csv", "./in.csv", "~/../in.csv"])
def test_the_rows_that_are_read_are_not_replaced(folder, name):
    with pytest.raises(ArgumentError, match="is what --dataset_name reads"):
        predict("--dataset_name", "in.csv", "--output", name, "--bad_rows", "drop")
    assert contents(folder) == {"in.csv": ROWS}


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_the_rows_that_are_read_are_not_replaced_under_another_name(folder, make):
    make(folder / "in.csv", folder / "out.csv")
    with pytest.raises(ArgumentError, match="is what --dataset_name reads"):
        predict("--dataset_name", "in.csv", "--output", "out.csv")


def test_a_file_of_a_folder_that_is_read_is_not_replaced(folder):
    (folder / "train.csv").write_text("prediction\n1\n")
    with pytest.raises(ArgumentError, match="is what --dataset_name reads"):
        predict("--dataset_name", ".", "--output", "train.csv")


@pytest.mark.parametrize("header", ["a,b", "a,label,prediction", "prediction,b", '"open', "\0"])
def test_what_predict_did_not_write_is_not_replaced(folder, header):
    (folder / "out.csv").write_text(f"{header}\n1,2\n")
    before = contents(folder)
    with pytest.raises(ArgumentError, match=r"'out\.csv' is there and was not written by predict"):
        predict("--dataset_name", "in.csv", "--output", "out.csv")
    assert contents(folder) == before


@pytest.mark.parametrize(
    "header", ["source_row,sequence,prediction\n", "prediction,prediction_std\n", ENDS, STREAM, ""]
)
def test_what_predict_wrote_is_replaced(folder, header):
    (folder / "predictions.csv").write_text(header)
    with pytest.raises(ArgumentError, match=NO_MODEL):
        predict("--dataset_name", "in.csv")
    assert contents(folder) == {"in.csv": ROWS, "predictions.csv": header}


def test_a_list_of_rejected_rows_that_predict_did_not_write_is_not_replaced(folder):
    (folder / "out.rejected_rows.csv").write_text("mine")
    given = ["--dataset_name", "in.csv", "--output", "out.csv"]
    with pytest.raises(ArgumentError, match=r"out\.rejected_rows\.csv is where --bad_rows drop lists rows"):
        predict(*given, "--bad_rows", "drop")
    with pytest.raises(ArgumentError, match=NO_MODEL):
        predict(*given)
    (folder / "out.rejected_rows.csv").write_text("row,column,value,rule,remedy,file\n")
    with pytest.raises(ArgumentError, match=NO_MODEL):
        predict(*given, "--bad_rows", "drop")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "names no file"),
        ("-", "names no file"),
        ("new/", "names no file"),
        ("zero\0byte", "names no file"),
        (".", "is a folder, not a file"),
        ("/dev/full", "is a device, not a file"),
        ("pipe", "is a named pipe, not a file"),
        ("x" * 300, "cannot be written: File name too long"),
        ("~nobody-of-that-name/x.csv", "cannot be written: Could not determine home"),
        (os.fsdecode(b"b\xff.csv"), "is not UTF-8"),
        ("loop", "cannot be written: "),
        ("/proc/x/y.csv", "'/proc/x' cannot be the output folder: No such file"),
        ("in.csv/x.csv", "cannot be the output folder: File exists"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_by_name(folder, name, reason):
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    names = sorted(os.listdir(folder))
    with pytest.raises(HfExtError, match=reason) as refused:
        predict("--dataset_name", "in.csv", "--output", name)
    assert "--output" in str(refused.value)
    assert "--output_dir" not in str(refused.value)
    assert isinstance(refused.value, ArgumentError | FolderError)
    assert sorted(os.listdir(folder)) == names


def test_the_home_folder_is_meant_by_its_sign(folder):
    with pytest.raises(ArgumentError, match=NO_MODEL):
        predict("--dataset_name", "in.csv", "--output", "~/new/out.csv")
    assert (folder / "home" / "new").is_dir()
    assert not (folder / "~").exists()

"""What `hf-ext predict` refuses about its output before it looks for a model, and what it leaves as it was."""

import os

import commands
import pytest

from hf_ext.errors import ArgumentError, FolderError, HfExtError

ROWS = "sequence,pKd\nMKTVL,1\nMKTAA,2\n"
NO_MODEL = "no/such/model': no folder here"  # what comes after the output was found fit


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "in.csv").write_text(ROWS)
    return tmp_path


def predict(output: str, *given: str) -> None:
    words = ["--model", "no/such/model", "--dataset_name", "in.csv", "--output", output, *given]
    commands.predict(words)


def test_the_rows_that_are_read_are_not_replaced_under_any_name(folder):
    os.symlink("in.csv", "soft.csv")
    os.link("in.csv", "hard.csv")
    for name in ("./in.csv", "~/../in.csv", "soft.csv", "hard.csv"):
        with pytest.raises(ArgumentError, match="is what --dataset_name reads"):
            predict(name, "--bad_rows", "drop")
    (folder / "train.csv").write_text("prediction\n1\n")
    with pytest.raises(ArgumentError, match="is what --dataset_name reads"):
        predict("train.csv", "--dataset_name", ".")  # a file of a folder
    assert (folder / "in.csv").read_text() == ROWS


def test_only_what_predict_wrote_is_replaced(folder):
    output = folder / "out.csv"
    for header in ("a,b", "a,source_row,label,prediction", "prediction,b", "prediction", '"open', "\0"):
        output.write_text(f"{header}\n1,2\n")
        with pytest.raises(ArgumentError, match=r"'out\.csv' is there and was not written by hf-ext predict"):
            predict("out.csv")
        assert output.read_text() == f"{header}\n1,2\n"
    for header in ("label,source_row,prediction,prediction_low,prediction_high\n", ""):
        output.write_text(header)
        with pytest.raises(ArgumentError, match=NO_MODEL):
            predict("out.csv")


def test_a_list_of_rejected_rows_that_predict_did_not_write_is_not_replaced(folder):
    (folder / "out.rejected_rows.csv").write_text("mine")
    with pytest.raises(
        ArgumentError, match=r"out\.rejected_rows\.csv' is there and was not written by --bad_rows drop"
    ):
        predict("out.csv", "--bad_rows", "drop")
    with pytest.raises(ArgumentError, match=NO_MODEL):
        predict("out.csv")
    (folder / "out.rejected_rows.csv").write_text("row,column,value,rule,remedy,file\n")
    with pytest.raises(ArgumentError, match=NO_MODEL):
        predict("out.csv", "--bad_rows", "drop")


def test_an_output_that_cannot_be_written_is_refused_by_name(folder):
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    names = sorted(os.listdir(folder))
    for name, reason in (
        ("", "names no file"),
        ("new/", "names no file"),
        (".", "is a folder, not a file"),
        ("pipe", "is a named pipe, a socket or a device, not a file"),
        ("x" * 300, "cannot be written: File name too long"),
        ("~nobody-of-that-name/x.csv", "cannot be written: Could not determine home"),
        ("loop", "cannot be written: "),
        ("in.csv/x.csv", "cannot be the output folder: File exists"),
    ):
        with pytest.raises(HfExtError, match=reason) as refused:
            predict(name)
        assert "--output" in str(refused.value)
        assert "--output_dir" not in str(refused.value)
        assert isinstance(refused.value, ArgumentError | FolderError)
    assert sorted(os.listdir(folder)) == names


def test_the_home_folder_is_meant_by_its_sign(folder):
    with pytest.raises(ArgumentError, match=NO_MODEL):
        predict("~/new/out.csv")
    assert (folder / "home" / "new").is_dir()

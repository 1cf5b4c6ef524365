"""Files that are not what they are called, that never end, or hold what no table can: named, and never waited for."""

import gzip
import io
import json
import logging
import os
import socket
import zipfile

import pytest
from one_table import read_table

from hf_ext.data.arguments import DataArguments
from hf_ext.data.loading import load_data, load_sequences
from hf_ext.errors import DataError

CSV = "sequence,label\nMKTVL,1.5\nMKTAA,2\n"


def fault(path, columns=None, **kwargs):
    with pytest.raises(DataError) as error:
        list(read_table(str(path), columns, **kwargs))
    assert str(error.value).startswith(str(path))
    assert str(error.value).isprintable()
    return str(error.value)


@pytest.mark.parametrize(("name", "streaming"), [("a.csv", True), ("a.jsonl.gz", False), ("a.parquet", False)])
def test_pipes_and_devices_are_refused_at_once(tmp_path, name, streaming):
    os.mkfifo(tmp_path / name)
    assert "is a named pipe, not a regular file" in fault(tmp_path / name, streaming=streaming)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    assert "is a device, not a regular file" in fault(tmp_path / name, streaming=streaming)
    (tmp_path / name).unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / name))
        assert "is a socket, not a regular file" in fault(tmp_path / name, streaming=streaming)


def test_a_record_without_end_is_never_held_whole(tmp_path):
    (tmp_path / "a.csv").write_text('sequence,label\n"' + "a\n" * 100_000)
    assert "Look for a quote that is never closed" in fault(tmp_path / "a.csv")


def workbook() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/workbook.xml", "<workbook/>")
    return sink.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        workbook(),
        b"PAR1" + b"\x15\x04\0" * 50 + b"PAR1",
        CSV.encode("utf-16"),
        CSV.encode("utf-16-be"),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz"])
def test_what_is_no_text_is_said_to_be_none(tmp_path, name, content):
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert "row 1: not UTF-8 text" in fault(tmp_path / name)
    assert "(Excel, zip)" in fault(tmp_path / name)


@pytest.mark.parametrize("content", [workbook(), CSV.encode(), b""])
def test_another_kind_of_file_named_parquet_is_named(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    assert "not a readable Parquet file" in fault(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["~nobody-of-this-name/a.csv", "x" * 300 + ".csv", "\udcff.csv"])
def test_a_path_that_cannot_be_looked_up_is_named(name):
    with pytest.raises(DataError, match="cannot be looked up"):
        read_table(name)


def test_half_a_character_in_json_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"sequence": "MKTVL", "id": "r1"}\n{"sequence": "MKTVL", "id": "\\ud800"}\n')
    assert "'\\ud800' holds half of a character" in fault(path)
    assert "half of a character" in fault(path, ["sequence", "id"], streaming=True)
    assert len(read_table(str(path), ["sequence"])) == 2
    path.write_text('{"sequence": "MKTVL", "id": "\\ud83e\\uddec"}\n')
    assert read_table(str(path))["id"][:] == ["\U0001f9ec"]


def test_names_in_messages_stand_on_one_printable_line(tmp_path):
    (tmp_path / "a.csv").write_text('sequence,"a\tb\x1b[31m\u202e","' + "x" * 200 + '"\nM,1,2\n')
    message = fault(tmp_path / "a.csv", ["label"])
    assert "Columns: sequence, a\\tb\\x1b[31m\\u202e, " + "x" * 57 + "..." in message
    (tmp_path / "b.jsonl").write_text('{"a\\ud800\\n": 1}\n')
    assert "'a\\ud800\\n' holds half" in fault(tmp_path / "b.jsonl")


def test_a_json_number_that_float64_cannot_hold_stays_as_it_is_written(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 12345678901234567891}\n{"id": 2}\n')
    assert read_table(str(path))["id"][:] == ["12345678901234567891", "2"]
    path.write_text('{"id": 9007199254740993}\n{"id": 0.5}\n')
    assert read_table(str(path))["id"][:] == ["9007199254740993", "0.5"]
    path.write_text('{"id": 1' + "0" * 400 + '}\n{"id": 0.5}\n')
    assert read_table(str(path))["id"][:] == ["1" + "0" * 400, "0.5"]


STRAY = 'id,sequence,note,label\nr1,MKTVL,"x,1\nr2,MKTAA,y,2\nr3,MKTCC,z",3\nr4,MKTDD,x,4\n'


def test_rows_that_stray_quotes_join_are_refused_even_in_a_column_that_is_not_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(STRAY)
    expected = "rows 2 to 4: two quotes make one record of these 3 lines, each of which has the 4 fields of a row"
    assert expected in fault(path, ["sequence", "label"])
    assert expected in fault(path, ["sequence"], streaming=True)


def test_a_text_over_several_lines_is_read_and_announced(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text('id,note,sequence\nr1,"binds, and\nfolds",MKTVL\nr2,x,MKTAA\nr3,"a\n\nb",MKTCC\n')
    with caplog.at_level(logging.WARNING):
        data = read_table(str(path), ["sequence"])
    assert data["source_row"][:] == [2, 4, 5]
    assert (
        "2 records run over several lines, because a quoted field holds a line end: rows 2 to 3, 5 to 7." in caplog.text
    )


def test_a_line_end_in_an_id_is_refused_or_dropped_by_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,sequence\nr1,MKTVL\n"r2\nr3",MKTAA\nr4,MKTCC\n')
    args = DataArguments(dataset_name=str(path), id_column="id")
    with pytest.raises(DataError, match=r"row 3, column 'id', value 'r2\\nr3': a line end inside the text"):
        load_sequences(args)
    args = DataArguments(dataset_name=str(path), id_column="id", bad_rows="drop")
    assert load_sequences(args, output_dir=tmp_path).table["id"][:] == ["r1", "r4"]


@pytest.mark.parametrize("cell", ["1" * 100_000 + "x", " " * 100_000 + "x" + " " * 20_000 + "y"])
def test_a_long_cell_that_is_no_number_is_refused_in_time(tmp_path, cell):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"sequence": "MKTVL", "label": label}) for label in ("1", "2", cell)))
    with pytest.raises(DataError, match="row 3, column 'label'"):
        load_data(DataArguments(dataset_name=str(path)), output_dir=None, seed=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_truth_values_are_neither_sequences_nor_labels(tmp_path, streaming):
    path = tmp_path / "a.jsonl"
    path.write_text('{"sequence": true, "label": 1}\n' * 3)
    with pytest.raises(DataError, match="row 1, column 'sequence', value 'True': a sequence must be text, not bool"):
        list(load_sequences(DataArguments(dataset_name=str(path), streaming=streaming)).table)
    path.write_text('{"sequence": "MKTVL", "label": true}\n' * 3)
    with pytest.raises(DataError, match="column 'label': True look like names of classes"):
        list(
            load_data(DataArguments(dataset_name=str(path), streaming=streaming), output_dir=None, seed=0).splits[
                "train"
            ]
        )
    path.with_suffix(".csv").write_text("sequence\nMKTVL\nFALSE\nTrue\n")
    with pytest.raises(DataError, match=r"2 values cannot be used:\n.*row 3, .*'FALSE' reads as a truth value"):
        list(load_sequences(DataArguments(dataset_name=str(path.with_suffix(".csv")), streaming=streaming)).table)
